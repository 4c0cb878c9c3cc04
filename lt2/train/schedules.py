"""The learning rate over a run: what configs say, and that as a pure function of the step. Importable without torch."""

from __future__ import annotations

import math
from collections.abc import Callable
from functools import partial
from typing import Annotated, Literal

from pydantic import Field

from lt2.config import Config

Schedule = Callable[[int], float]


class CosineSchedule(Config):
    """After warm-up down to min_lr_ratio·lr along half a cosine (the paper's)."""

    type: Literal["cosine"] = "cosine"


class LinearSchedule(Config):
    """After warm-up down to min_lr_ratio·lr in a straight line."""

    type: Literal["linear"] = "linear"


class ConstantSchedule(Config):
    """After warm-up lr to the end: the trunk that runs of several lengths go on from (`continue_from`)."""

    type: Literal["constant"] = "constant"


class WSDSchedule(Config):
    """Warm-up, lr, and over the last decay_steps down to min_lr_ratio·lr (warmup-stable-decay, Hu et al. 2024).

    shape of the decay: "sqrt" is 1 − √progress (Hägele et al. 2024).
    """

    type: Literal["wsd"] = "wsd"
    decay_steps: int = Field(gt=0)
    shape: Literal["sqrt", "linear", "cosine"] = "sqrt"


AnySchedule = Annotated[CosineSchedule | LinearSchedule | ConstantSchedule | WSDSchedule, Field(discriminator="type")]


COSINE = CosineSchedule()


def learning_rate(
    schedule: AnySchedule = COSINE,
    *,
    lr: float,
    steps: int,
    warmup_steps: int = 0,
    min_lr_ratio: float = 0.1,
) -> Schedule:
    """step -> learning rate: linear from lr/warmup to lr, then as `schedule` says, with its end at the last step.

    A pure function of the step (0-based), so a resumed run needs nothing but its step number.
    """
    return partial(_rate, schedule, lr=lr, steps=steps, warmup_steps=warmup_steps, min_lr_ratio=min_lr_ratio)


def _rate(schedule: AnySchedule, step: int, *, lr: float, steps: int, warmup_steps: int, min_lr_ratio: float) -> float:
    if step < warmup_steps:
        return lr * (step + 1) / warmup_steps
    if isinstance(schedule, ConstantSchedule):
        return lr
    if isinstance(schedule, WSDSchedule):
        first, length, shape = steps - 1 - schedule.decay_steps, schedule.decay_steps, schedule.shape
    else:
        first, length, shape = warmup_steps, max(1, steps - 1 - warmup_steps), schedule.type
    progress = min(1.0, max(0.0, (step - first) / length))
    return lr * (min_lr_ratio + (1 - min_lr_ratio) * _LEFT[shape](progress))


_LEFT: dict[str, Callable[[float], float]] = {
    "sqrt": lambda progress: 1 - math.sqrt(progress),
    "linear": lambda progress: 1 - progress,
    "cosine": lambda progress: 0.5 * (1 + math.cos(math.pi * progress)),
}
