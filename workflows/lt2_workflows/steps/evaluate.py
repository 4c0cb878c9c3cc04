"""The step that evaluates a checkpoint."""

from __future__ import annotations

from collections.abc import Iterator
from functools import partial
from typing import Any, ClassVar, Literal

from pydantic import Field

from lt2.config import ConfigError
from lt2_platform.evaluate.config import (
    AnyTask,
    Depths,
    ExitThresholds,
    HarnessConfig,
    PerplexityConfig,
    PositionsConfig,
    ThroughputConfig,
)
from lt2_workflows.engine.context import StepContext
from lt2_workflows.engine.local_ray import join_ray
from lt2_workflows.graph import Place, Ref, StepConfig, step_type
from lt2_workflows.provenance import log_evaluations
from lt2_workflows.steps.held_out import held_out_remark
from lt2_workflows.steps.prepare import row_length
from lt2_workflows.steps.refs import CheckpointRef, DatasetRef, PackRef
from lt2_workflows.steps.task_inputs import check_lengths, check_templates, first_by_training, packs_of
from lt2_workflows.steps.tokenizers import check_evaluated


class EvaluateStep(StepConfig):
    """Run tasks on a checkpoint (or a run's newest) at its own depth, or at each of `loops` and `exit_thresholds`.

    With resources.num_workers above 1, tasks that can use so many copies of the model on Ray. pack: of the harness
    tasks that name none.
    """

    produces: ClassVar[str] = "evaluation"
    type: Literal["evaluate"] = "evaluate"
    checkpoint: CheckpointRef | str
    data: DatasetRef | str
    tasks: tuple[AnyTask, ...] = Field(default=(PerplexityConfig(), ThroughputConfig()), min_length=1)
    loops: Depths = ()
    exit_thresholds: ExitThresholds = ()
    pack: PackRef | str | None = None

    @property
    def needs_ray(self) -> bool:
        return self.resources.num_workers > 1


def evaluate_places(config: EvaluateStep, context: StepContext) -> Iterator[Place]:
    yield from packs_of(config.tasks, "tasks", config.pack or "")


def describe_evaluate(config: EvaluateStep, context: StepContext) -> str:
    """What is asked, and from where."""
    parts = []
    packs: dict[str, list[str]] = {}
    for task in config.tasks:
        if not isinstance(task, HarnessConfig):
            parts.append(task.type)
            continue
        pack = task.pack or (f"step {config.pack.step}" if isinstance(config.pack, Ref) else config.pack or "no pack")
        packs.setdefault(pack, []).append((task.suite or ", ".join(task.tasks)) + " as conversations" * bool(task.chat))
    parts += [f"{', '.join(asked)} from {pack}" for pack, asked in packs.items()]
    loops = config.loops
    depths = [f"{', '.join(map(str, loops))} loop{'s' * (loops != (1,))}"] if loops else []
    if config.exit_thresholds:
        depths.append(f"exit thresholds {', '.join(map(str, config.exit_thresholds))}")
    parts += [f"each at {' and at '.join(depths)}"] if depths else []
    parts += [remark] if (remark := held_out_remark(config.checkpoint, config.data, context)) else []
    return "; ".join(parts)


def check_fit(config: EvaluateStep, context: StepContext) -> None:
    """Raise ConfigError for what would fail, or mislead, only after hours: names that clash, exit thresholds of a model
    without an exit gate, spans that no row can hold, text or items of another tokenizer, a chat template that the
    training does not tell."""
    check_names(config, context)
    check_gate(config, context)
    check_lengths("tasks", config.tasks, partial(row_length, config.data, context))
    check_evaluated(config.checkpoint, config.data, config.tasks, config.pack, context)
    first = first_by_training(config.tasks)
    known = None if first is None else _trained_templates(config.checkpoint, context)
    if known is None:
        return
    if isinstance(config.checkpoint, Ref):
        model = f"the model of step {config.checkpoint.step}"
    else:
        model = config.checkpoint
    check_templates(f"tasks.{first}", known, model)


