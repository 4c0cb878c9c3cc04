"""How to train, as a frozen config. Importable without torch."""

from __future__ import annotations

from typing import Literal

from pydantic import Field, model_validator

from lt2.config import Config
from lt2.objective_configs import AnyObjective, NextTokenConfig


class TrainConfig(Config):
    """How to train. Batch sizes count sequences; `global_batch_size` stays the same for any number of workers."""

    objective: AnyObjective = NextTokenConfig()
    steps: int = Field(gt=0)
    global_batch_size: int = Field(gt=0)
    micro_batch_size: int | None = Field(default=None, gt=0)
    lr: float = Field(default=3e-4, gt=0)
    min_lr_ratio: float = Field(default=0.1, ge=0, le=1)
    warmup_steps: int = Field(default=0, ge=0)
    betas: tuple[float, float] = (0.9, 0.95)
    weight_decay: float = Field(default=0.1, ge=0)
    decay_all: bool = False
    grad_clip: float | None = Field(default=1.0, gt=0)
    z_loss: float = Field(default=0.0, ge=0)
    document_mask: bool = False
    seed: int = 0
    init_seed: int | None = None  # of the weights; None: seed
    precision: Literal["auto", "fp32", "bf16"] = "auto"
    activation_checkpoint: bool = False
    compile: bool = False
    keep_gathered: bool = True
    log_every: int = Field(default=10, gt=0)
    checkpoint_every: int | None = Field(default=None, gt=0)
    keep_checkpoints: int = Field(default=2, gt=0)
    keep_every: int | None = Field(default=None, gt=0)
    keep_best: bool = True
    save_patience_s: float = Field(default=900.0, ge=0)
    rollbacks: int = Field(default=2, ge=0)
    hang_factor: float = Field(default=10.0, gt=1)
    hang_floor_s: float = Field(default=300.0, gt=0)
    eval_every: int | None = Field(default=None, gt=0)
    eval_sequences: int = Field(default=256, gt=0)

    @model_validator(mode="after")
    def _check(self) -> TrainConfig:
        if self.warmup_steps >= self.steps:
            raise ValueError(f"warmup_steps {self.warmup_steps} leaves no step of {self.steps} at the full lr")
        return self
