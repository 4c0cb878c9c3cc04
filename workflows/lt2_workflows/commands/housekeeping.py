"""`lt2 space`, `lt2 delete` and `lt2 copy`: what takes the room in a storage root, and where it goes."""

from __future__ import annotations

from typing import Annotated

import typer

from lt2_workflows.commands.options import JsonOption, StorageOption


def space(json_: JsonOption = False, storage: StorageOption = None) -> None:
    """Show what takes the room in a storage root, largest first: steps, who has them, runs of torchrun, numbers."""
    from lt2_platform.wording import first_of, size
    from lt2_workflows.commands.records import readable
    from lt2_workflows.console import as_json, table, utc
    from lt2_workflows.housekeeping.usage import usage

    root = readable(storage)
    rows = usage(root)
    if json_:
        typer.echo(as_json(rows))
        return
    shown = [
        row
        | {
            "size": size(row["bytes"]),
            "ended (UTC)": utc(row["ended"]),
            "workflows": first_of(row["workflows"], 2),
        }
        for row in rows
    ]
    typer.echo(table(shown, ["size", "files", "what", "state", "ended (UTC)", "workflows"]))
    files, whole = sum(row["files"] for row in rows), size(sum(row["bytes"] for row in rows))
    typer.echo(f"\n{whole} in {files:,} files in {root.root}; `lt2 delete WORKFLOW` gives room back")


def delete(
    workflow: Annotated[
        str, typer.Argument(metavar="WORKFLOW", help="A workflow's id or name, or a step that no workflow has.")
    ],
    yes: Annotated[bool, typer.Option("--yes", help="Do not ask.")] = False,
    storage: StorageOption = None,
) -> None:
    """Delete a workflow and what its steps made; what other workflows have too, and all numbers, stay.

    What goes (datasets, checkpoints, logs) is shown first. Curves and results of the runs stay in the store. Running
    the recipe again does everything anew. After an interruption the same command does the rest.
    """
    from lt2.config import ConfigError
    from lt2_platform.wording import first_of, size
    from lt2_workflows.commands.records import readable
    from lt2_workflows.housekeeping.deletion import Deletion
    from lt2_workflows.housekeeping.deletion import delete as delete_all

    root = readable(storage)
    deletion = Deletion.of(root, workflow)
    bytes_ = {step_id: sum(root.sizes(f"steps/{step_id}").values()) for step_id in (*deletion.steps, *deletion.kept)}
    for step_id in deletion.steps:
        typer.echo(f"deletes  {size(bytes_[step_id]):>8}  steps/{step_id}")
    for step_id, users in deletion.kept.items():
        typer.echo(f"keeps    {size(bytes_[step_id]):>8}  steps/{step_id}, of {first_of(users, 2)}")
    whole = sum(bytes_[step_id] for step_id in deletion.steps)
    root.check_writable()
    if not yes and not typer.confirm(f"Delete {size(whole)} in {root.root}?"):
        raise ConfigError("nothing is deleted")
    delete_all(root, deletion, say=lambda what: typer.echo(f"deleted {what}"))


def copy(
    workflow: Annotated[str, typer.Argument(metavar="WORKFLOW", help="A workflow's id or name.")],
    to: Annotated[str, typer.Argument(metavar="ROOT", help="Folder or s3://bucket/prefix to copy to.")],
    storage: StorageOption = None,
) -> None:
    """Copy a workflow to another storage root: its finished steps, and the numbers of its runs.

    There it is as if it had been run there: a recipe goes on from its steps, and the dashboard shows its runs. What the
    other root has already is not copied again. After an interruption the same command does the rest.
    """
    from lt2.config import ConfigError
    from lt2_platform.storage import Storage
    from lt2_workflows.commands.records import readable
    from lt2_workflows.housekeeping.copying import copy_workflow

    source, target = readable(storage), Storage(to)
    if source == target:
        raise ConfigError(f"{target.root} is where it is; give another root")
    target.check_writable()
    copy_workflow(source, target, workflow, lambda what, how: typer.echo(f"{what}  {how}"))
    typer.echo(f"\nnow also in {target.root}")
