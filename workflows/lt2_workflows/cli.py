"""The `lt2` command. Ray, torch and storage are imported by the commands that need them, so that --help is instant."""

from __future__ import annotations

import math
import os
import signal
import sys
import time
import traceback
from collections.abc import Callable
from typing import TYPE_CHECKING, Annotated, Any

import typer

from lt2_platform.wording import printable
from lt2_workflows.commands import clusters, diagnosis, evaluation, housekeeping, jobs, models, packs, records, sweeps
from lt2_workflows.commands.doctor import doctor
from lt2_workflows.commands.export import export
from lt2_workflows.commands.generate import generate
from lt2_workflows.commands.options import StorageOption
from lt2_workflows.commands.overview import Overview

if TYPE_CHECKING:
    from lt2_platform.storage import Storage
    from lt2_workflows.engine.executor import Outcome
    from lt2_workflows.graph import Workflow

app = typer.Typer(
    help="Train, evaluate and compare linear-time looped transformers.",
    cls=Overview,
    no_args_is_help=True,
    add_completion=False,
    pretty_exceptions_enable=False,
    rich_markup_mode=None,
)

RecipeArgument = Annotated[
    str,
    typer.Argument(
        metavar="RECIPE",
        help="A shipped recipe (some take recipe:argument), file.py:function, or a recorded dag.json / YAML.",
    ),
]
SetOption = Annotated[
    list[str] | None,
    typer.Option("--set", metavar="KEY=VALUE", help="Change a config value, e.g. --set pretrain.train.lr=3e-4."),
]
NoWaitOption = Annotated[bool, typer.Option("--no-wait", help="Fail if another process runs a step; do not wait.")]
TtlOption = Annotated[
    float, typer.Option(hidden=True, min=1.0, help="Seconds of silence after which a lease is stale.")
]


app.add_typer(packs.pack_app, name="pack")
app.command("eval")(evaluation.evaluate)
app.command("compare")(evaluation.compare)
app.command("paper-table")(evaluation.paper_table)
for remote in (jobs.submit, jobs.resume, jobs.logs, jobs.cancel):
    app.command()(remote)
app.add_typer(clusters.cluster, name="cluster")


class Terminated(KeyboardInterrupt):
    """SIGTERM, treated like Ctrl-C."""


TWICE_S = 0.5
"""SIGTERM again so soon is the same request: `timeout`, for one, signals its command and then the process group."""


@app.command()
def recipes(
    recipe: Annotated[
        str | None, typer.Argument(metavar="RECIPE", help="Show the settings of this recipe, named as for `lt2 run`.")
    ] = None,
    step: Annotated[str | None, typer.Argument(metavar="STEP", help="Only the settings of this step.")] = None,
    set_: SetOption = None,
) -> None:
    """List the shipped recipes, or all settings of one that `--set` can change, with their values."""
    from lt2.config import ConfigError
    from lt2_platform.wording import nearest
    from lt2_workflows.loading import load_workflow, shipped_recipes
    from lt2_workflows.settings import describe_settings

    if recipe is not None:
        workflow = load_workflow(recipe, set_ or [])
        if step is not None and step not in workflow.configs:
            raise ConfigError(f"{recipe} has no step {step!r}{nearest(step, workflow.configs)}")
        typer.echo(describe_settings(workflow, step))
        return
    found = sorted(shipped_recipes().items())
    width = max(len(name) for name, _ in found)
    for name, function in found:
        typer.echo(f"{name:<{width}} {(function.__doc__ or '').strip().splitlines()[0]}")


@app.command()
def plan(
    recipe: RecipeArgument,
    set_: SetOption = None,
    storage: StorageOption = None,
    card: Annotated[str | None, typer.Option(help="Estimate training memory and time on this card, e.g. h100.")] = None,
    count: Annotated[int | None, typer.Option(min=1, help="Number of cards. [default: the recipe's workers]")] = None,
    utilisation: Annotated[float, typer.Option(min=0.01, max=1.0, help="Assumed share of the bf16 peak.")] = 0.4,
) -> None:
    """Show the steps of a recipe, which would run, and what they cost. Writes nothing."""
    from lt2_workflows.loading import load_workflow
    from lt2_workflows.plan import describe_costs, describe_plan

    workflow, root = load_workflow(recipe, set_ or []), records.readable(storage, new=True)
    typer.echo(describe_plan(workflow, root))
    if card is not None:
        typer.echo(describe_costs(workflow, root, card=card, count=count, utilisation=utilisation))


@app.command()
def run(
    recipe: RecipeArgument,
    set_: SetOption = None,
    storage: StorageOption = None,
    no_wait: NoWaitOption = False,
    lease_ttl: TtlOption = 30.0,
) -> None:
    """Run a recipe; finished steps are skipped, interrupted ones resume."""
    from lt2_workflows.loading import load_workflow

    _run(load_workflow(recipe, set_ or []), _storage(storage), None, no_wait, lease_ttl)


@app.command()
def sweep(
    name: sweeps.NameArgument,
    set_: SetOption = None,
    grid: Annotated[
        list[str] | None,
        typer.Option("--grid", metavar="KEY=[VALUE, ...]", help="Values for a key; several --grid are combined."),
    ] = None,
    seeds: Annotated[str | None, typer.Option(metavar="N,N", help="Run each configuration with these seeds.")] = None,
    asha: Annotated[
        int | None, typer.Option(metavar="STEPS", min=1, help="Stop the worst trials early, from STEPS on.")
    ] = None,
    concurrent: Annotated[int | None, typer.Option(min=1, help="Number of trials to run at a time.")] = None,
    plan: Annotated[bool, typer.Option("--plan", help="Show the trials and what they cost; write nothing.")] = False,
    storage: StorageOption = None,
    no_wait: NoWaitOption = False,
    lease_ttl: TtlOption = 30.0,
) -> None:
    """Run a sweep of trainings and their evaluations, and show the results beside the paper's table."""
    from lt2_workflows.plan import describe_plan

    workflow = sweeps.sweep_workflow(name, set_ or [], grid or [], seeds, {"asha": asha, "concurrent": concurrent})
    if plan:
        typer.echo(describe_plan(workflow, records.readable(storage, new=True)))
        return
    _run(workflow, _storage(storage), None, no_wait, lease_ttl)


