"""Commands on what workflows left in storage: status, report, results, note."""

from __future__ import annotations

import json
from collections.abc import Collection, Sequence
from fnmatch import fnmatchcase
from getpass import getuser
from textwrap import fill
from typing import TYPE_CHECKING, Annotated, Any

import typer

from lt2_workflows.commands.options import JsonOption, StorageOption

MAX_NOTE = 2_000  # characters

if TYPE_CHECKING:
    from lt2_platform.results.index import Index
    from lt2_platform.storage import Storage

LOST = "its process ended without reporting an error; the same command resumes from what it saved"


def status(
    workflow: Annotated[
        str | None,
        typer.Argument(metavar="WORKFLOW", help="A workflow's id or name. [default: all but the trials of sweeps]"),
    ] = None,
    storage: StorageOption = None,
    json_: JsonOption = False,
) -> None:
    """Show every workflow's steps: state, attempts, errors, logs; the newest last."""
    from lt2_workflows.console import as_json, table, utc
    from lt2_workflows.engine.records import list_workflows

    root = readable(storage)
    found = list_workflows(root, workflow)
    if json_:
        typer.echo(as_json(found))
        return
    if not found:
        typer.echo(f"no workflows yet in {root.root}")
    for item in sorted(found, key=_when):
        if workflow is None and "part_of" in item:
            continue
        steps = item["steps"] if "error" not in item else [{"state": "unreadable", "error": item["error"]}]
        shown = [step | {"ended (UTC)": utc(step.get("ended")), "error": _said(step)} for step in steps]
        columns = ["name", "state", "attempt", "ended (UTC)", "id", "log"]
        columns += ["error"] * any(step["error"] for step in shown)  # last: it may be long
        typer.echo(f"{item['id']}\n{table(shown, columns)}\n")


def _when(workflow: dict[str, Any]) -> tuple[float, str]:
    """Sorts by the end of the last step to end; a workflow that runs is the newest."""
    ends = [float("inf") if step["state"] == "running" else step["ended"] or 0.0 for step in workflow["steps"]]
    return max(ends, default=0.0), workflow["id"]


def _said(step: dict[str, Any]) -> str | None:
    return step["error"] or (LOST if step["state"] == "lost" else None)


def report(
    workflow: Annotated[str, typer.Argument(metavar="WORKFLOW", help="A workflow's id or name.")],
    storage: StorageOption = None,
) -> None:
    """Write a workflow's report, Markdown and one HTML file, into its folder: steps, numbers, curves, sweeps.

    If several workflows have the name, it is the newest one's.
    """
    from lt2_workflows.engine.records import list_workflows
    from lt2_workflows.report.write import write_report

    root = readable(storage)
    *older, newest = (item["id"] for item in sorted(list_workflows(root, workflow), key=_when))
    if older:
        typer.echo(f"the newest of {len(older) + 1} workflows {workflow!r}; the others: {', '.join(older)}", err=True)
    typer.echo(root.join(write_report(root, newest), "report.html"))


def results(
    runs: Annotated[
        list[str] | None, typer.Argument(metavar="[RUN]...", help="Runs or workflows. [default: all of the store]")
    ] = None,
    metrics: Annotated[
        str | None, typer.Option("--metric", metavar="PATTERN", help="Only these, e.g. 'loss' or 'validation/*'.")
    ] = None,
    storage: StorageOption = None,
    json_: JsonOption = False,
) -> None:
    """Show the numbers of runs: metric, step, value, unit, and how the runs' configs differ.

    Of repeated evaluations on a task, tables and figures use the newest complete one; the others have counts = no.
    """
    from lt2_platform.results.store import ResultsStore
    from lt2_workflows.console import as_json, table

    root = readable(storage)
    store = ResultsStore(root)
    index = store.index()
    chosen = runs_named(root, _runs(index), runs, f"with numbers; runs in {root.root}") if runs else None
    rows = store.results(chosen, index=index)
    if metrics is not None:
        rows = [row for row in rows if fnmatchcase(row["metric"], metrics)]
    if json_:
        typer.echo(as_json(rows))
        return
    if not rows:
        typer.echo("(nothing yet)" if metrics is None else f"(no metric {metrics})")
    for run in dict.fromkeys(row["run"] for row in rows):
        mine = [row for row in rows if row["run"] == run]
        typer.echo(run)
        if differs := _settings(mine[0]["config"]):
            typer.echo(fill(differs, 120, initial_indent="  ", subsequent_indent="  ", break_on_hyphens=False))
        columns = ["metric", "step", "value", "unit"]
        if any(not row["counts"] for row in mine):  # what tells repeated ones apart: few items, other text
            columns += ["counts", "n", *(["data"] if any("data" in row for row in mine) else [])]
        typer.echo(table([row | {"counts": "" if row["counts"] else "no"} for row in mine], columns) + "\n")


def _runs(index: Index) -> set[str]:
    return {*index.runs, *(run for run, _, _ in index.evals)}


def runs_named(root: Storage, known: Collection[str], names: Sequence[str], what: str) -> list[str]:
    """The runs of `known` that names of runs and of workflows stand for, in their order; a sweep's are its trials'.
    Raises ConfigError for a name that is neither; `what` says what the known ones are."""
    from lt2.config import ConfigError
    from lt2_workflows.engine.records import list_workflows

    found: dict[str, None] = {}
    workflows = list_workflows(root) if not set(names) <= set(known) else []
    for name in names:
        steps = [step["id"] for each in workflows if name in (each["id"], each["name"]) for step in each["steps"]]
        steps += [step["id"] for each in workflows if each.get("part_of") in steps for step in each["steps"]]
        runs = [name] if name in known else [step for step in steps if step in known]
        if not runs:
            raise ConfigError(f"no run or workflow {name!r} {what}: {', '.join(sorted(known)) or 'none'}")
        found.update(dict.fromkeys(runs))
    return list(found)


def note(
    run: Annotated[str, typer.Argument(metavar="RUN", help="A run, or a workflow with one run.")],
    text: Annotated[str, typer.Argument(metavar="TEXT", help="The note; '' removes all notes.")],
    storage: StorageOption = None,
) -> None:
    """Write a note on a run, for the dashboard to show. Its table of runs has the newest note."""
    from lt2.config import ConfigError
    from lt2_platform.results.store import ResultsStore

    root = readable(storage)
    store = ResultsStore(root)
    found = runs_named(root, _runs(store.index()), [run], f"in {root.root}; its runs")
    if len(found) > 1:
        raise ConfigError(f"{run} has several runs, name one: {', '.join(found)}")
    run = found[0]
    if len(text) > MAX_NOTE:
        raise ConfigError(f"the note has {len(text):,} characters; at most {MAX_NOTE:,}")
    store.log_note(run, text.strip(), _user())
    typer.echo(f"{run}: {text.strip() or 'no note'}")


def _user() -> str:
    """Who runs this; "" in a container whose user id has no name."""
    try:
        return getuser()
    except (KeyError, OSError):
        return ""


def _settings(config: dict[str, Any]) -> str:
    shown = {key: value if isinstance(value, str) else json.dumps(value) for key, value in config.items()}
    return "  ".join(f"{key}={value}" for key, value in shown.items() if value != "null")


def readable(root: str | None, *, new: bool = False) -> Storage:
    """A mistyped root must not look like an empty one. new: a local folder need not exist yet."""
    from lt2_platform.storage import Storage

    storage = Storage(root)
    storage.check_readable(new=new)
    return storage
