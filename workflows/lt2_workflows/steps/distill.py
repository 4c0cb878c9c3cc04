"""The step that distils: one stage of making a student of a teacher.

Importing this module imports neither torch nor Ray.
"""

from __future__ import annotations

from contextlib import suppress
from typing import Any, ClassVar, Literal

from pydantic import Field, model_validator

from lt2.config import AnyMixer, MixerConfig, ModelConfig
from lt2.distill.select import uniform_layers
from lt2.train.config import TrainConfig
from lt2_platform.distill.run import NEW_MIXER, DistillRun, kept_layout, stage_config
from lt2_platform.wording import amount
from lt2_workflows.engine.context import StepContext
from lt2_workflows.graph import NotKnownYetError, Ref, StepConfig, step_type
from lt2_workflows.steps.average import AverageStep
from lt2_workflows.steps.prepare import dataset_facts
from lt2_workflows.steps.pretrain import (
    PretrainStep,
    TrainResources,
    check_evaluation,
    check_resources,
    info_if_there,
    planned_model,
    train_options,
    training_places,
)
from lt2_workflows.steps.refs import CheckpointRef, DatasetRef, SelectionRef, TopKRef
from lt2_workflows.steps.select_layers import SelectLayersStep
from lt2_workflows.steps.teacher import ImportModelStep


class DistillStep(StepConfig):
    """One stage of distillation: `train.objective` is align (stage 1) or distill (stages 2 and 3).

    Attributes:
        teacher: a run or checkpoint with the same attention in every layer.
        student: a run or checkpoint of an earlier stage to start from; None: the teacher, converted.
        mixer, kept: as of DistillRun; kept may be what a select_layers step chose.
        topk: the teacher's stored top-k, in place of asking it at every step.
        score_sequences: sequences of each half of the held-out ones on which the distance to the teacher is measured
            afterwards: one to choose layers by, one to report.
    """

    produces: ClassVar[str] = "checkpoint"
    uses_ray: ClassVar[bool] = True
    type: Literal["distill"] = "distill"
    resources: TrainResources = TrainResources()
    data: DatasetRef | str
    teacher: CheckpointRef | str
    student: CheckpointRef | str | None = None
    mixer: AnyMixer | None = None
    kept: SelectionRef | tuple[int, ...] | None = None
    topk: TopKRef | str | None = None
    score_sequences: int = Field(default=32, ge=1)
    train: TrainConfig

    @model_validator(mode="after")
    def _check(self) -> DistillStep:
        if self.train.objective.type == "next_token":
            raise ValueError("train.objective is next_token; give align (stage 1) or distill (stages 2 and 3)")
        check_resources(self.resources, self.train)
        return self


def describe_distill(config: DistillStep, context: StepContext) -> str:
    """Objective, tokens and, where the teacher's config is known before it runs, parameters and FLOPs."""
    from lt2.analysis.accounting import parameters
    from lt2_workflows.plan import planned_training
    from lt2_workflows.training import flops_per_token

    train = config.train
    seq_len = dataset_facts(config.data, context, vocab_size=1)["seq_len"]
    tokens = train.steps * train.global_batch_size * seq_len
    parts = [f"{train.objective.type}, {train.steps:,} steps, {amount(tokens)} tokens in rows of {seq_len:,}"]
    _, kept = planned_student(config, context)
    if kept is None:
        where = "the layers of the student it starts from, which is not there yet"
    else:
        where = f"the choice of {kept.step}" if isinstance(kept, SelectionRef) else list(kept) or "no layer"
    parts.append(f"attention kept in {where}")
    run = None
    with suppress(NotKnownYetError):
        run = planned_training(config, context)
    if run is not None:
        flops = amount(tokens * flops_per_token(run, "none"))
        parts.append(f"{amount(parameters(run.model).total)} parameters, {flops} FLOPs with the teacher's")
    return "; ".join(parts)


