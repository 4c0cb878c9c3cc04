"""`lt2 eval`, `lt2 compare` and `lt2 paper-table`. Everything heavy is imported by the command that needs it."""

from __future__ import annotations

import hashlib
from contextlib import nullcontext
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, TypeVar

import typer

from lt2_workflows.commands.options import AskedByOption, JsonOption, StorageOption, check_template, config_error

if TYPE_CHECKING:
    from lt2_platform.evaluate.config import HarnessConfig
    from lt2_platform.results.index import Index
    from lt2_platform.storage import Storage

Number = TypeVar("Number", int, float)


def evaluate(
    checkpoint: Annotated[
        str,
        typer.Argument(
            metavar="CHECKPOINT", help="A checkpoint, its folder, a run's name, an HF model folder, or a .gguf file."
        ),
    ],
    pack: Annotated[str, typer.Option(metavar="PACK", help="The evaluation pack to read (`lt2 pack build`).")],
    suite: Annotated[str, typer.Option(help="core, recall, needles, ruler, reasoning, or tasks=NAME,NAME.")] = "core",
    loops: Annotated[
        str | None, typer.Option(metavar="N,N", help="Depths to evaluate at. [default: as trained]")
    ] = None,
    exit_thresholds: Annotated[
        str | None, typer.Option(metavar="P,P", help="Exit thresholds to evaluate at as well; they need an exit gate.")
    ] = None,
    limit: Annotated[int | None, typer.Option(min=1, help="Items per task, for a quick look. [default: all]")] = None,
    num_fewshot: Annotated[
        int | None, typer.Option(min=0, help="Examples before each item. [default: as the task defines]")
    ] = None,
    batch_size: Annotated[int, typer.Option(min=1)] = 16,
    max_length: Annotated[
        int | None, typer.Option(min=2, help="Window in tokens. [default: the model's, or a needle's]")
    ] = None,
    chat: Annotated[
        bool, typer.Option("--chat", help="Ask in chats, with the template the model was trained on.")
    ] = False,
    template: AskedByOption = None,
    multiturn: Annotated[
        bool, typer.Option(help="In chats, examples are separate turns, or part of the question.")
    ] = True,
    system: Annotated[str, typer.Option(help="System message of the chats.")] = "",
    actors: Annotated[int, typer.Option(min=0, help="Copies of the model on Ray; 0 evaluates in this process.")] = 0,
    storage: StorageOption = None,
    json_: JsonOption = False,
) -> None:
    """Evaluate a model on a suite; the same command resumes an interrupted evaluation."""
    from lt2_platform.evaluate.checkpoints import evaluate_anything
    from lt2_platform.evaluate.harness.models import ModelSource
    from lt2_platform.evaluate.harness.tasks import packs, suites
    from lt2_platform.evaluate.tasks import depth_table
    from lt2_platform.json_values import sha256_of
    from lt2_platform.storage import Storage
    from lt2_workflows.console import Console, as_json, table
    from lt2_workflows.engine.local_ray import ray_for
    from lt2_workflows.provenance import log_evaluations

    check_template(template)
    if not (chat or template) and (system or not multiturn):
        option = "--system" if system else "--no-multiturn"
        raise config_error(f"{option} needs --chat or --template NAME")
    root = Storage(storage)
    place, run = located(root, checkpoint)
    root.check_writable()
    depths: dict[str, Any] = {
        "loops": numbers("--loops", loops, int, "comma-separated whole numbers, e.g. 1,2,4"),
        "exit_thresholds": numbers(
            "--exit-thresholds", exit_thresholds, float, "comma-separated numbers, e.g. 0.5,0.9"
        ),
    }
    config = harness_config(
        suite,
        pack=pack,
        limit=limit,
        num_fewshot=num_fewshot,
        batch_size=batch_size,
        max_length=max_length,
        chat=template or chat,
        multiturn=multiturn,
        system=system,
    )
    packs.require(pack, suites.suite_tasks(config.suite, config.tasks))  # before a model is loaded
    if not config.chat and not place.endswith(".gguf") and ModelSource(place).chat_templates():
        typer.echo(f"{checkpoint} was trained on conversations; --chat uses their template", err=True)
    out = root.join("evals", run, sha256_of([config.model_dump(mode="json"), place])[:12])
    console = Console()
    progress = lambda values: console.say({"event": "progress", "step": "evaluate", "values": values})  # noqa: E731
    try:
        with ray_for(actors) if actors else nullcontext():
            found = evaluate_anything(place, [config], out=out, actors=actors, progress=progress, **depths)
    except KeyboardInterrupt:
        console.clear()
        typer.echo("lt2: stopped; the same command continues from here", err=True)
        raise typer.Exit(130) from None
    finally:
        console.clear()
    log_evaluations(root, run, place, found.evaluations())
    if json_:
        typer.echo(as_json(found.rows))
        return
    shown = depth_table(found.rows)
    columns = ["task", "metric", "value", "stderr", "n"]
    columns += [key for key in ("votes", "chat") if any(key in row for row in shown)]
    columns += ["n_loops", "early_exit"] * any(depths.values()) + ["exit_threshold"] * bool(depths["exit_thresholds"])
    typer.echo(table(shown, columns + ["mean_loops", "flops_per_token"] * any(depths.values())))
    typer.echo(f"stored as {run} in {root.root}; items and answers in {out}")


