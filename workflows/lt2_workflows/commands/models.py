"""Commands about models rather than workflows: check-mixer, checkpoints, bench mixers."""

from __future__ import annotations

import json
import tempfile
import time
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from lt2_workflows.commands.options import JsonOption, StorageOption, chosen_device
from lt2_workflows.commands.overview import Group

if TYPE_CHECKING:
    from lt2_platform.storage import Storage

bench = typer.Typer(cls=Group, help="Measure on this machine.", no_args_is_help=True, rich_markup_mode=None)

DEFAULT_MIXERS = "full,window,gdn,kda,deltanet,mamba2,gla,retnet"


def check_mixer(
    mixer: Annotated[str, typer.Argument(metavar="MIXER", help="path.py:MyMixerConfig, or a shipped type.")],
    fields: Annotated[str, typer.Option(help="Config fields as JSON, e.g. '{\"window\": 8}'.")] = "{}",
    dim: Annotated[int, typer.Option(min=1)] = 32,
    num_heads: Annotated[int, typer.Option("--heads", min=1)] = 2,
    seq_len: Annotated[int, typer.Option(min=12)] = 24,
) -> None:
    """Check a mixer of your own, in fp64: decoding, padding, packed documents, caches, accounting, gradients."""
    from lt2.analysis.check_mixer import check_mixer as run_checks
    from lt2.config import ConfigError

    given = read_json(fields, "--fields")
    if not isinstance(given, dict):
        raise ConfigError(f"--fields {fields}: give an object, such as '{{\"window\": 8}}'")
    report = run_checks(mixer, fields=given, dim=dim, num_heads=num_heads, seq_len=seq_len)
    typer.echo(str(report))
    raise typer.Exit(0 if report.passed else 1)


def check_writable(folder: Path) -> None:
    from lt2.config import ConfigError
    from lt2_platform.storage_errors import reason

    if str(folder).split("/")[0].endswith(":"):  # s3://…, of which a Path keeps one slash
        raise ConfigError(f"{folder} is no folder of this machine, where this is written; choose one and copy it there")
    try:
        folder.parent.mkdir(parents=True, exist_ok=True)
        tempfile.TemporaryFile(dir=folder.parent).close()
    except OSError as error:
        raise ConfigError(f"{folder} cannot be written ({reason(error)}); choose another folder") from error


def checkpoints(
    run: Annotated[str, typer.Argument(metavar="RUN", help="A run's name or folder, or a folder of checkpoints.")],
    verify: Annotated[bool, typer.Option("--verify", help="Read every file and compare its sha256.")] = False,
    prune: Annotated[
        str | None,
        typer.Option(metavar="POLICY", help="Keep these and delete the others, e.g. last=2,every=10000,best."),
    ] = None,
    json_: JsonOption = False,
    storage: StorageOption = None,
) -> None:
    """List, verify or prune a run's checkpoints. Exit code 1 if --verify finds damage."""
    from lt2_platform.storage import Storage
    from lt2_platform.train.checkpoints import inventory
    from lt2_platform.train.checkpoints.retention import Keep
    from lt2_workflows.console import as_json, table

    policy = None if prune is None else Keep.parse(prune)
    folder = inventory.folder_of(find_checkpoint(Storage(storage), run))
    if policy is not None:
        Storage(folder).check_writable()
    found = inventory.entries(folder, verify=verify)
    gone = [] if policy is None else inventory.prune(folder, policy, verified=found)
    for record in found:
        record["deleted"] = record["checkpoint"] in gone
    if json_:
        typer.echo(as_json({"folder": folder, "checkpoints": found}))
    else:
        columns = ["checkpoint", "size_mb", "complete", "intact", "validation_loss", "best", "deleted"]
        mark = {True: "yes", False: ""}
        rows = [
            record
            | {"size_mb": record["bytes"] / 1e6, "complete": "yes" if record["complete"] else "NO"}
            | {"best": mark[record["best"]], "deleted": mark[record["deleted"]]}
            | {"intact": "" if record["problems"] is None else "; ".join(record["problems"]) or "yes"}
            for record in found
        ]
        typer.echo(f"{folder}\n{table(rows, columns)}")
    raise typer.Exit(1 if any(record["complete"] and record["problems"] for record in found) else 0)


