"""One stage of distillation, as a training run: the student's config, and where its weights and its teacher come from.

Everything else (workers, data, resume, checkpoints, metrics, failures) is lt2_platform.train.on_ray.trainer.pretrain's.
"""

from __future__ import annotations

from typing import Any

from pydantic import model_validator

from lt2.config import AnyMixer, Config, ConfigError, KeptLayout, ModelConfig
from lt2.mixer_configs import GatedDeltaNetConfig
from lt2.train.config import TrainConfig, check_model
from lt2_platform.train.config import PretrainConfig, PretrainModel, Sources

NEW_MIXER = GatedDeltaNetConfig(conv_size=0)
"""Paper, Sec. Distilling: GDN with heads of d/H, values as wide as keys, an output gate and no short convolution."""


class DistillRun(Config):
    """What a stage trains.

    Attributes:
        mixer: what replaces attention; None: the mixer of the student it starts from, or NEW_MIXER.
        kept: layers that keep attention; None: those of the student it starts from, or none.
        train: its objective is `align` (stage 1) or `distill` (stages 2 and 3).
    """

    mixer: AnyMixer | None = None
    kept: tuple[int, ...] | None = None
    train: TrainConfig

    @model_validator(mode="after")
    def _check(self) -> DistillRun:
        if self.train.objective.type == "next_token":
            raise ValueError("train.objective is next_token; give align (stage 1) or distill (stages 2 and 3)")
        return self


def stage_config(run: DistillRun, teacher: ModelConfig, student: ModelConfig | None) -> PretrainConfig:
    """The training run of a stage that starts from `student`, or from the teacher itself where that is None.

    Raises:
        ConfigError: an objective of another kind, or what `student_config` and `check_model` say.
    """
    from lt2.distill.student import student_config

    kind = run.train.objective.type
    layout = kept_layout(student) if student is not None else None
    mixer = run.mixer or (layout.mixer if layout is not None else NEW_MIXER)
    kept = run.kept if run.kept is not None else (layout.kept if layout is not None else ())
    model = student_config(teacher, mixer, kept, both=kind == "align")
    check_model(model, run.train)
    return PretrainConfig(model=PretrainModel.of(model), train=run.train)


def kept_layout(student: ModelConfig) -> KeptLayout:
    """The layout of a student to start from. Raises ConfigError where it is of no student."""
    layout = student.layout
    if not isinstance(layout, KeptLayout):
        raise ConfigError(f"the student to start from has layout {layout.type!r}; give one that a stage has trained")
    return layout


def plan_stage(
    run: DistillRun, *, teacher: str, data: str, student: str | None = None, topk: str | None = None
) -> tuple[PretrainConfig, Sources]:
    """What `pretrain` (or `open_run`, without Ray) is to be given for a stage.

    teacher, student: runs or checkpoints; without a student it starts from the teacher. topk: a folder written by
    `store_top_k`, in place of asking the teacher. data: the packed dataset.

    Raises:
        ConfigError: models that are not there, what `stage_config` says, or data of another tokenizer.
    """
    from lt2_platform.train.checkpoints import checkpoint

    theirs = checkpoint.read_info(checkpoint.resolve(teacher))
    ours = checkpoint.read_info(checkpoint.resolve(student)).model if student is not None else None
    config = stage_config(run, theirs.model, ours)
    check_tokenizer(theirs.tokenizer, data, teacher)
    asks = run.train.objective.needs_teacher
    if asks and topk is not None:
        from lt2_platform.distill.topk import check_teacher

        check_teacher(topk, teacher)
    asked = teacher if asks and topk is None else None
    return config, Sources(start=student or teacher, teacher=asked, topk=topk if asks else None)


def distill(
    run: DistillRun, *, teacher: str, data: str, student: str | None = None, topk: str | None = None, **where: Any
) -> dict[str, Any]:
    """Run a stage to its end, or go on with it; returns the summary as `pretrain` does. See `plan_stage`.

    where: out, run_id, workers, … as of `pretrain`.
    """
    from lt2_platform.train.on_ray.trainer import pretrain

    config, sources = plan_stage(run, teacher=teacher, data=data, student=student, topk=topk)
    return pretrain(config, data=data, sources=sources, **where)


def check_tokenizer(tokenizer: dict[str, Any], data: str, model: str) -> None:
    """Raise ConfigError unless `data` was made with the `tokenizer` of the model to start or learn from."""
    from lt2_platform.data.stream import load_manifest

    same_tokenizer(tokenizer, load_manifest(data)["tokenizer"], data, model)


def same_tokenizer(tokenizer: dict[str, Any], found: dict[str, Any], data: str, model: str) -> None:
    """Raise ConfigError unless the model's `tokenizer` is `found`, the data's record of its own."""
    if found["sha256"] != tokenizer.get("sha256"):
        raise ConfigError(
            f"the model {model} was trained with tokenizer {tokenizer.get('name')!r}, {data} was prepared with "
            f"{found['name']!r} with different content; prepare the data with the model's"
        )
