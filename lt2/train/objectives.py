"""What training minimises, as configs. Importable without torch.

An objective of one's own is a subclass of `ObjectiveConfig` in a file of one's own: its `module` names a function
(config, train: TrainConfig) -> `lt2.train.loss.Objective`, or, where `needs_teacher` is set, (config, train, teacher).
"""

from __future__ import annotations

import random
from typing import TYPE_CHECKING, Annotated, Any, ClassVar, Literal

from pydantic import BeforeValidator, Field, PositiveInt, SerializeAsAny

from lt2.extension import ConfigError, Extension

if TYPE_CHECKING:
    from lt2.config import ModelConfig
    from lt2.train.config import TrainConfig


class ObjectiveConfig(Extension):
    """Base of all objectives."""

    noun: ClassVar[str] = "objective"
    needs_teacher: ClassVar[bool] = False

    def build(self, train: TrainConfig, teacher: Any = None) -> Any:
        """The `lt2.train.loss.Objective` of a training run.

        teacher: a frozen LoopedLM for objectives that need one; None where its top-k comes with the batches.
        """
        built = self.implementation()(self, train, *([teacher] if self.needs_teacher else []))
        if not self.source:
            return built
        from lt2.train.loss import checked

        return checked(self.type, built)

    def check(self, model: ModelConfig, train: TrainConfig) -> None:
        """Raise ConfigError, naming the fix, where this objective cannot train `model` as `train` says."""

    def lr_scale(self, name: str, model: ModelConfig) -> float:
        """What the learning rate of the parameter called `name` is multiplied by; 0 freezes it."""
        return 1.0

    def refuse_z_loss(self, train: TrainConfig) -> None:
        """Raise ConfigError where `train` asks for the z-loss that this objective does not have."""
        if train.z_loss:
            raise ConfigError(f"objective {self.type!r} has no z-loss; set train.z_loss to 0")


AnyObjective = Annotated[SerializeAsAny[ObjectiveConfig], BeforeValidator(ObjectiveConfig.read)]


class NextTokenConfig(ObjectiveConfig):
    """Cross entropy of the last loop, and the model's auxiliary losses.

    loops: depths to train the model for, of which every step runs one (see `loops_at`); one that is named twice runs
        twice as often. None: every step runs the model's n_loops.
    """

    module: ClassVar[str] = "lt2.train.loss:build_next_token"
    type: Literal["next_token"] = "next_token"
    loops: tuple[PositiveInt, ...] | None = Field(default=None, min_length=1)

    def check(self, model: ModelConfig, train: TrainConfig) -> None:
        # The model is evaluated, planned and exported at n_loops.
        if self.loops is not None and max(self.loops) != model.n_loops:
            raise ConfigError(
                f"objective.loops {list(self.loops)}: the largest must be the model's n_loops, {model.n_loops}; "
                "change either"
            )

    def loops_at(self, seed: int, step: int) -> int | None:
        """How many loops training step `step` runs, None: the model's n_loops. Equal on all ranks and after a resume.

        Each len(loops) steps run every depth of `loops` once, in an order drawn from `seed`: no stretch of a run, nor
        the work it was planned for, hangs on luck.
        """
        if self.loops is None:
            return None
        turn, place = divmod(step, len(self.loops))
        return random.Random(f"loops:{seed}:{turn}").sample(self.loops, len(self.loops))[place]


class ExitGateConfig(ObjectiveConfig):
    """Every loop's cross entropy by the probability of exiting there (Ouro, stage I); needs halting "exit_gate"."""

    module: ClassVar[str] = "lt2.train.exit_gate:build_exit_gate"
    type: Literal["exit_gate"] = "exit_gate"
    entropy_weight: float = Field(default=0.05, ge=0)

    def check(self, model: ModelConfig, train: TrainConfig) -> None:
        self.refuse_z_loss(train)
        if model.halting is None or model.halting.type != "exit_gate":
            raise ConfigError(
                "objective 'exit_gate' trains the gate of a model with halting.type 'exit_gate'; set both"
            )


class AlignConfig(ObjectiveConfig):
    """Distillation, stage 1: every new mixer imitates the teacher's attention on the teacher's own states.

    The model is one with a kept layout and `both`: it holds the teacher, frozen, and only its new mixers train.
    loss: of the updates t and s of the residual stream, per token; "mse" is mean((t - s)²), "l2" is ‖t - s‖₂/√dim.
    """

    module: ClassVar[str] = "lt2.distill.align:build_align"
    type: Literal["align"] = "align"
    loss: Literal["mse", "l2"] = "mse"

    def check(self, model: ModelConfig, train: TrainConfig) -> None:
        self.refuse_z_loss(train)
        if model.layout.type != "kept" or not model.layout.both:
            raise ConfigError(
                "objective 'align' trains a student that holds its teacher (layout 'kept' with both: true); a step of "
                "type 'distill' makes one"
            )
        if not has_new_mixers(model):
            raise ConfigError("objective 'align': every layer keeps its attention, so there is nothing to align")

    def lr_scale(self, name: str, model: ModelConfig) -> float:
        return float(is_new_mixer(name, model))


class DistillConfig(ObjectiveConfig):
    """Distillation, stages 2 and 3: KL to the teacher's top-k after every loop (paper Eq. kd-loss).

    Attributes:
        k: how many of the teacher's tokens are compared, both sides renormalised over them; None: all.
        temperature: T_kd, by which both sides' logits are divided.
        supervision: "scheduled" moves from the final loop to all loops alike over the first `ramp` of the steps and
            back to the final one alone after `until` of them; "uniform" and "final" are its two ends, throughout.
        rest_lr_scale: the learning rate of everything but the new mixers, as a share of theirs; 0 freezes it.
    """

    module: ClassVar[str] = "lt2.distill.logits:build_distill"
    needs_teacher: ClassVar[bool] = True
    type: Literal["distill"] = "distill"
    k: int | None = Field(default=64, ge=1)
    temperature: float = Field(default=1.0, gt=0)
    supervision: Literal["scheduled", "uniform", "final"] = "scheduled"
    ramp: float = Field(default=0.05, ge=0, le=1)
    until: float = Field(default=0.5, ge=0, le=1)
    rest_lr_scale: float = Field(default=0.07, ge=0)

    def check(self, model: ModelConfig, train: TrainConfig) -> None:
        self.refuse_z_loss(train)
        if self.rest_lr_scale == 0 and not has_new_mixers(model):
            raise ConfigError(
                "objective 'distill' with rest_lr_scale 0 trains new mixers alone, and every layer keeps its "
                "attention; keep fewer, or raise rest_lr_scale"
            )

    def lr_scale(self, name: str, model: ModelConfig) -> float:
        if name.startswith("halt."):
            return 0.0  # the KL says nothing about when to exit
        return 1.0 if is_new_mixer(name, model) else self.rest_lr_scale


def has_new_mixers(model: ModelConfig) -> bool:
    """Whether a kept layout leaves a layer without attention."""
    return model.layout.type == "kept" and len(set(model.layout.kept)) < model.n_layers


def is_new_mixer(name: str, model: ModelConfig) -> bool:
    """Whether the parameter called `name` is of a mixer that a kept layout put in the place of attention."""
    layout = model.layout
    if layout.type != "kept" or f".mixers.{layout.mixer.weights}." not in name:
        return False
    return int(name.split(".")[1]) not in layout.kept  # a layer that holds both and keeps its attention never runs it