@bench.callback()
def bench_help() -> None:
    """Measure on this machine."""


@bench.command("mixers")
def bench_mixers(
    dim: Annotated[int, typer.Option(min=1)] = 1024,
    num_heads: Annotated[int, typer.Option("--heads", min=1)] = 16,
    seq_len: Annotated[int, typer.Option(min=128, help="Longest length; lengths double from 512 up to it.")] = 8192,
    mixers: Annotated[
        str,
        typer.Option(
            help='Comma-separated types or path.py:MyMixerConfig, or JSON: [{"type": "window", "window": 512}].'
        ),
    ] = DEFAULT_MIXERS,
    batch: Annotated[int, typer.Option(min=1)] = 1,
    device: Annotated[str | None, typer.Option(help="cpu or cuda. [default: cuda if available]")] = None,
    out: Annotated[Path | None, typer.Option(help="Also write OUT.json and the plot OUT.png.")] = None,
    storage: Annotated[
        str | None, typer.Option("--storage", metavar="ROOT", help="Also keep the rows there, for the dashboard.")
    ] = None,
) -> None:
    """Time, memory and cache of whole mixer layers at your shape.

    Also the length from which each beats full attention.
    """
    import torch

    from lt2.analysis.layer_bench import bench_layers, crossover, name
    from lt2.config import ConfigError
    from lt2_platform.storage import Storage
    from lt2_workflows.console import as_json, table

    if storage is not None:
        Storage(storage).check_writable()
    if out is not None:
        check_writable(out)
    where = chosen_device(device)
    listed = mixers.lstrip().startswith("[")
    chosen = read_json(mixers, "--mixers") if listed else [_named(mixer) for mixer in mixers.split(",")]
    for fields in chosen:
        if not isinstance(fields, dict) or "type" not in fields:
            raise ConfigError(f'--mixers: {json.dumps(fields)} is not a mixer; give objects like {{"type": "gdn"}}')
    if not any(fields.get("type") == "full" for fields in chosen):
        chosen = [{"type": "full"}, *chosen]
    lengths = doubling(min(512, seq_len), seq_len)
    dtype = torch.bfloat16 if where == "cuda" else torch.float32
    rows = []
    for row in bench_layers(
        chosen, dim=dim, num_heads=num_heads, seq_lens=lengths, batch=batch, device=where, dtype=dtype
    ):
        rows.append(row)
        typer.echo(f"\r{row['mixer']} at {row['seq_len']:,}        ", err=True, nl=False)
    typer.echo("", err=True)
    columns = ["mixer", "seq_len", "train_ms", "us_per_token", "decode_ms", "saved_bytes", "peak_bytes", "cache_bytes"]
    typer.echo(table([{c: row.get(c) for c in columns} for row in rows], columns))
    typer.echo("")
    for fields in chosen:
        if fields["type"] == "full":
            continue
        at = crossover(rows, name(fields))
        text = f"faster than full attention from {at:,.0f} tokens" if at else f"not faster up to {lengths[-1]:,} tokens"
        typer.echo(f"{name(fields):<24} {text}")
    if storage is not None:
        settings = {"dim": dim, "num_heads": num_heads, "batch": batch, "device": where, "dtype": str(dtype)[6:]}
        typer.echo(f"stored as {store_bench(storage, settings, rows)}: lt2 dashboard --storage {storage}")
    if out is not None:
        # Not with_suffix: of "bench-0.6b" it takes ".6b" for one.
        Path(f"{out}.json").write_text(as_json(rows) + "\n")
        plot(rows, Path(f"{out}.png"), f"dim {dim}, {num_heads} heads, batch {batch}, {where}")


def _named(mixer: str) -> dict[str, Any]:
    """The fields of "gdn" or "path.py:MyMixerConfig"."""
    from lt2.analysis.check_mixer import load_mixer

    config = load_mixer(mixer.strip(), {})
    return {"type": config.type} | ({"source": config.source} if config.source else {})


