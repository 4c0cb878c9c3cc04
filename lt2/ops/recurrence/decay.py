"""Decays inside a chunk, and the products x_i · k_j weighted by the decay from token j to token i.

A chunk sees its past only through the state, hence three decays per token: from the chunk's start to the token
(`into`), from the token to the chunk's end (`out`), and across the whole chunk (`through`). Shapes: N chunks, R =
B·H rows, C tokens.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.autograd.function import once_differentiable

from lt2.ops.recurrence.chunking import SUB_BLOCK, Boundaries, times_transposed

# A decay below e^-80 (1.8e-35) wipes the state in any precision we use. Clamping there keeps sums of log-decays small
# enough for their differences to be accurate, and makes g = -inf (a gate of exactly 0) safe. The true gradient
# there is e^-80 too.
MIN_LOG_DECAY = -80.0


@dataclass(frozen=True)
class Decays:
    """Decay factors of one chunking: into, out (N, R, C, 1|K) and through (N, R, 1|K, 1); `log` is their running
    sum."""

    log: Tensor
    into: Tensor
    out: Tensor
    through: Tensor


def decays(g: Tensor, edges: Boundaries) -> Decays:
    """Decays of the chunked natural-log gates g (N, R, C, 1|K)."""
    # The running sum is kept in fp64: its differences, not its values, are what matters.
    log = g.clamp_min(MIN_LOG_DECAY).double().cumsum(-2)
    end = log[..., -1:, :]
    return Decays(
        log=log,
        into=_masked(log.to(g.dtype).exp(), edges.into),
        out=_masked((end - log).to(g.dtype).exp(), edges.out),
        through=_masked(end.to(g.dtype).exp(), edges.through).transpose(-1, -2),
    )


def decay_state(state: Tensor, g: Tensor | None) -> Tensor:
    """One step of decay: state (B, H, K, V) times exp(g) with g (B, H), (B, H, K) or None."""
    if g is None:
        return state
    decay = g.to(state.dtype).exp()
    return state * (decay[..., None, None] if g.ndim == 2 else decay[..., None])


def decayed_scores(rows: list[Tensor], k: Tensor, decay: Decays, edges: Boundaries) -> list[Tensor]:
    """For each x in rows: M[i, j] = Σ_c x[i, c] k[j, c] exp(log[i, c] - log[j, c]) for visible j <= i, else 0.

    rows, k: (N, R, C, K). Returns one (N, R, C, C) per row operand. Safe for any gate: every exponent used is <= 0.
    """
    if decay.log.shape[-1] == 1:
        factor = _PairDecay.apply(decay.log, edges.pairs, k.dtype)
        return [times_transposed(x, k) * factor for x in rows]
    scores = _scores_per_channel(rows, k, decay.log)
    # Inside the sub-blocks the future is already excluded; only document boundaries are left to cut.
    return scores if edges.into is None else [x.masked_fill(edges.pairs, 0.0) for x in scores]


def _scores_per_channel(rows: list[Tensor], k: Tensor, log: Tensor) -> list[Tensor]:
    """exp(log_i - log_j) does not factor safely over a whole chunk, so rows are handled in blocks of SUB_BLOCK
    tokens: pairs inside a block by broadcast, pairs with earlier blocks by a matmul, both decays anchored at the
    block's start."""
    size, dtype = SUB_BLOCK, k.dtype
    count = k.shape[-2] // size
    *row_blocks, key_blocks, log_blocks = (x.unflatten(-2, (count, size)) for x in (*rows, k, log))
    anchors = log_blocks[..., :1, :]
    local = (log_blocks - anchors).to(dtype)
    inside = _BlockScores.apply(key_blocks, local, *row_blocks)
    since_anchor = local.exp()
    decayed_rows = [x * since_anchor for x in row_blocks]

    strips: list[list[Tensor]] = [[] for _ in rows]
    for block in range(count):
        start = block * size
        keys = None
        if block:
            to_anchor = (anchors[..., block, :, :] - log[..., :start, :]).to(dtype).exp()
            keys = k[..., :start, :] * to_anchor
        for strip, x, diagonal in zip(strips, decayed_rows, inside):
            parts = [] if keys is None else [times_transposed(x[..., block, :, :], keys)]
            parts.append(diagonal[..., block, :, :])
            strip.append(F.pad(torch.cat(parts, dim=-1), (0, k.shape[-2] - start - size)))
    return [torch.cat(strip, dim=-2) for strip in strips]


class _PairDecay(torch.autograd.Function):
    """exp(log_i - log_j) where visible, else 0. As a function of its own because the gradient needs one product
    only."""

    @staticmethod
    def forward(ctx, log, hidden, dtype):
        factor = (log - log.transpose(-1, -2)).to(dtype).exp_().masked_fill_(hidden, 0.0)
        ctx.save_for_backward(factor)
        return factor

    @staticmethod
    @once_differentiable
    def backward(ctx, grad):
        (factor,) = ctx.saved_tensors
        product = grad * factor
        return (product.sum(-1) - product.sum(-2)).unsqueeze(-1).double(), None, None


class _BlockScores(torch.autograd.Function):
    """Per-channel decayed scores inside blocks: k, local, each row operand (..., c, K) -> (..., c, c) per row
    operand.

    With M[i, j] = Σ x_i k_j e^(l_i - l_j), the gradient of l is x ∘ dx - k ∘ dk: no (c, c, K) tensor is needed for
    it.
    """

    @staticmethod
    def forward(ctx, k, local, *rows):
        # Visible differences are <= 0; the clamp only keeps the future ones, cut below, from overflowing.
        decay = (local.unsqueeze(-2) - local.unsqueeze(-3)).clamp_(max=0.0).exp_()
        keys = decay * k.unsqueeze(-3)
        x = torch.stack(rows, dim=-2)  # (..., c, number of operands, K), so that keys are read once
        ctx.save_for_backward(decay, keys, k, x)
        return tuple(scores.tril() for scores in (x @ keys.transpose(-1, -2)).unbind(-2))

    @staticmethod
    @once_differentiable
    def backward(ctx, *grads):
        decay, keys, k, x = ctx.saved_tensors
        grad = torch.stack([grad.tril() for grad in grads], dim=-2)
        d_x = grad @ keys
        d_k = (grad.transpose(-1, -2) @ x).mul_(decay).sum(-3)
        d_local = (x * d_x).sum(-2) - k * d_k
        return d_k, d_local, *d_x.unbind(-2)


def _masked(x: Tensor, mask: Tensor | None) -> Tensor:
    return x if mask is None else x.masked_fill(mask, 0.0)