@app.command()
def step(
    recipe: RecipeArgument,
    name: Annotated[str, typer.Argument(metavar="STEP", help="The step to run; the steps it needs must be finished.")],
    set_: SetOption = None,
    storage: StorageOption = None,
    no_wait: NoWaitOption = False,
    lease_ttl: TtlOption = 30.0,
) -> None:
    """Run one step of a recipe, for schedulers such as Airflow or Argo."""
    from lt2_workflows.loading import load_workflow

    _run(load_workflow(recipe, set_ or []), _storage(storage), name, no_wait, lease_ttl)


app.command()(records.status)
app.command()(records.report)
app.command()(records.results)
app.command()(records.note)
app.command()(housekeeping.space)
app.command()(housekeeping.delete)
app.command()(housekeeping.copy)
app.command()(generate)
app.command("check-mixer")(models.check_mixer)
app.command()(export)
app.command()(models.checkpoints)
app.add_typer(models.bench, name="bench")
app.command()(diagnosis.diagnose)
app.command()(diagnosis.positions)
app.command()(doctor)


# --help too is for the dashboard's own parser.
@app.command(context_settings={"allow_extra_args": True, "ignore_unknown_options": True}, add_help_option=False)
def dashboard(context: typer.Context, storage: StorageOption = None) -> None:
    """Serve the results dashboard on this machine."""
    # A process of its own: workflows and dashboards never import each other.
    os.execv(
        sys.executable, [sys.executable, "-m", "lt2_dashboards", "--storage", _storage(storage).root, *context.args]
    )


def _storage(root: str | None) -> Storage:
    from lt2_platform.storage import Storage

    return Storage(root)


def _run(workflow: Workflow, storage: Storage, only: str | None, no_wait: bool, ttl_s: float) -> None:
    from lt2_workflows.console import Console
    from lt2_workflows.engine import executor

    signal.signal(signal.SIGTERM, _terminator())
    texts: dict[str, str] = {}
    runs: dict[str, None] = {}
    console = Console()

    def say(event: dict[str, Any]) -> None:
        result = event.get("result") or {}
        if "text" in result:
            texts[event["step"]] = result["text"]
        if "run" in result:
            runs[result["run"]] = None
        console.say(event)

    typer.echo(f"{workflow.id} in {storage.root}", err=True)
    try:
        outcomes = executor.run(workflow, storage, only=only, wait_for_others=not no_wait, ttl_s=ttl_s, say=say)
    except KeyboardInterrupt as stop:
        typer.echo("lt2: stopped; the same command continues from here", err=True)
        raise typer.Exit(143 if isinstance(stop, Terminated) else 130) from None
    for name in workflow.steps:
        if name in texts:
            typer.echo(texts[name])
    if runs:
        typer.echo(
            f"dashboard: start `lt2 dashboard --storage {storage.root}`, open its address, then /runs/{list(runs)[-1]}"
        )
    raise typer.Exit(_exit_code(outcomes))


def _exit_code(outcomes: dict[str, Outcome]) -> int:
    failed = [name for name, outcome in outcomes.items() if outcome.state in ("failed", "bad_input")]
    if failed:  # why was said when it happened
        typer.echo(f"lt2: failed: {', '.join(failed)}", err=True)
    states = {outcome.state for outcome in outcomes.values()}
    if "failed" in states:
        return 1
    return 2 if "bad_input" in states else 0


def _terminator() -> Callable[[int, Any], None]:
    came = -math.inf

    def terminate(signum: int, frame: Any) -> None:
        nonlocal came
        before, came = came, time.monotonic()
        if came - before > TWICE_S:
            raise Terminated

    return terminate


def main() -> None:
    """Entry point: a user's mistake, a store or a Ray that fails is one line and exit code 2; all else is raised, from
    where a user's own file was called."""
    try:
        _check_arguments(sys.argv[1:])
        app()
    except Exception as error:
        line = _line(error)
        if line is None:
            from lt2.extension import in_their_file

            if (theirs := in_their_file(error)) is None:
                raise
            traceback.print_exception(type(error), error, theirs)
            sys.exit(1)
        print("\n".join(f"lt2: {part}" for part in line.splitlines()), file=sys.stderr)
        sys.exit(2)


def _check_arguments(arguments: list[str]) -> None:
    """Raise ConfigError for bytes that are no UTF-8: neither a record nor a message can hold them."""
    for argument in arguments:
        shown = printable(argument)
        if shown != argument:
            from lt2.config import ConfigError

            raise ConfigError(f"the argument {shown} is not UTF-8; give another name or text")


def _line(error: Exception) -> str | None:
    """What to tell the user instead of a traceback; None for a bug."""
    from lt2.config import ConfigError
    from lt2_platform.storage_errors import complaint
    from lt2_workflows.engine.local_ray import NoRayError

    told = error if isinstance(error, ConfigError | NoRayError) else complaint(error)
    return None if told is None else str(told)


if __name__ == "__main__":
    main()
