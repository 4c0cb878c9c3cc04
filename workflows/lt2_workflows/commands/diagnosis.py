"""`lt2 diagnose` and `lt2 positions`: what a trained model does from loop to loop, and along a document."""

from __future__ import annotations

from typing import TYPE_CHECKING, Annotated, Any

import typer

from lt2_workflows.commands.evaluation import located, numbers
from lt2_workflows.commands.options import CheckpointArgument, JsonOption, StorageOption, config_error

if TYPE_CHECKING:
    from lt2_platform.storage import Storage

READINGS = ("first_token_mass", "max_abs", "rms")


DataOption = Annotated[
    str | None, typer.Option(metavar="DATASET", help="A prepared dataset. [default: what the run trained on]")
]


def diagnose(
    checkpoint: CheckpointArgument,
    data: DataOption = None,
    documents: Annotated[int, typer.Option(min=1, help="Held-out documents to read.")] = 16,
    length: Annotated[int, typer.Option(min=16, help="Tokens to read of each, from its beginning.")] = 512,
    storage: StorageOption = None,
    json_: JsonOption = False,
) -> None:
    """Attention sink, largest activation and RMS at every (loop, layer) of a trained model."""
    from lt2_platform.evaluate.checkpoints import evaluate_checkpoint
    from lt2_platform.evaluate.config import DiagnosticsConfig
    from lt2_platform.storage import Storage
    from lt2_workflows.console import as_json, table
    from lt2_workflows.provenance import log_evaluations

    root = Storage(storage)
    place, run = located(root, checkpoint)
    root.check_writable()
    found = evaluate_checkpoint(
        place,
        [DiagnosticsConfig(documents=documents, length=length)],
        data=data or data_of(root, run),
        out=root.join("evals", run, "diagnostics"),
    )
    rows = found.evaluations()["diagnostics"]
    log_evaluations(root, run, place, {"diagnostics": rows})
    if json_:
        typer.echo(as_json(rows))
        return
    lines: dict[tuple[int, int], dict[str, object]] = {}
    for row in rows:
        line = lines.setdefault((row["loop"], row["layer"]), {"loop": row["loop"] + 1, "layer": row["layer"] + 1})
        line |= {"mixer": row["mixer"], row["metric"]: row["value"]}
    typer.echo(table(list(lines.values()), ["loop", "layer", "mixer", *READINGS]))
    _say_where(root, run, f"loop_diagnostics?runs={run}")


def positions(
    checkpoint: CheckpointArgument,
    data: DataOption = None,
    length: Annotated[
        int | None, typer.Option(min=2, help="Tokens to predict per document. [default: a row of the data, or less]")
    ] = None,
    max_spans: Annotated[int | None, typer.Option(min=1, help="Spans of that length to read. [default: all]")] = None,
    batch_size: Annotated[int, typer.Option(min=1)] = 8,
    loops: Annotated[
        str | None, typer.Option(metavar="N,N", help="Depths to evaluate at. [default: as trained]")
    ] = None,
    name: Annotated[
        str | None,
        typer.Option(help="Name in the results. [default: positions; with --data or --length positions-LENGTH]"),
    ] = None,
    storage: StorageOption = None,
    json_: JsonOption = False,
) -> None:
    """Held-out loss by position in the document."""
    from lt2.layout import loops_text
    from lt2_platform.data.stream import PackedDataset
    from lt2_platform.evaluate.checkpoints import evaluate_checkpoint
    from lt2_platform.evaluate.config import PositionsConfig
    from lt2_platform.evaluate.positions import length_for
    from lt2_platform.evaluate.spans import difference, readable
    from lt2_platform.evaluate.validation import held_out_rows
    from lt2_platform.storage import Storage
    from lt2_workflows.console import as_json, table
    from lt2_workflows.provenance import log_evaluations

    root = Storage(storage)
    place, run = located(root, checkpoint)
    root.check_writable()
    depths = numbers("--loops", loops, int, "comma-separated whole numbers, e.g. 1,2,4")
    read = data or data_of(root, run)
    if name is None and (data or length):  # results of other text must not replace those of the run's own
        dataset = PackedDataset(read, "validation")
        length = length or length_for(dataset, held_out_rows(dataset, "all"))
        name = f"positions-{length}"
    found = evaluate_checkpoint(
        place,
        [PositionsConfig(length=length, max_spans=max_spans, batch_size=batch_size, name=name)],
        data=read,
        loops=depths,
        out=root.join("evals", run, "positions"),
    )
    log_evaluations(root, run, place, found.evaluations())
    rows = [row for row in found.rows if "position" in row]
    if json_:
        typer.echo(as_json([readable(row) for row in rows]))
        return
    lines: dict[int, dict[str, object]] = {}
    references: dict[int, dict[str, Any]] = {}
    for row in rows:
        first, last = row["first"], row["position"]
        line = lines.setdefault(last, {"position": f"{first}" if first == last else f"{first} to {last}"})
        depth = loops_text(row["n_loops"], row["early_exit"])
        line |= {"tokens": row["n"], f"loss, {depth}": f"{row['value']:.4f}"}
        reference = references.setdefault(last, row)
        if row is not reference and (apart := difference(reference["groups"], row["groups"])):
            error = f" ± {apart['stderr']:.4f}" if "stderr" in apart else ""
            line[f"{depth} above {loops_text(reference['n_loops'])}"] = f"{apart['value']:+.4f}{error}"
    typer.echo(table(list(lines.values()), list(dict.fromkeys(key for line in lines.values() for key in line))))
    task = f"&task={name}" if name else ""
    _say_where(root, run, f"positions?runs={run}{task}")


def _say_where(root: Storage, run: str, figure: str) -> None:
    typer.echo(f"stored as {run}: start `lt2 dashboard --storage {root.root}`, then /figures/{figure}")


def data_of(root: Storage, run: str) -> str:
    """The dataset that a run of this storage was trained on. Raises ConfigError where that is not recorded."""
    spec = root.read_json(f"steps/{run}/spec.json") if root.exists(f"steps/{run}/spec.json") else {}
    for step in (spec.get("needs") or {}).values():
        if root.exists(f"steps/{step}/out/manifest.json"):
            return root.join("steps", step, "out")
    named = (spec.get("config") or {}).get("data")
    if isinstance(named, str):
        return named
    raise config_error(f"{root.root} does not record what {run} was trained on; give --data, a prepared dataset")
