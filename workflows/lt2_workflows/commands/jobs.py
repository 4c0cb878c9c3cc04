"""Commands about workflows that run as jobs on a Ray cluster: submit, resume, logs, cancel."""

from __future__ import annotations

import os
import sys
import tempfile
from contextlib import chdir
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

if TYPE_CHECKING:
    from ray.job_submission import JobSubmissionClient

    from lt2_workflows.graph import Workflow

AddressOption = Annotated[
    str,
    typer.Option(
        "--address", envvar="RAY_API_SERVER_ADDRESS", help="Ray's dashboard on the cluster, e.g. http://head:8265."
    ),
]
StorageOption = Annotated[
    str | None,
    typer.Option("--storage", metavar="ROOT", help="s3://bucket/prefix, or a folder all nodes share. [$LT2_STORAGE]"),
]
PythonOption = Annotated[
    str,
    typer.Option("--python", help="Absolute path of Python on the cluster. [default: this one's]", show_default=False),
]
NoFollowOption = Annotated[bool, typer.Option("--no-follow", help="Print the job's id and return.")]
JobArgument = Annotated[
    str, typer.Argument(metavar="JOB", help="A job's id, or a workflow's id or name for its newest job.")
]


def submit(
    recipe: Annotated[str, typer.Argument(metavar="RECIPE", help="As for `lt2 run`.")],
    address: AddressOption,
    set_: Annotated[list[str] | None, typer.Option("--set", metavar="KEY=VALUE", help="As for `lt2 run`.")] = None,
    storage: StorageOption = None,
    python: PythonOption = sys.executable,
    no_follow: NoFollowOption = False,
) -> None:
    """Run a recipe as a job on a Ray cluster, with a snapshot of this code; shows its log, returns its exit code.

    The job does not need this terminal: Ctrl-C or a closed lid leaves it running.
    """
    from lt2_workflows import submit as jobs
    from lt2_workflows.loading import load_workflow

    workflow, root = load_workflow(recipe, set_ or []), _shared_root(storage)
    client = jobs.connect(address)
    job = jobs.submit(client, workflow, root, python)
    _show(client, job, workflow, address, root, no_follow)


def resume(
    workflow: Annotated[
        str, typer.Argument(metavar="WORKFLOW", help="A workflow's id or name, as `lt2 status` shows it.")
    ],
    address: AddressOption,
    storage: StorageOption = None,
    python: PythonOption = sys.executable,
    no_follow: NoFollowOption = False,
) -> None:
    """Submit a recorded workflow again, to this cluster or another; finished steps are skipped."""
    from lt2.config import ConfigError
    from lt2_platform.storage import Storage
    from lt2_workflows import submit as jobs
    from lt2_workflows.engine.records import list_workflows
    from lt2_workflows.loading import load_workflow

    store = Storage(_shared_root(storage))
    store.check_readable()
    found = [item["id"] for item in list_workflows(store, workflow)]
    if len(found) > 1:
        raise ConfigError(f"{workflow!r} has several workflows, name one: {', '.join(found)}")
    folder = f"workflows/{found[0]}"
    client = jobs.connect(address)
    # In a folder of its own, where the files that the record names by relative paths are those that were recorded.
    with tempfile.TemporaryDirectory(prefix="lt2-resume-") as place, chdir(place):
        record = store.read_json(f"{folder}/dag.json")
        if record["recipe_file"]:
            recipe_file = Path(place, "recipe.py")
            recipe_file.write_bytes(store.read_bytes(f"{folder}/recipe.py"))
            record["recipe_file"] = str(recipe_file)
        for path in store.glob(f"{folder}/files/**/*.py"):
            Storage(place).write_bytes(path.removeprefix(f"{folder}/files/"), store.read_bytes(path))
        Storage(place).write_json("dag.json", record)
        loaded = load_workflow(str(Path(place, "dag.json")))
        job = jobs.submit(client, loaded, store.root, python)
    _show(client, job, loaded, address, store.root, no_follow)


def logs(job: JobArgument, address: AddressOption) -> None:
    """Show a job's log until it ends; the exit code is the job's."""
    from lt2_workflows.submit import connect, find_job

    client = connect(address)
    _follow(client, find_job(client, job), address)


def cancel(job: JobArgument, address: AddressOption) -> None:
    """Stop a job: its workers end and its steps' leases are released, so that `lt2 resume` continues at once."""
    from lt2_workflows import submit as jobs

    client = jobs.connect(address)
    found = jobs.find_job(client, job)
    typer.echo(f"{found} cancelled" if jobs.cancel(client, found) else f"{found} had already ended")


def _show(client: JobSubmissionClient, job: str, workflow: Workflow, address: str, root: str, no_follow: bool) -> None:
    """Say what was started, and follow it unless that is not wanted."""
    _warn_of_inputs(workflow, root)
    if no_follow:
        typer.echo(job)
        return
    typer.echo(f"{job} on {address}, results in {root}", err=True)
    _follow(client, job, address)


def _warn_of_inputs(workflow: Workflow, root: str) -> None:
    """Not an error: the cluster may reach what this machine does not, and the job looks again before it begins."""
    from lt2.config import ConfigError
    from lt2_platform.storage import Storage
    from lt2_workflows.engine.records import step_state
    from lt2_workflows.inputs import problems

    storage = Storage(root)
    try:
        storage.check_readable(new=True)
    except ConfigError as error:
        typer.echo(f"lt2: the inputs of steps were not checked: {error}", err=True)
        return
    pending = [step for step in workflow.steps.values() if step_state(storage, step.folder)["state"] != "done"]
    for line in problems(workflow, storage, pending, elsewhere=True):
        typer.echo(f"lt2: not found from here, but the job needs it: {line}", err=True)


def _follow(client: JobSubmissionClient, job: str, address: str) -> None:
    from lt2_workflows.submit import follow

    def write(text: str) -> None:
        typer.echo(text, nl=False)

    try:
        code = follow(client, job, write)
    except KeyboardInterrupt:
        typer.echo(f"lt2: {job} keeps running; lt2 logs|cancel {job} --address {address}", err=True)
        raise typer.Exit(130) from None
    raise typer.Exit(code)


def _shared_root(root: str | None) -> str:
    from lt2.config import ConfigError
    from lt2_platform.storage import absolute

    root = os.environ.get("LT2_STORAGE") if root is None else root
    if not root:
        raise ConfigError("a job needs a storage root that all nodes reach: --storage s3://bucket/prefix, or a folder")
    return absolute(root)
