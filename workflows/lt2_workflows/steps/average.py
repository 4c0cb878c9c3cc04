"""The step that averages a run's last checkpoints.

Importing this module imports neither torch nor Ray.
"""

from __future__ import annotations

from typing import Any, ClassVar, Literal

from pydantic import Field

from lt2.config import ConfigError
from lt2.train.config import TrainConfig
from lt2_workflows.engine.context import StepContext
from lt2_workflows.engine.records import read_done
from lt2_workflows.graph import StepConfig, step_type
from lt2_workflows.provenance import log_model
from lt2_workflows.steps.pretrain import PretrainStep, first_step
from lt2_workflows.steps.refs import CheckpointRef
from lt2_workflows.steps.teacher import ImportModelStep


class AverageStep(StepConfig):
    """The mean of the weights of a run's `last` checkpoints, as a run of its own: to be evaluated, or trained further
    (`start` of a pretrain step). Under a constant learning rate it stands for a model whose rate has come down.
    """

    produces: ClassVar[str] = "checkpoint"
    type: Literal["average"] = "average"
    checkpoint: CheckpointRef | str
    last: int = Field(default=5, ge=2)


def check_enough(config: AverageStep, context: StepContext) -> None:
    """Raise ConfigError where the run that is averaged keeps, or has, fewer checkpoints."""
    place = config.checkpoint
    step = context.workflow.steps[place.step] if isinstance(place, CheckpointRef) else None
    if step is None or read_done(context.storage, step) is not None:
        from lt2_platform.train.checkpoints.averaging import averaged

        averaged(context.path(place), config.last)
        return
    if isinstance(step.config, AverageStep | ImportModelStep):
        raise ConfigError(f"checkpoint: step {step.name} makes one checkpoint; average those of a run that trains")
    train = getattr(step.config, "train", None)
    done = first_step(step.config, context) if isinstance(step.config, PretrainStep) else 0
    if isinstance(train, TrainConfig) and (count := _kept(train, done)) < config.last:
        raise ConfigError(
            f"last {config.last}: step {step.name} will keep {count} of its checkpoints; set its "
            f"train.keep_checkpoints to {config.last} or more, and train.checkpoint_every so that it makes as many"
        )


def _kept(train: TrainConfig, done: int) -> int:
    """How many checkpoints a run leaves that goes on from step `done`, its best one not counted."""
    every = train.checkpoint_every or train.steps
    saved = sorted({step for step in range(every, train.steps + 1, every) if step > done} | {train.steps})
    older, always = saved[: -train.keep_checkpoints], train.keep_every
    return len(saved) - len(older) + sum(always is not None and step % always == 0 for step in older)


@step_type(
    AverageStep, describe=lambda config, context: f"mean of the last {config.last} checkpoints", fits=check_enough
)
def run_average(config: AverageStep, context: StepContext) -> dict[str, Any]:
    """Result: {"run", "step", "position", "tokens", "loss"}.

    The results store has the settings of the run that is averaged, so that averages are compared as their runs are.
    """
    from lt2_platform.train.checkpoints.averaging import store_average
    from lt2_platform.train.checkpoints.checkpoint import read_info, resolve

    result = store_average(context.path(config.checkpoint), context.out, last=config.last)
    info = read_info(resolve(context.out))
    settings = _settings_of(config.checkpoint, context) | {
        "model": info.model.model_dump(mode="json"),
        "train": info.train,
        "sources": dict(info.sources),
    }
    log_model(context.storage, context.run_id, settings, workflow=context.workflow.id, step=context.step.id)
    return {"run": context.run_id} | result


def _settings_of(place: CheckpointRef | str, context: StepContext) -> dict[str, Any]:
    """Those in the results store of the run that is averaged; none of one that is named by its path."""
    if isinstance(place, str):
        return {}
    path = f"runs/{context.workflow.steps[place.step].id}/run.json"
    return context.storage.read_json(path)["config"] if context.storage.exists(path) else {}
