"""Commands that read what workflows left in storage: status, report, results."""

from __future__ import annotations

import json
from typing import TYPE_CHECKING, Annotated

import typer

from lt2_workflows.commands.evaluation import JsonOption, StorageOption

if TYPE_CHECKING:
    from lt2_platform.storage import Storage


def status(
    workflow: Annotated[
        str | None, typer.Argument(help="A workflow's id or name; if left out, all but the trials of sweeps.")
    ] = None,
    storage: StorageOption = None,
    json_: JsonOption = False,
) -> None:
    """Show every workflow's steps: state, attempts, errors, logs."""
    from lt2_workflows.console import table
    from lt2_workflows.engine.records import list_workflows

    root = readable(storage)
    found = list_workflows(root, workflow)
    if json_:
        typer.echo(json.dumps(found, indent=2))
        return
    if not found:
        typer.echo(f"no workflows yet in {root.root}")
    for item in found:
        if workflow is None and "part_of" in item:
            continue
        typer.echo(f"{item['id']}")
        steps = item["steps"] if "error" not in item else [{"state": "unreadable", "error": item["error"]}]
        typer.echo(table(steps, ["name", "state", "attempt", "id", "error", "log"]) + "\n")


def report(
    workflow: Annotated[str, typer.Argument(metavar="WORKFLOW", help="A workflow's id or name.")],
    storage: StorageOption = None,
) -> None:
    """Write a workflow's report, Markdown and one HTML file, into its folder: steps, numbers, curves, sweeps."""
    from lt2_workflows.report import write_report

    root = readable(storage)
    typer.echo(root.join(write_report(root, workflow), "report.html"))


def results(storage: StorageOption = None, json_: JsonOption = False) -> None:
    """Show the numbers of every run: run, step, metric, value, and how the runs' configs differ."""
    from lt2_platform.results.store import ResultsStore
    from lt2_workflows.console import table

    rows = ResultsStore(readable(storage)).results()
    if json_:
        typer.echo(json.dumps(rows, indent=2))
        return
    shown = [row | {"config": row["config"] or None} for row in rows]
    typer.echo(table(shown, ["run", "step", "metric", "value", "config"]))


def readable(root: str | None, *, new: bool = False) -> Storage:
    """A mistyped root must not look like an empty one. new: a local folder need not exist yet."""
    from lt2_platform.storage import Storage

    storage = Storage(root)
    storage.check_readable(new=new)
    return storage