def planned_stage(config: DistillStep, context: StepContext) -> tuple[ModelConfig, ModelConfig]:
    """(student, teacher) of a stage before anything has run. Raises NotKnownYetError where nothing tells them."""
    teacher = planned_checkpoint(config.teacher, context)
    if teacher is None:
        where = config.teacher if isinstance(config.teacher, str) else config.teacher.step
        raise NotKnownYetError(f"not known before the teacher, {where}, is there")
    mixer, kept = planned_student(config, context)
    if mixer is None or kept is None:
        raise NotKnownYetError("not known before the student it starts from is there")
    if isinstance(kept, SelectionRef):  # which layers they are hardly matters here
        source = context.workflow.configs[kept.step]
        kept = uniform_layers(teacher.n_layers, source.count if isinstance(source, SelectLayersStep) else 0)
    return stage_config(DistillRun(mixer=mixer, kept=kept, train=config.train), teacher, None).model, teacher


def planned_checkpoint(place: CheckpointRef | str, context: StepContext) -> ModelConfig | None:
    """A model's config: of a checkpoint, or as far as the workflow or the folder it imports tells it."""
    if isinstance(place, str):
        info = info_if_there(place)
        return None if info is None else info.model
    source = context.workflow.configs[place.step]
    if isinstance(source, ImportModelStep):
        return source.model
    if isinstance(source, AverageStep):
        return planned_checkpoint(source.checkpoint, context)
    return planned_model(source, context)[0] if isinstance(source, PretrainStep) else None


def planned_student(
    config: DistillStep, context: StepContext
) -> tuple[MixerConfig | None, tuple[int, ...] | SelectionRef | None]:
    """(mixer, layers that keep attention or who chooses them), from this stage or what it starts from.

    None: that of a checkpoint which is not there yet.
    """
    mixer, kept, student = config.mixer, config.kept, config.student
    while (mixer is None or kept is None) and student is not None:
        before = context.workflow.configs[student.step] if isinstance(student, Ref) else None
        if isinstance(before, DistillStep):
            mixer, student = mixer or before.mixer, before.student
            kept = before.kept if kept is None else kept
            continue
        model = planned_checkpoint(student, context)
        if model is None:
            return mixer, kept
        layout = kept_layout(model)
        return mixer or layout.mixer, layout.kept if kept is None else kept
    return mixer or NEW_MIXER, () if kept is None else kept


def check_stage(config: DistillStep, context: StepContext) -> None:
    """Raise ConfigError where no such student can be made of the teacher, as far as that is known, or where
    `check_evaluation` does."""
    check_evaluation(config, context)
    planned_stage(config, context)


@step_type(DistillStep, describe=describe_distill, places=training_places, fits=check_stage)
def run_distill(config: DistillStep, context: StepContext) -> dict[str, Any]:
    """Result: as of run_pretrain, and "kept", and the distance to the teacher on held-out text (nats/token).

    "kl" and "kl_loops" are by which layers are chosen; "report_kl" is on the other half, which no choice has seen.
    """
    from lt2_platform.distill.measure import check_held_out, log_distance
    from lt2_platform.distill.run import distill
    from lt2_platform.results.store import ResultsStore
    from lt2_platform.train.checkpoints.checkpoint import read_info, resolve

    teacher = context.path(config.teacher)
    others = {name: getattr(config, name) for name in ("student", "topk")}
    places = {name: None if place is None else context.path(place) for name, place in others.items()}
    kept = config.kept
    if isinstance(kept, SelectionRef):
        kept = tuple(context.result(kept)["kept"])
    data = context.path(config.data)
    check_held_out(data)
    meant = resolve(teacher)  # what the stage learns from: the teacher's run may go on meanwhile
    options = train_options(config.resources, context)
    run = DistillRun(mixer=config.mixer, kept=kept, train=config.train)
    summary = distill(run, teacher=teacher, **places, data=data, **options)
    layout: Any = read_info(resolve(context.out)).model.layout
    context.progress({"message": "distance to the teacher on held-out text"})
    asked = config.teacher
    measured = log_distance(
        context.out,
        meant,
        data,
        store=ResultsStore(context.storage),
        run_id=context.run_id,
        teacher_name=context.workflow.steps[asked.step].id if isinstance(asked, Ref) else asked,
        max_sequences=config.score_sequences,
        document_mask=config.train.document_mask,
    )
    result = {key: value for key, value in summary.items() if key != "checkpoint"}
    return {"run": context.run_id, **result, "kept": list(layout.kept), **measured}
