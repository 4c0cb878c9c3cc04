"""Proof that an exported model computes what the model in memory computes, however it is called.

The truth is the model in memory on one unpadded row at a time, without a cache. The exported model, reloaded from its
files, must give the same logits alone, in a batch, padded on either side, and through its caches, at every loop depth.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from functools import partial
from typing import Any

import torch
from torch import Tensor

from lt2.config import ConfigError
from lt2.interop.transformers import LoopedCache, LT2ForCausalLM
from lt2.model import LoopedLM

TOLERANCE = {torch.float64: 1e-9, torch.float32: 1e-4}
"""Largest error allowed by the dtype that certification runs in: max |difference| / max(1, max |logit|).

Half-precision models are certified in fp32: in their own dtype rounding would hide a wrong cache.
"""
LENGTHS = (80, 21, 50)  # the longest crosses the chunk and block boundaries of 64
DECODED = 5


class ParityError(ConfigError):
    """The exported files do not compute what the model in memory does; nothing was written."""


@dataclass(frozen=True)
class Check:
    """One comparison: how the exported model was called, at which depth, and the largest relative error."""

    name: str
    n_loops: int
    error: float
    tolerance: float

    @property
    def passed(self) -> bool:
        return self.error <= self.tolerance  # NaN does not pass

    def as_dict(self) -> dict[str, Any]:
        return {**asdict(self), "passed": self.passed}


@torch.no_grad()
def certify(
    model: LoopedLM, exported: LT2ForCausalLM, *, lengths: tuple[int, ...] = LENGTHS, device: str = "cpu"
) -> list[Check]:
    """Compare every way of calling `exported` with `model`, on random rows of the given lengths.

    Returns the checks, passed or not; both models are left as they were found. Each length must exceed DECODED.
    """
    if min(lengths) <= DECODED:
        raise ConfigError(f"lengths {lengths} must each exceed {DECODED}, the tokens decoded one by one")
    dtype = torch.float64 if model.embed.weight.dtype == torch.float64 else torch.float32
    generator = torch.Generator().manual_seed(0)
    vocab_size = model.config.vocab_size
    rows = [torch.randint(0, vocab_size, (n,), generator=generator).to(device) for n in lengths]
    checks = [Check("weights", model.config.n_loops, weight_difference(model, exported.model), 0.0)]
    with prepared(exported, device, dtype) as other, prepared(model, device, dtype) as reference:
        truth = [reference(row[None], per_loop=True).loops for row in rows]
        for depth in range(1, model.config.n_loops + 1):
            expected = [reference.logits(loops[depth - 1][0]) for loops in truth]
            for name, call in CALLS.items():
                got = call(other, rows, depth)
                errors = torch.tensor([difference(a, b) for a, b in zip(got, expected)], dtype=torch.float64)
                checks.append(Check(name, depth, errors.max().item(), TOLERANCE[dtype]))  # Python's max may lose a NaN
    return checks


@contextmanager
def prepared(model: Any, device: str, dtype: torch.dtype) -> Iterator[Any]:
    """`model` in eval mode on device in dtype: itself where it is so already, else a copy."""
    if all(p.dtype == dtype and p.device == torch.device(device) for p in model.parameters()):
        was_training = model.training
        try:
            yield model.eval()
        finally:
            model.train(was_training)
    else:
        yield copy.deepcopy(model).to(device=device, dtype=dtype).eval()


def weight_difference(model: LoopedLM, exported: LoopedLM) -> float:
    """0 when both hold the same names, dtypes and bits, else infinity."""
    ours, theirs = model.state_dict(), exported.state_dict()
    same = ours.keys() == theirs.keys() and all(
        ours[name].dtype == theirs[name].dtype and torch.equal(ours[name].cpu(), theirs[name].cpu()) for name in ours
    )
    return 0.0 if same else float("inf")


def difference(got: Tensor, expected: Tensor) -> float:
    """Relative to the largest logit, and to 1 when all are smaller; NaN anywhere gives NaN."""
    return ((got - expected).abs().max() / expected.abs().max().clamp(min=1)).item()


def alone(model: LT2ForCausalLM, rows: list[Tensor], n_loops: int) -> list[Tensor]:
    return [model(row[None], n_loops=n_loops).logits[0] for row in rows]


def batched(model: LT2ForCausalLM, rows: list[Tensor], n_loops: int) -> list[Tensor]:
    """Each row in a batch with the others that are long enough, cut to its length."""
    logits = []
    for row in rows:
        others = [other[: len(row)] for other in rows if other is not row and len(other) >= len(row)]
        batch = torch.stack([*others, row, row.flip(0)])
        logits.append(model(batch, n_loops=n_loops).logits[len(others)])
    return logits


def padded(model: LT2ForCausalLM, rows: list[Tensor], n_loops: int, *, side: str) -> list[Tensor]:
    ids, mask = pad(rows, side)
    logits = model(ids, attention_mask=mask, n_loops=n_loops).logits
    return [logits[i][mask[i].bool()] for i in range(len(rows))]


def cached(model: LT2ForCausalLM, rows: list[Tensor], n_loops: int) -> list[Tensor]:
    """Prefill of all rows but their last tokens as one left-padded batch, then those tokens one by one."""
    ids, mask = pad([row[:-DECODED] for row in rows], "left")
    cache = LoopedCache(model.model.init_cache(len(rows), ids.shape[1] + DECODED, n_loops=n_loops))
    first = model(ids, attention_mask=mask, cache=cache, n_loops=n_loops).logits
    steps = []
    for step in range(DECODED):
        token = torch.stack([row[len(row) - DECODED + step] for row in rows])[:, None]
        steps.append(model(token, cache=cache, n_loops=n_loops).logits)
    rest = torch.cat(steps, dim=1)
    return [torch.cat([first[i][mask[i].bool()], rest[i]]) for i in range(len(rows))]


def pad(rows: list[Tensor], side: str) -> tuple[Tensor, Tensor]:
    """(B, L) ids and mask; pads repeat a real token, so that a leak shows."""
    longest = max(map(len, rows))
    ids, masks = [], []
    for row in rows:
        filler = row[:1].expand(longest - len(row))
        ones, zeros = torch.ones_like(row), torch.zeros_like(filler)
        ids.append(torch.cat([filler, row] if side == "left" else [row, filler]))
        masks.append(torch.cat([zeros, ones] if side == "left" else [ones, zeros]))
    return torch.stack(ids), torch.stack(masks)


CALLS: dict[str, Callable[[LT2ForCausalLM, list[Tensor], int], list[Tensor]]] = {
    "alone": alone,
    "batched": batched,
    "padded_right": partial(padded, side="right"),
    "padded_left": partial(padded, side="left"),
    "cached": cached,
}
