"""The steps that distil: a stage, the choice of layers, an Ouro import and the stored top-k.

Importing this module imports neither torch nor Ray.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any, ClassVar, Literal

from pydantic import Field, model_validator

from lt2.config import AnyMixer, ConfigError, MixerConfig, ModelConfig
from lt2.distill.select import best_layers, uniform_layers
from lt2.train_config import TrainConfig
from lt2_platform.distill.run import DistillRun, stage_config
from lt2_workflows.attempt import StepContext
from lt2_workflows.console import amount, table
from lt2_workflows.graph import Ref, Resources, StepConfig, step_type
from lt2_workflows.local_ray import join_ray
from lt2_workflows.steps import (
    CheckpointRef,
    DatasetRef,
    PretrainStep,
    TrainResources,
    dataset_facts,
    planned_model,
    train_options,
)


class SelectionRef(Ref):
    """The layers that a select_layers step chose."""

    accepts: ClassVar[str] = "selection"


class TopKRef(Ref):
    """A teacher's stored top-k."""

    accepts: ClassVar[str] = "teacher_topk"


# import_ouro


class ImportOuroStep(StepConfig):
    """An Ouro checkpoint's folder as a run of ours, so that it can be a teacher and be evaluated.

    tokenizer: as prepare's; None takes the folder's tokenizer.json. expected: the model's config, for plans made where
    the folder is not.
    """

    produces: ClassVar[str] = "checkpoint"
    type: Literal["import_ouro"] = "import_ouro"
    folder: str
    tokenizer: str | None = None
    expected: ModelConfig | None = None

    @property
    def model(self) -> ModelConfig | None:
        """The config in the folder, else the one that is expected there."""
        from lt2.interop.ouro import config_from_ouro

        file = Path(self.folder, "config.json")
        return config_from_ouro(json.loads(file.read_text())) if file.is_file() else self.expected


def check_import_ouro(config: ImportOuroStep) -> None:
    """Raise ConfigError when there is no model in the folder."""
    if not Path(config.folder, "config.json").is_file():
        raise ConfigError(f"teacher folder {config.folder} has no config.json; give that of an Ouro checkpoint")


def describe_import_ouro(config: ImportOuroStep, context: StepContext) -> str:
    from lt2.accounting import parameters

    size = "" if config.model is None else f" of {amount(parameters(config.model).total)} parameters"
    return f"{config.folder} -> a checkpoint{size} in fp32"


@step_type(ImportOuroStep, check=check_import_ouro, describe=describe_import_ouro)
def run_import_ouro(config: ImportOuroStep, context: StepContext) -> dict[str, Any]:
    """Result: {"run", "step", "position", "tokens", "loss"}."""
    from lt2_platform.distill.teacher import store_ouro

    return {"run": context.run_id} | store_ouro(config.folder, context.out, tokenizer=config.tokenizer)


# distill


class DistillStep(StepConfig):
    """One stage: `train.objective` is align (stage 1) or distill (stages 2 and 3).

    Attributes:
        teacher: a run or checkpoint with the same attention in every layer.
        student: a run or checkpoint of an earlier stage to start from; None: the teacher, converted.
        mixer, kept: as of DistillRun; kept may be what a select_layers step chose.
        topk: the teacher's stored top-k, in place of asking it at every step.
        score_sequences: held-out sequences on which the distance to the teacher is measured afterwards.
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
    def _objective(self) -> DistillStep:
        if self.train.objective.type == "next_token":
            raise ValueError("train.objective is next_token; give align (stage 1) or distill (stages 2 and 3)")
        return self


def describe_distill(config: DistillStep, context: StepContext) -> str:
    """Objective, tokens and, where the teacher's config is known before it runs, parameters and FLOPs."""
    from lt2.accounting import parameters
    from lt2_workflows.cost import flops_per_token
    from lt2_workflows.plan import planned_training

    train = config.train
    seq_len = dataset_facts(config.data, context, vocab_size=1)["seq_len"]
    tokens = train.steps * train.global_batch_size * seq_len
    parts = [f"{train.objective.type}, {train.steps:,} steps, {amount(tokens)} tokens in rows of {seq_len:,}"]
    _, kept = planned_student(config, context)
    where = f"the choice of {kept.step}" if isinstance(kept, SelectionRef) else list(kept) or "no layer"
    parts.append(f"attention kept in {where}")
    run = planned_training(config, context)
    if not isinstance(run, str | None):
        flops = amount(tokens * flops_per_token(run, "none"))
        parts.append(f"{amount(parameters(run.model).total)} parameters, {flops} FLOPs with the teacher's")
    return "; ".join(parts)