def check_names(config: EvaluateStep, context: StepContext) -> None:
    """Raise ConfigError where two steps would store losses on different text under one name: only one would count."""
    if isinstance(config.checkpoint, str):  # its results are the step's own
        return
    own = _perplexities(config)
    for step, other in context.workflow.configs.items():
        if not isinstance(other, EvaluateStep) or other.checkpoint != config.checkpoint:
            continue
        for name, found in _perplexities(other).items():
            if name in own and own[name] != found:
                kind = own[name][1].type
                raise ConfigError(
                    f"tasks: step {step} has a {name} of the same run on other text or by other settings, and results "
                    f"would show one of the two; give one a name of its own (tasks: [{{type: {kind}, name: …}}])"
                )


def check_gate(config: EvaluateStep, context: StepContext) -> None:
    """Raise ConfigError for thresholds of a model that is known to have no exit gate; of one that is not known yet, the
    evaluation says so before its first task."""
    from lt2_workflows.steps.pretrain import PretrainStep, info_if_there

    if isinstance(config.checkpoint, Ref):
        trained = context.workflow.configs[config.checkpoint.step]
        model = trained.model if isinstance(trained, PretrainStep) else None
    else:
        info = info_if_there(config.checkpoint) if config.exit_thresholds else None
        model = None if info is None else info.model
    if model is not None:
        for threshold in config.exit_thresholds:
            model.exits_at(threshold)


def _perplexities(config: EvaluateStep) -> dict[str, Any]:
    from lt2_platform.evaluate.tasks import named

    kinds = PerplexityConfig, PositionsConfig
    tasks = {name: task for name, task in named(config.tasks) if isinstance(task, kinds)}
    return {name: (config.data, task.model_copy(update={"batch_size": 1})) for name, task in tasks.items()}


def _trained_templates(checkpoint: CheckpointRef | str, context: StepContext) -> list[str] | None:
    """The chat templates of the data that a checkpoint was, or will be, trained on; None if nothing tells yet."""
    from lt2_platform.train.checkpoints.checkpoint import read_info, resolve
    from lt2_workflows.steps.distill import DistillStep
    from lt2_workflows.steps.prepare import data_templates
    from lt2_workflows.steps.pretrain import PretrainStep

    if isinstance(checkpoint, str):
        return read_info(resolve(checkpoint)).tokenizer.get("chat_templates", [])
    trained = context.workflow.configs[checkpoint.step]
    if not isinstance(trained, PretrainStep | DistillStep):
        return None
    return data_templates(trained.data, context)


@step_type(EvaluateStep, describe=describe_evaluate, places=evaluate_places, fits=check_fit)
def run_evaluate(config: EvaluateStep, context: StepContext) -> dict[str, Any]:
    """Result: {"rows": as of lt2_platform.evaluate.tasks.run_tasks}; they also go to the run in the results store.

    Items and answers lie where those of `lt2 eval` do, so that the runs can be compared item by item.
    """
    from lt2_platform.evaluate.checkpoints import evaluate_checkpoint

    if remark := held_out_remark(config.checkpoint, config.data, context):
        context.progress({"notice": remark})
    tasks = config.tasks
    if config.pack is not None:
        pack = context.path(config.pack)
        tasks = tuple(t.model_copy(update={"pack": pack}) if getattr(t, "pack", None) == "" else t for t in tasks)
    run, made_in = context.run_id, {}
    if isinstance(config.checkpoint, Ref):
        run = context.workflow.steps[config.checkpoint.step].id
        made_in = {"workflow": context.workflow.id, "step": run}
    actors = config.resources.num_workers if config.needs_ray else 0
    if actors:
        join_ray()
    found = evaluate_checkpoint(
        context.path(config.checkpoint),
        tasks,
        data=context.path(config.data),
        loops=config.loops,
        exit_thresholds=config.exit_thresholds,
        out=context.storage.join("evals", run, context.step.id),
        actors=actors,
        progress=context.progress,
    )
    log_evaluations(context.storage, run, context.path(config.checkpoint), found.evaluations(), **made_in)
    return {
        "run": run,
        "step": found.step,
        "n_loops": found.n_loops,
        "parameters": found.parameters,
        "rows": found.rows,
    }