def numbers(option: str, text: str | None, kind: type[Number], wanted: str) -> list[Number]:
    """The values of an option that takes several."""
    try:
        return [kind(part) for part in text.split(",")] if text else []
    except ValueError:
        raise config_error(f"{option} {text}: give {wanted}") from None


def compare(
    a: Annotated[
        str, typer.Argument(metavar="A", help="A run's name, a model's folder, or the folder of an evaluation.")
    ],
    b: Annotated[str, typer.Argument(metavar="B")],
    storage: StorageOption = None,
    json_: JsonOption = False,
) -> None:
    """Differences between two evaluated models, with their significance: of tasks on the items both answered, of
    perplexity and losses by position on the same text.

    A run evaluated at several depths is compared at the depth it was trained with.
    """
    from lt2.config import ConfigError
    from lt2_platform.evaluate.compare import compare as compare_items
    from lt2_platform.evaluate.compare import compare_losses
    from lt2_platform.results.store import ResultsStore
    from lt2_platform.storage import Storage
    from lt2_workflows.console import as_json, table

    root = Storage(storage)
    runs = [compared_run(root, name) for name in (a, b)]
    index = ResultsStore(root).index()
    losses = compare_losses(*(stored_losses(index, run) for run in runs))
    try:
        left, right = (evaluation_folder(root, name, run) for name, run in zip((a, b), runs))
        rows = compare_items(left, right, (trained_depth(root, index, left), trained_depth(root, index, right)))
        rows += losses
    except ConfigError as error:
        if not losses:
            raise
        rows = losses
        typer.echo(f"no items of tasks are compared: {error}", err=True)
    if json_:
        typer.echo(as_json(rows))
        return
    typer.echo(table(rows, ["task", "metric", "a", "b", "difference", "stderr", "p_value", "n", "note"]))
    typer.echo(
        f"\na is {a}, b is {b}; the difference is b - a, stderr its standard error, n the items (of losses the tokens) "
        "of both. Errors are over items and text; what another seed of training would change is not in them."
    )


def stored_losses(index: Index, run: str | None) -> dict[tuple[str, str], dict[str, Any]]:
    """A run's losses over text by task and metric, those that `compare_losses` can tell apart from chance."""
    from lt2_platform.evaluate.repeats import counting

    rows = [row for of, name, row in index.evals if of == run and name == "validation" and "groups" in row]
    return counting(((row["task"], row["metric"]), row) for row in rows)


def paper_table(
    runs: Annotated[
        list[str] | None, typer.Argument(metavar="[RUN]...", help="Runs or workflows. [default: all with results]")
    ] = None,
    which: Annotated[
        str, typer.Option("--table", help="main, or recall: the long-context table, recall and needles at 1.3B.")
    ] = "main",
    scale: Annotated[str, typer.Option(help="Scale of the main table: 0.6B or 1.3B.")] = "1.3B",
    format_: Annotated[str, typer.Option("--format", help="text, csv or latex.")] = "text",
    storage: StorageOption = None,
) -> None:
    """The paper's main or long-context table with our runs beside it; averages are recomputed."""
    from lt2_platform.evaluate.paper import formats, long_context, main_table
    from lt2_platform.evaluate.repeats import other_text, quick_look
    from lt2_platform.results.store import ResultsStore
    from lt2_platform.results.tables import as_number
    from lt2_platform.storage import Storage
    from lt2_workflows.commands.records import runs_named
    from lt2_workflows.console import table

    if which not in ("main", "recall"):
        raise config_error(f"unknown table {which!r}; use main or recall")
    if format_ not in ("text", "csv", "latex"):
        raise config_error(f"unknown format {format_!r}; use text, csv or latex")
    if which == "recall" and scale != "1.3B":
        raise config_error(f"--scale {scale}: the paper has its long-context table at 1.3B only")
    by_run: dict[str, list[dict[str, Any]]] = {}
    root = Storage(storage)
    root.check_readable()
    for run, name, row in ResultsStore(root).index().evals:
        if name == "validation" and as_number(row.get("value")) is not None:
            by_run.setdefault(run, []).append(row)
    chosen = runs_named(root, by_run, runs, "with evaluations; those with some") if runs else sorted(by_run)
    kind = long_context if which == "recall" else main_table
    found = {run: scores for run in chosen if (scores := kind.scores_of(by_run[run]))}
    rows = long_context.compared(found) if which == "recall" else main_table.compared(found, scale)
    for row in rows:
        own = by_run[row["model"]] if row["source"] == "ours" else []
        told = (quick_look(own, kind.TASKS), other_text(own) if which == "main" else "", row["note"])
        row["note"] = "; ".join(part for part in told if part)
    if format_ == "text":
        shown = [
            {key: round(value, 2) if isinstance(value, float) else value for key, value in row.items()} for row in rows
        ]
        typer.echo(table(shown, ["model", *kind.COLUMNS, "note"]))
        return
    write = formats.as_csv if format_ == "csv" else formats.as_latex
    typer.echo(write(rows, kind.COLUMNS), nl=False)


