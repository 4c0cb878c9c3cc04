"""A training run before it starts, and the FLOPs it spends. Importing this module imports no torch; the memory of cards
(cost.py) is planned with what shards models, whose import takes a second.
"""

from __future__ import annotations

from dataclasses import dataclass

from lt2.config import ModelConfig
from lt2.layout import layout
from lt2.train.config import Recompute, TrainConfig


@dataclass(frozen=True)
class Training:
    """teacher: whom a stage of distillation asks. done: steps it goes on from."""

    model: ModelConfig
    train: TrainConfig
    seq_len: int
    teacher: ModelConfig | None = None
    done: int = 0


def flops_per_token(run: Training, recompute: Recompute) -> float:
    """FLOPs a card spends per token, on average: those of the objective, and what is computed again."""
    from lt2.analysis.accounting import depths, objective_flops, stack_flops, warmup_flops

    config, seq_len, objective, steps = run.model, run.seq_len, run.train.objective, run.train.steps
    blocks = stack_flops(config, objective, seq_len)
    recurrences = [
        sum(spec.sequence_flops(config.dims, seq_len) for spec in row if spec.type not in ("full", "window", "mla"))
        for row in layout(config)
    ]
    each = [sum(recurrences[:n_loops]) for n_loops in depths(config, objective)]
    again = {"none": 0.0, "selective": sum(each) / len(each), "block": blocks, "loop": 2 * blocks}[recompute]
    # DSA's first steps; their attention is kept where "selective" runs only recurrences again.
    more = warmup_flops(config, objective, seq_len).items()
    dense = sum(flops * max(0, until - run.done) for until, flops in more) / max(1, steps - run.done)
    forwards = {"none": 3, "selective": 3, "block": 4, "loop": 5}[recompute]  # a backward is two
    return objective_flops(config, objective, seq_len, teacher=run.teacher) + again + forwards * dense