def planned_stage(config: DistillStep, context: StepContext) -> tuple[ModelConfig, ModelConfig] | None:
    """(student, teacher) of a stage before anything has run; None where nothing tells the teacher's config yet."""
    teacher = planned_teacher(config.teacher, context)
    if teacher is None:
        return None
    mixer, kept = planned_student(config, context)
    if isinstance(kept, SelectionRef):  # which layers they are hardly matters here
        source = context.workflow.configs[kept.step]
        kept = uniform_layers(teacher.n_layers, source.count if isinstance(source, SelectLayersStep) else 0)
    return stage_config(DistillRun(mixer=mixer, kept=kept, train=config.train), teacher, None).model, teacher


def planned_teacher(teacher: CheckpointRef | str, context: StepContext) -> ModelConfig | None:
    """The teacher's config: of a checkpoint, or as far as the workflow or the Ouro folder it imports tells it."""
    if isinstance(teacher, str):
        from lt2_platform.train.checkpoint import CheckpointError, read_info, resolve

        try:
            return read_info(resolve(teacher)).model
        except CheckpointError:  # a plan may be made before its inputs are
            return None
    source = context.workflow.configs[teacher.step]
    if isinstance(source, ImportOuroStep):
        return source.model
    return planned_model(source, context)[0] if isinstance(source, PretrainStep) else None


def planned_student(
    config: DistillStep, context: StepContext
) -> tuple[MixerConfig | None, tuple[int, ...] | SelectionRef]:
    """(mixer, layers that keep attention or who chooses them), from this stage or the stages it starts from."""
    mixer, kept, student = config.mixer, config.kept, config.student
    while (mixer is None or kept is None) and isinstance(student, Ref):
        before = context.workflow.configs[student.step]
        if not isinstance(before, DistillStep):
            break
        mixer, student = mixer or before.mixer, before.student
        kept = before.kept if kept is None else kept
    return mixer, () if kept is None else kept


@step_type(DistillStep, describe=describe_distill)
def run_distill(config: DistillStep, context: StepContext) -> dict[str, Any]:
    """Result: as of run_pretrain, and "kept", and "kl" and "kl_loops" to the teacher on held-out text (nats/token)."""
    from lt2_platform.distill.measure import checkpoint_kl
    from lt2_platform.distill.run import distill
    from lt2_platform.results import ResultsStore
    from lt2_platform.train.checkpoint import read_info, resolve

    teacher = context.path(config.teacher)
    others = {name: getattr(config, name) for name in ("student", "topk")}
    places = {name: None if place is None else context.path(place) for name, place in others.items()}
    kept = config.kept
    if isinstance(kept, SelectionRef):
        kept = tuple(context.result(kept)["kept"])
    data = context.path(config.data)
    options = train_options(config.resources, context)
    run = DistillRun(mixer=config.mixer, kept=kept, train=config.train)
    summary = distill(run, teacher=teacher, **places, data=data, **options)
    checkpoint = resolve(context.out)
    layout: Any = read_info(checkpoint).model.layout
    context.progress({"message": "distance to the teacher on held-out text"})
    found = checkpoint_kl(
        checkpoint,
        teacher,
        data,
        max_sequences=config.score_sequences,
        document_mask=config.train.document_mask,
    )
    asked = config.teacher
    named = context.workflow.steps[asked.step].id if isinstance(asked, Ref) else asked
    row = {"task": "distillation", "n": found["tokens"], "unit": "nats/token", "step": summary["step"]}
    row["teacher"] = named  # a run's name, or the path that was given
    rows = [row | {"metric": "teacher_kl", "value": found["kl"]}]
    rows += [row | {"metric": f"teacher_kl_loop_{loop}", "value": kl} for loop, kl in enumerate(found["kl_loops"])]
    ResultsStore(context.storage).log_eval(context.run_id, "distillation", rows)
    result = {key: value for key, value in summary.items() if key != "checkpoint"}
    measured = {"kl": found["kl"], "kl_loops": found["kl_loops"]}
    return {"run": context.run_id, **result, "kept": list(layout.kept), **measured}


# select_layers


