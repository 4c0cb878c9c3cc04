"""What a training run would need of given cards: memory by purpose, by way of recomputation, and hours."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any, get_args

from lt2.analysis.accounting import CARD_BYTES, PEAK_FLOPS, find_card
from lt2.config import ConfigError
from lt2.memory import OUTSIDE, Known, Memory, keeps_gathered, plan_memory
from lt2.train.config import Recompute
from lt2_platform.train.config import check_workers
from lt2_workflows.console import table
from lt2_workflows.training import Training, flops_per_token

GB = 1e9
PURPOSES = {
    "parameters": "weights, fp32",
    "teacher": "the teacher's weights",
    "optimizer": "the optimizer's moments, fp32",
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


def describe_cost(run: Training, hardware: Hardware, known: Known) -> str:
    """Tables for a terminal. Raises ConfigError for an unknown card and a `count` that cannot share batch and weights.

    known: what earlier ones traced.
    """
    card, count, train = find_card(hardware.card), hardware.count, run.train
    batch = train.global_batch_size
    if batch % count:
        fitting = [n for n in range(1, batch + 1) if batch % n == 0]
        near = {max(n for n in fitting if n <= count), min((n for n in fitting if n >= count), default=batch)}
        raise ConfigError(
            f"train.global_batch_size {batch} is not divisible by {count} cards; plan with --count "
            f"{' or '.join(map(str, sorted(near)))}, or set train.global_batch_size to a multiple of {count}"
        )
    check_workers(train, count)
    rows, micro = train.rows(count)
    size, cards = CARD_BYTES[card], f"{count} x {card}"
    keep = keeps_gathered(
        run.model, train, run.seq_len, workers=count, card_bytes=size, teacher=run.teacher, known=known
    )
    run = replace(run, train=train.model_copy(update={"keep_gathered": keep}))
    plans: dict[Recompute, Memory] = {
        name: _memory(run, count, known, activation_checkpoint=name) for name in _policies(run)
    }
    chosen = plans[train.recompute]
    lines = [
        f"{cards} of {size / GB:.0f} GB: {rows} sequences of {run.seq_len:,} tokens each per step, {micro} at a time"
        + (f", gathered weights {'kept' if keep else 'freed after each use'}" if count > 1 else ""),
        "",
        _by_purpose(chosen, size),
        "",
        _by_policy(plans, run, hardware, card),
        "",
        f"time assumes {hardware.utilisation:.0%} of {PEAK_FLOPS[card] / 1e12:.0f} TFLOP/s per card (--utilisation), "
        f"without interruptions; memory excludes document masks, compiler fusion and fragmentation",
    ]
    if train.precision == "fp32":
        lines.append("THE PEAK IS FOR BF16, but this run computes in fp32 (train.precision): hours are far too low")
    if chosen.total + OUTSIDE > size:
        lines += ["", _advice(run, count, micro, size, known)]
    return "\n".join(lines)


def _memory(run: Training, count: int, known: Known, **changes: Any) -> Memory:
    """The plan of a run on `count` cards, with other settings of `train` where asked."""
    train = run.train.model_copy(update=changes)
    return plan_memory(run.model, train, run.seq_len, workers=count, teacher=run.teacher, known=known)


def _policies(run: Training) -> list[Recompute]:
    excluded = {"selective"} if run.train.compile else set()
    excluded |= {"loop"} if run.model.halting is not None else set()
    # "selective" sees nothing of compiled blocks; loops of a model that halts cannot be run again.
    return [name for name in get_args(Recompute) if name not in excluded]


def _by_purpose(memory: Memory, size: float) -> str:
    found = {label: getattr(memory, name) for name, label in PURPOSES.items() if name != "teacher" or memory.teacher}
    rows = [{"memory per card": label, "GB": size / GB} for label, size in found.items()]
    rows.append({"memory per card": "outside torch (assumed)", "GB": OUTSIDE / GB})
    total = memory.total + OUTSIDE
    rows.append({"memory per card": f"at the peak, {total / size:.0%} of the card", "GB": total / GB})
    return table([row | {"GB": f"{row['GB']:.2f}"} for row in rows], ["memory per card", "GB"])


def _by_policy(plans: dict[Recompute, Memory], run: Training, hardware: Hardware, card: str) -> str:
    rows = []
    for name, memory in plans.items():
        flops = flops_per_token(run, name)
        speed = hardware.count * PEAK_FLOPS[card] * hardware.utilisation / flops
        tokens = (run.train.steps - run.done) * run.train.global_batch_size * run.seq_len
        rows.append(
            {
                "recomputation": name + (" (this run)" if name == run.train.recompute else ""),
                "GB per card": f"{(memory.total + OUTSIDE) / GB:.2f}",
                "fits": "yes" if memory.total + OUTSIDE <= CARD_BYTES[card] else "NO",
                "FLOPs per token": f"{flops:.3g}",
                "tokens/s": f"{speed:,.0f}",
                "hours": f"{tokens / speed / 3600:,.2f}",
            }
        )
    return table(rows, list(rows[0]))


def _advice(run: Training, count: int, micro: int, size: float, known: Known) -> str:
    """What would make it fit: the cheapest other policy, else a smaller micro-batch with the thriftiest one, else the
    same with blocks that are gathered for each use.
    """
    policies = _policies(run)
    halves = [micro >> n for n in range(1, micro.bit_length())]
    tried = [(name, micro) for name in policies] + [(policies[-1], rows) for rows in halves]
    for keep in [True, False] if run.train.keep_gathered and count > 1 else [run.train.keep_gathered]:
        for name, rows in tried:
            changes = {"activation_checkpoint": name, "micro_batch_size": rows, "keep_gathered": keep}
            if _memory(run, count, known, **changes).total + OUTSIDE > size:
                continue
            said = [f"train.activation_checkpoint={name}"]
            said += [f"train.micro_batch_size={rows}"] * (rows < micro)
            said += ["train.keep_gathered=false"] * (keep != run.train.keep_gathered)
            why = f" with recomputation {run.train.recompute!r}" if len(said) == 1 else ""
            return f"DOES NOT FIT{why}; it does with {' and '.join(said)}"
    return "DOES NOT FIT on these cards with any recomputation, even one sequence at a time; use more or larger cards"