def harness_config(suite: str, **fields: Any) -> HarnessConfig:
    """The config for --suite: a suite's name, or tasks=NAME,NAME. Raises ConfigError for an unknown suite."""
    from lt2_platform.evaluate.config import HarnessConfig
    from lt2_platform.evaluate.harness.tasks.suites import suite_tasks

    key, equals, names = suite.partition("=")
    if equals and key == "tasks":
        tasks = tuple(name.strip() for name in names.split(",") if name.strip())
        if not tasks:
            raise config_error(f"--suite {suite} names no task; give tasks=NAME,NAME")
        return HarnessConfig(tasks=tasks, **fields)
    suite_tasks(suite, ())
    return HarnessConfig.model_validate({"suite": suite, **fields})


def located(root: Storage, name: str) -> tuple[str, str]:
    """(where the model is, name of its run in the results store)."""
    from lt2_workflows.commands.models import find_checkpoint

    place = find_checkpoint(root, name)
    if place != name:
        return place, root.relative(place).split("/")[1]
    if "://" not in name and not Path(name).expanduser().exists():
        raise config_error(f"{name} does not exist; give a checkpoint, a model folder, or a run (`lt2 status`)")
    return outside(name)


def outside(path: str) -> tuple[str, str]:
    """As `located`, for a model that is a path or URI and no run of the store."""
    place = path if "://" in path else str(Path(path).expanduser().resolve())
    return place, f"eval-{Path(place).stem}-{hashlib.sha256(place.encode()).hexdigest()[:8]}"


def compared_run(root: Storage, name: str) -> str | None:
    """The run that a name stands for in comparisons, a workflow's too; None for a model's path, or a folder."""
    if "/" in name:
        return None
    root.check_readable()
    return name if root.exists(f"evals/{name}") else scored_run(root, name) or located(root, name)[1]


def evaluation_folder(root: Storage, name: str, run: str | None) -> str:
    """Where the evaluations are of a run, or of a model's path that was evaluated; else a folder of them."""
    if run is None:
        inside = name if name.startswith("evals/") else f"evals/{outside(name)[1]}"
        return root.join(inside) if root.exists(inside) else name
    if not root.exists(f"evals/{run}"):
        raise config_error(f"no evaluation of {name!r} under {root.root}; run `lt2 eval {name}` first")
    return root.join("evals", run)


def scored_run(root: Storage, workflow: str) -> str | None:
    """The newest run of a workflow that has scored items: its very newest may have none, where one is trained further
    and only the first was asked. None for what is no such workflow. Which run that is, is said where it has several."""
    from lt2_workflows.engine.records import list_workflows

    steps = [step for each in list_workflows(root) if workflow in (each["id"], each["name"]) for step in each["steps"]]
    scored = {
        step["id"]: step["ended"] or float("inf")
        for step in steps
        if root.exists(f"evals/{step['id']}") and root.glob(f"evals/{step['id']}/**/samples/*.jsonl")
    }
    if not scored:
        return None
    newest = max(scored, key=lambda run: scored[run])
    if sum(root.exists(f"steps/{step['id']}/out/checkpoints") for step in steps) > 1:
        typer.echo(
            f"{workflow}: {newest}, its newest run with scored items; `lt2 status {workflow}` lists all", err=True
        )
    return newest


def trained_depth(root: Storage, index: Index, folder: str) -> str | None:
    """The folder name of a run's evaluations at its own depth; None if there are none, and for other folders."""
    from lt2_platform.evaluate.compare import own_depth

    run = folder.removeprefix(root.join("evals") + "/")
    info = index.runs.get(run)
    depth = None if info is None else own_depth(info.config)
    return depth if depth and root.glob(f"evals/{run}/**/{depth}/samples/*.jsonl") else None