class SelectLayersStep(StepConfig):
    """Which `count` layers keep attention (paper, Sec. Distilling).

    Attributes:
        method: "kl" ranks by the probes' distance to the teacher; "one_shot" by that of the untrained single-layer
            students of a stage-1 student; "uniform" spaces them evenly and needs neither.
        probes: of "kl": the short stage-2 runs, one per layer in order, the i-th with kept (i,).
        teacher, student, data, sequences: of "one_shot": who is compared, on how many held-out sequences.
    """

    produces: ClassVar[str] = "selection"
    type: Literal["select_layers"] = "select_layers"
    method: Literal["kl", "one_shot", "uniform"]
    count: int = Field(ge=1)
    n_layers: int = Field(ge=1)
    probes: tuple[CheckpointRef, ...] = ()
    teacher: CheckpointRef | str | None = None
    student: CheckpointRef | str | None = None
    data: DatasetRef | str | None = None
    sequences: int = Field(default=32, ge=1)

    @model_validator(mode="after")
    def _inputs(self) -> SelectLayersStep:
        if self.count > self.n_layers:
            raise ValueError(f"count {self.count} exceeds the {self.n_layers} layers there are")
        if self.method == "kl" and len(self.probes) != self.n_layers:
            raise ValueError(f"method kl needs one probe per layer, {self.n_layers}; there are {len(self.probes)}")
        if self.method == "one_shot" and None in (self.teacher, self.student, self.data):
            raise ValueError("method one_shot needs teacher, student (of stage 1) and data")
        return self


def describe_select(config: SelectLayersStep, context: StepContext) -> str:
    how = {"kl": f"by {len(config.probes)} probes", "one_shot": "by swapping one layer at a time", "uniform": "evenly"}
    return f"{config.count} of {config.n_layers} layers keep attention, chosen {how[config.method]}"


@step_type(SelectLayersStep, describe=describe_select)
def run_select_layers(config: SelectLayersStep, context: StepContext) -> dict[str, Any]:
    """Result: {"kept": layers, "scores": KL of each layer's student, None where nothing was measured, "text"}."""
    scores: list[float] | None = None
    if config.method == "kl":
        found = [context.result(probe) for probe in config.probes]
        for layer, result in enumerate(found):
            if result["kept"] != [layer]:
                raise ConfigError(f"probe {config.probes[layer].step} keeps {result['kept']}, not [{layer}]")
        scores = [result["kl"] for result in found]
    elif config.method == "one_shot":
        from lt2_platform.distill.measure import one_shot_scores

        assert config.teacher is not None
        assert config.student is not None
        assert config.data is not None
        scores = one_shot_scores(
            *(context.path(place) for place in (config.student, config.teacher, config.data)),
            max_sequences=config.sequences,
            progress=context.progress,
        )
    if scores is None:
        kept = uniform_layers(config.n_layers, config.count)
    else:
        kept = best_layers(scores, config.count)
    rows = [
        {"layer": layer, "KL with it alone kept": "" if scores is None else f"{scores[layer]:.4f}", "kept": mark}
        for layer, mark in enumerate("yes" if layer in kept else "" for layer in range(config.n_layers))
    ]
    text = table(rows, ["layer", "KL with it alone kept", "kept"])
    record = {"method": config.method, "kept": list(kept), "scores": scores}
    context.storage.write_json(f"{context.step.folder}/out/selection.json", record)
    return {"kept": list(kept), "scores": scores, "text": f"\nlayers that keep attention ({config.method})\n\n{text}\n"}


# teacher_topk


class TopKResources(Resources):
    """num_workers tasks at a time; each loads the teacher, on `gpus_per_worker` of a GPU if there is one."""

    gpus_per_worker: float = Field(default=1.0, ge=0)


class TeacherTopKStep(StepConfig):
    """The teacher's top-k of every training sequence, stored over Ray Data (see lt2_platform.distill.topk)."""

    produces: ClassVar[str] = "teacher_topk"
    uses_ray: ClassVar[bool] = True
    type: Literal["teacher_topk"] = "teacher_topk"
    resources: TopKResources = TopKResources()
    teacher: CheckpointRef | str
    data: DatasetRef | str
    k: int = Field(default=64, ge=1)
    final_only: bool = False
    document_mask: bool = False
    batch_size: int = Field(default=4, ge=1)


@step_type(TeacherTopKStep, describe=lambda config, context: f"top {config.k} logits of every training token")
def run_teacher_topk(config: TeacherTopKStep, context: StepContext) -> dict[str, Any]:
    """Result: the manifest without identities."""
    from lt2_platform.distill.topk import store_top_k

    gpus = join_ray().get("GPU", 0)
    record = store_top_k(
        teacher=context.path(config.teacher),
        data=context.path(config.data),
        out=context.out,
        k=config.k,
        final_only=config.final_only,
        document_mask=config.document_mask,
        batch_size=config.batch_size,
        parallelism=config.resources.num_workers,
        num_gpus=config.resources.gpus_per_worker if gpus else 0,
        progress=context.progress,
    )
    return {name: record[name] for name in ("k", "loops", "sequences", "seq_len")}
