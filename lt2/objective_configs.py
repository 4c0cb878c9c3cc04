"""What training minimises, as configs. Importable without torch.

An objective of one's own is a subclass of `ObjectiveConfig` in a file of one's own: its `module` names a function
(config, train: TrainConfig) -> `lt2.loss.Objective`.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Annotated, Any, ClassVar, Literal

from pydantic import BeforeValidator, Field, SerializeAsAny

from lt2.extension import Extension

if TYPE_CHECKING:
    from lt2.train_config import TrainConfig


class ObjectiveConfig(Extension):
    """Base of all objectives."""

    noun: ClassVar[str] = "objective"

    def build(self, train: TrainConfig) -> Any:
        """The `lt2.loss.Objective` of a training run."""
        return self.implementation()(self, train)


AnyObjective = Annotated[SerializeAsAny[ObjectiveConfig], BeforeValidator(ObjectiveConfig.read)]


class NextTokenConfig(ObjectiveConfig):
    """Cross entropy of the last loop, and the model's auxiliary losses."""

    module: ClassVar[str] = "lt2.loss:build_next_token"
    type: Literal["next_token"] = "next_token"


class ExitGateConfig(ObjectiveConfig):
    """Every loop's cross entropy by the probability of exiting there (Ouro, stage I); needs halting "exit_gate"."""

    module: ClassVar[str] = "lt2.exit_gate:build_exit_gate"
    type: Literal["exit_gate"] = "exit_gate"
    entropy_weight: float = Field(default=0.05, ge=0)
