"""The step that evaluates a checkpoint."""

from __future__ import annotations

from typing import Any, ClassVar, Literal

from pydantic import Field

from lt2_platform.evaluate.config import AnyTask, PerplexityConfig, ThroughputConfig
from lt2_workflows.attempt import StepContext
from lt2_workflows.graph import Ref, StepConfig, step_type
from lt2_workflows.local_ray import join_ray
from lt2_workflows.provenance import run_of_outside
from lt2_workflows.steps.refs import CheckpointRef, DatasetRef, PackRef


class EvaluateStep(StepConfig):
    """Tasks on a checkpoint (or on the newest one of a run), at its own depth or at each of `loops`.

    With resources.num_workers above 1, tasks that can use so many copies of the model on Ray. pack: of the harness
    tasks that name none.
    """

    produces: ClassVar[str] = "evaluation"
    type: Literal["evaluate"] = "evaluate"
    checkpoint: CheckpointRef | str
    data: DatasetRef | str
    tasks: tuple[AnyTask, ...] = Field(default=(PerplexityConfig(), ThroughputConfig()), min_length=1)
    loops: tuple[int, ...] = ()
    pack: PackRef | str | None = None


@step_type(EvaluateStep)
def run_evaluate(config: EvaluateStep, context: StepContext) -> dict[str, Any]:
    """Result: {"rows": as of lt2_platform.evaluate.tasks.run_tasks}; they also go to the run in the results store."""
    from lt2_platform.evaluate.checkpoints import evaluate_checkpoint
    from lt2_platform.results import ResultsStore

    tasks = config.tasks
    if config.pack is not None:
        pack = context.path(config.pack)
        tasks = tuple(t.model_copy(update={"pack": pack}) if getattr(t, "pack", None) == "" else t for t in tasks)
    actors = config.resources.num_workers if config.resources.num_workers > 1 else 0
    if actors:
        join_ray()
    found = evaluate_checkpoint(
        context.path(config.checkpoint),
        tasks,
        data=context.path(config.data),
        loops=config.loops,
        out=context.out,
        actors=actors,
        progress=context.progress,
    )
    store, run = ResultsStore(context.storage), context.run_id
    if isinstance(config.checkpoint, Ref):
        run = context.workflow.steps[config.checkpoint.step].id
    run_of_outside(store, run, context.path(config.checkpoint))
    for name, rows in found.evaluations().items():
        store.log_eval(run, name, rows)
    return {
        "run": run,
        "step": found.step,
        "n_loops": found.n_loops,
        "parameters": found.parameters,
        "rows": found.rows,
    }
