"""What a training run would need of given cards: memory by purpose, by way of recomputation, and hours."""

from __future__ import annotations

from dataclasses import dataclass
from typing import get_args

from lt2.accounting import CARD_BYTES, PEAK_FLOPS, find_card, forward_flops
from lt2.config import ConfigError, ModelConfig
from lt2.layout import layout
from lt2.memory import OUTSIDE, Memory, keeps_gathered, plan_memory
from lt2.train_config import Recompute, TrainConfig
from lt2_workflows.console import table

GB = 1e9
PURPOSES = {
    "parameters": "weights, fp32",
    "optimizer": "AdamW's moments, fp32",
    "gradients": "gradients",
    "gathered": "gathered weights",
    "activations": "activations",
    "workspace": "workspace",
}


@dataclass(frozen=True)
class Hardware:
    """`count` cards of one kind. utilisation: assumed share of their dense bf16 peak, recomputation counted as work."""

    card: str
    count: int = 1
    utilisation: float = 0.4


def describe_cost(config: ModelConfig, train: TrainConfig, seq_len: int, hardware: Hardware) -> str:
    """Tables for a terminal. Raises ConfigError for an unknown card and a batch that `count` does not divide."""
    card, count = find_card(hardware.card), hardware.count
    if train.global_batch_size % count:
        raise ConfigError(f"train.global_batch_size {train.global_batch_size} is not divisible by {count} cards")
    rows = train.global_batch_size // count
    micro = min(train.micro_batch_size or rows, rows)
    size, cards = CARD_BYTES[card], f"{count} x {card}"
    keep = keeps_gathered(config, train, seq_len, workers=count, card_bytes=size)
    train = train.model_copy(update={"keep_gathered": keep})
    plans: dict[Recompute, Memory] = {
        name: plan_memory(config, _recomputing(train, name), seq_len, workers=count)
        for name in _policies(config, train)
    }
    chosen = plans[train.recompute]
    lines = [
        f"{cards} of {size / GB:.0f} GB: {rows} sequences of {seq_len:,} tokens each per step, {micro} at a time"
        + (f", gathered weights {'kept' if keep else 'freed after each use'}" if count > 1 else ""),
        "",
        _by_purpose(chosen, size),
        "",
        _by_policy(plans, config, train, seq_len, hardware, card),
        "",
        f"time assumes {hardware.utilisation:.0%} of {PEAK_FLOPS[card] / 1e12:.0f} TFLOP/s per card (--utilisation), "
        f"without interruptions; memory without documents' masks, fusion by the compiler, and fragmentation",
    ]
    if chosen.total + OUTSIDE > size:
        lines += ["", _advice(plans, config, train, seq_len, count, micro, size)]
    return "\n".join(lines)


def _policies(config: ModelConfig, train: TrainConfig) -> list[Recompute]:
    excluded = {"selective"} if train.compile else set()
    excluded |= {"loop"} if config.halting is not None else set()
    # "selective" sees nothing of compiled blocks; loops of a model that halts cannot be run again.
    return [name for name in get_args(Recompute) if name not in excluded]


def _recomputing(train: TrainConfig, name: Recompute) -> TrainConfig:
    value = {"none": False, "block": True}.get(name, name)
    return train.model_copy(update={"activation_checkpoint": value})


def _by_purpose(memory: Memory, size: float) -> str:
    rows = [{"memory per card": label, "GB": getattr(memory, name) / GB} for name, label in PURPOSES.items()]
    rows.append({"memory per card": "outside torch (assumed)", "GB": OUTSIDE / GB})
    total = memory.total + OUTSIDE
    rows.append({"memory per card": f"at the peak, {total / size:.0%} of the card", "GB": total / GB})
    return table([row | {"GB": f"{row['GB']:.2f}"} for row in rows], ["memory per card", "GB"])


def _by_policy(
    plans: dict[Recompute, Memory], config: ModelConfig, train: TrainConfig, seq_len: int, hardware: Hardware, card: str
) -> str:
    rows = []
    for name, memory in plans.items():
        flops = flops_per_token(config, seq_len, name)
        speed = hardware.count * PEAK_FLOPS[card] * hardware.utilisation / flops
        tokens = train.steps * train.global_batch_size * seq_len
        rows.append(
            {
                "recomputation": name + (" (this run)" if name == train.recompute else ""),
                "GB per card": f"{(memory.total + OUTSIDE) / GB:.2f}",
                "fits": "yes" if memory.total + OUTSIDE <= CARD_BYTES[card] else "NO",
                "FLOPs per token": f"{flops:.3g}",
                "tokens/s": f"{speed:,.0f}",
                "hours": f"{tokens / speed / 3600:,.1f}",
            }
        )
    return table(rows, list(rows[0]))


def flops_per_token(config: ModelConfig, seq_len: int, recompute: Recompute) -> float:
    """FLOPs a card spends per token of training: forward, backward (twice that), and what is computed again."""
    forward = forward_flops(config, seq_len)
    blocks = forward - 2.0 * config.vocab_size * config.dim
    recurrences = sum(
        spec.sequence_flops(config.dims, seq_len)
        for row in layout(config)
        for spec in row
        if spec.type not in ("full", "window", "mla")
    )
    again = {"none": 0.0, "selective": recurrences, "block": blocks, "loop": 2 * blocks}[recompute]
    return 3 * forward + again


def _advice(
    plans: dict[Recompute, Memory],
    config: ModelConfig,
    train: TrainConfig,
    seq_len: int,
    count: int,
    micro: int,
    size: float,
) -> str:
    """What would make it fit: the cheapest other policy, else a smaller micro-batch with the thriftiest one."""
    fits = next((name for name, memory in plans.items() if memory.total + OUTSIDE <= size), None)
    if fits is not None:
        return f"DOES NOT FIT with recomputation {train.recompute!r}; it does with train.activation_checkpoint={fits}"
    thrifty = _recomputing(train, list(plans)[-1])
    while micro > 1:
        micro //= 2
        smaller = thrifty.model_copy(update={"micro_batch_size": micro})
        if plan_memory(config, smaller, seq_len, workers=count).total + OUTSIDE <= size:
            return (
                f"DOES NOT FIT; it does with train.activation_checkpoint={thrifty.recompute} and "
                f"train.micro_batch_size={micro}"
            )
    return "DOES NOT FIT on these cards with any recomputation, even one sequence at a time; use more or larger cards"