def store_bench(root: str, settings: dict[str, Any], rows: list[dict[str, Any]]) -> str:
    """Keep a measurement of layers as a run of its own; returns the run's name."""
    from lt2_platform.results.store import ResultsStore
    from lt2_platform.storage import Storage
    from lt2_workflows.provenance import provenance

    store, run = ResultsStore(Storage(root)), f"bench-mixers-{time.strftime('%Y%m%d-%H%M%S', time.gmtime())}"
    store.create_run(run, {"config": settings, **provenance()}).close()
    kept = [{"task": row["mixer"], "metric": "us_per_token", "value": row.get("us_per_token"), **row} for row in rows]
    store.log_eval(run, "mixers", kept)
    return run


def plot(rows: list[dict[str, Any]], path: Path, title: str) -> None:
    """Microseconds per token (left) and milliseconds per decoded token (right) over the length, both log-log."""
    import matplotlib

    matplotlib.use("Agg")
    import matplotlib.pyplot as plt

    figure, axes = plt.subplots(1, 2, figsize=(10, 4), layout="constrained")
    for axis, key, label in zip(axes, ("us_per_token", "decode_ms"), ("train, µs per token", "decode, ms per token")):
        for mixer in dict.fromkeys(row["mixer"] for row in rows):
            points = [(row["seq_len"], row[key]) for row in rows if row["mixer"] == mixer and key in row]
            axis.plot(*zip(*points), marker="o", markersize=3, linewidth=1.2, label=mixer)
        axis.set(xscale="log", yscale="log", xlabel="sequence length", ylabel=label)
        axis.grid(visible=True, which="both", linewidth=0.3)
    axes[0].legend(fontsize=7)
    figure.suptitle(title, fontsize=9)
    figure.savefig(path, dpi=130)
    plt.close(figure)


def find_checkpoint(storage: Storage, name: str) -> str:
    """Where the checkpoints of `name` are: a path or URI; or, under the storage root, a run or a workflow's newest run.

    Which run that is, is said where the workflow has several.

    Raises:
        ConfigError: nothing of that name, with the names there are; or the storage cannot be read.
    """
    from lt2.config import ConfigError
    from lt2_workflows.engine.records import list_workflows

    if "/" in name or Path(name).exists():
        return name
    storage.check_readable()
    if storage.exists(f"steps/{name}/out"):
        return storage.join("steps", name, "out")
    if storage.exists(f"runs/{name}/checkpoints"):  # where docs/training.md has torchrun train
        return storage.join("runs", name)
    workflows = list_workflows(storage)
    trained = [
        (step["ended"] or float("inf"), workflow, step["id"])  # one that is still training is the newest
        for workflow in workflows
        for step in workflow["steps"]
        if storage.exists(f"steps/{step['id']}/out/checkpoints")
    ]
    mine = [(when, run) for when, workflow, run in trained if name in (workflow["id"], workflow["name"])]
    if not mine:
        known = sorted({run for _, _, run in trained} | {workflow["name"] for _, workflow, _ in trained})
        there = f"those in {storage.root}: {', '.join(known)}" if known else f"{storage.root} has none yet"
        raise ConfigError(f"no checkpoint, run or workflow {name!r}; {there}")
    newest = max(mine)[1]
    if len(mine) > 1:
        typer.echo(f"{name}: {newest}, the newest of {len(mine)} runs; `lt2 status {name}` lists them", err=True)
    return storage.join("steps", newest, "out")


def doubling(first: int, last: int) -> list[int]:
    lengths = [first]
    while lengths[-1] * 2 <= last:
        lengths.append(lengths[-1] * 2)
    return lengths if lengths[-1] == last else [*lengths, last]


def read_json(text: str, option: str) -> Any:
    from lt2.config import ConfigError

    try:
        return json.loads(text)
    except json.JSONDecodeError as error:
        raise ConfigError(f"{option} is not JSON ({error.msg} at character {error.pos}): {text}") from error
