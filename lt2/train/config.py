"""How to train, as a frozen config. Importable without torch."""

from __future__ import annotations

from typing import Annotated, Any, Literal

from pydantic import Field, field_validator, model_validator

from lt2.config import Config, ConfigError, ModelConfig
from lt2.layout import schedules
from lt2.mixer_configs import DSAConfig
from lt2.train.objectives import AnyObjective, NextTokenConfig
from lt2.train.schedules import AnySchedule, CosineSchedule, WSDSchedule

Recompute = Literal["none", "selective", "block", "loop"]
"""What backward computes again, from most memory to least; see `lt2.train.parallel.wrap_blocks`."""

SEEDS = frozenset({"seed", "init_seed"})
"""Settings in which runs may differ that repeat each other."""

Beta = Annotated[float, Field(ge=0, lt=1)]
Seed = Annotated[int, Field(ge=-(2**63), lt=2**63)]  # what torch's generators take, and a rank's number more


class AdamWConfig(Config):
    """AdamW for every weight (the paper's), with `betas` and `weight_decay`."""

    type: Literal["adamw"] = "adamw"


class MuonConfig(Config):
    """Muon for matrices inside blocks and AdamW for the rest, at one `lr` and `weight_decay`; see lt2.train.muon."""

    type: Literal["muon"] = "muon"
    momentum: float = Field(default=0.95, ge=0, lt=1)
    newton_schulz_steps: int = Field(default=5, gt=0)


AnyOptimizer = Annotated[AdamWConfig | MuonConfig, Field(discriminator="type")]


class TrainConfig(Config):
    """How to train. Batch sizes count sequences; `global_batch_size` stays the same for any number of workers.

    activation_checkpoint: false (or "none"), "selective", true (or "block"), "loop". keep_gathered: hold every gathered
    block until the step's last backward; "auto" does so where the planned memory fits the card (lt2.memory).
    async_save: the loop waits only for a copy in memory.
    shard_workers: shard within groups of so many workers and replicate between them; None shards over all.
    """

    objective: AnyObjective = NextTokenConfig()
    steps: int = Field(gt=0)
    global_batch_size: int = Field(gt=0)
    micro_batch_size: int | None = Field(default=None, gt=0)
    lr: float = Field(default=3e-4, gt=0)
    min_lr_ratio: float = Field(default=0.1, ge=0, le=1)
    warmup_steps: int = Field(default=0, ge=0)
    schedule: AnySchedule = CosineSchedule()
    optimizer: AnyOptimizer = AdamWConfig()
    betas: tuple[Beta, Beta] = (0.9, 0.95)
    weight_decay: float = Field(default=0.1, ge=0)
    decay_all: bool = False
    grad_clip: float | None = Field(default=1.0, gt=0)
    z_loss: float = Field(default=0.0, ge=0)
    document_mask: bool = False
    seed: Seed = 0
    init_seed: Seed | None = None  # of the weights; None: seed
    precision: Literal["auto", "fp32", "bf16"] = "auto"
    activation_checkpoint: bool | Literal["selective", "loop"] = False
    compile: bool = False
    keep_gathered: bool | Literal["auto"] = True
    shard_workers: int | None = Field(default=None, gt=1)
    log_every: int = Field(default=10, gt=0)
    checkpoint_every: int | None = Field(default=None, gt=0)
    keep_checkpoints: int = Field(default=2, gt=0)
    keep_every: int | None = Field(default=None, gt=0)
    keep_best: bool = True
    async_save: bool = True
    save_patience_s: float = Field(default=900.0, ge=0)
    rollbacks: int = Field(default=2, ge=0)
    hang_factor: float = Field(default=10.0, gt=1)
    hang_floor_s: float = Field(default=300.0, gt=0)
    eval_every: int | None = Field(default=None, gt=0)
    eval_sequences: int = Field(default=256, gt=0)

    @property
    def recompute(self) -> Recompute:
        """`activation_checkpoint` by the name that `lt2.train.parallel.wrap_blocks` takes."""
        named: dict[bool, Recompute] = {False: "none", True: "block"}
        return (
            named[self.activation_checkpoint]
            if isinstance(self.activation_checkpoint, bool)
            else self.activation_checkpoint
        )

    def rows(self, workers: int) -> tuple[int, int]:
        """Sequences of each of `workers` per step, and how many of them run at a time."""
        rows = max(1, self.global_batch_size // workers)
        return rows, min(self.micro_batch_size or rows, rows)

    @field_validator("activation_checkpoint", mode="before")
    @classmethod
    def _by_name(cls, value: Any) -> Any:
        return {"none": False, "block": True}.get(value, value) if isinstance(value, str) else value

    @model_validator(mode="after")
    def _check(self) -> TrainConfig:
        if self.warmup_steps >= self.steps:
            raise ValueError(
                f"warmup_steps {self.warmup_steps} leaves no step of {self.steps} at the full lr; "
                "lower it, or raise steps"
            )
        if isinstance(self.schedule, WSDSchedule) and self.warmup_steps + self.schedule.decay_steps > self.steps:
            raise ValueError(
                f"schedule: warmup_steps {self.warmup_steps} and decay_steps {self.schedule.decay_steps} are more than "
                f"{self.steps} steps; lower one, or raise steps"
            )
        if self.compile and self.activation_checkpoint == "selective":
            raise ValueError(
                "activation_checkpoint 'selective' cannot see into compiled blocks; use 'block' or compile: false"
            )
        return self


def check_model(model: ModelConfig, train: TrainConfig) -> None:
    """Raise ConfigError where `model` cannot be trained as `train` says, or would learn another function than it is."""
    check_recompute(model, train.recompute)
    train.objective.check(model, train)
    for mixer in (mixer for schedule in schedules(model) for loop in schedule for mixer in loop):
        if isinstance(mixer, DSAConfig) and mixer.warmup_steps >= train.steps:
            raise ConfigError(
                f"dsa: warmup_steps {mixer.warmup_steps} leaves none of {train.steps} training steps sparse, as the "
                "model runs afterwards; lower it (0 where the indexer is trained already), or raise train.steps"
            )


def check_recompute(model: ModelConfig, recompute: str) -> None:
    """Raise ConfigError where `model` cannot be trained with that recomputation."""
    if recompute == "loop" and model.halting is not None:
        raise ConfigError(
            "train.activation_checkpoint 'loop': a loop of a model that halts cannot be recomputed; use 'block'"
        )
