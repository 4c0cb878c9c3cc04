"""What the two chunkwise recurrences share: the chunk-major layout, decays inside a chunk, and document boundaries.

Layout: (B, L, H, D) becomes (N, B·H, C, D): chunk first, so that the only sequential part, the walk over N chunks,
reads contiguous slices. A chunk sees its past only through the state, hence three decays per token: from the
chunk's start to the token (`into`), from the token to the chunk's end (`out`), and across the whole chunk
(`through`).
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor

# A decay below e^-80 (1.8e-35) wipes the state in any precision we use. Clamping there keeps sums of log-decays
# small enough for their differences to be accurate, and makes g = -inf (a gate of exactly 0) safe. The true
# gradient there is e^-80 too.
MIN_LOG_DECAY = -80.0

# Per-channel decays are compared pairwise by explicit broadcast inside blocks of this many tokens.
SUB_BLOCK = 8


@dataclass(frozen=True)
class Boundaries:
    """Where information may flow inside a chunk. Bool masks, True where it may not (None: it always may).

    pairs: (C, C) or (N, B·H, C, C), row i may not read row j (future, or another document);
    into: (N, B·H, C, 1), the token lies after a document start, so it does not see the incoming state;
    out: (N, B·H, C, 1), a document starts after the token, so it does not reach the outgoing state;
    through: (N, B·H, 1, 1), the chunk holds a document start.
    """

    pairs: Tensor
    into: Tensor | None = None
    out: Tensor | None = None
    through: Tensor | None = None


@dataclass(frozen=True)
class Decays:
    """Decay factors of one chunking: into, out (N, B·H, C, 1|K) and through (N, B·H, 1|K, 1); `log` is their
    running sum."""

    log: Tensor
    into: Tensor
    out: Tensor
    through: Tensor


def compute_dtype(*tensors: Tensor | None) -> torch.dtype:
    """fp64 if any input is fp64, else fp32: the recurrences lose too much in half precision."""
    return torch.float64 if any(x is not None and x.dtype == torch.float64 for x in tensors) else torch.float32


def chunk_length(length: int, largest: int) -> int:
    """Chunk size for a sequence of `length` tokens: `largest`, or less for a short sequence (a multiple of
    SUB_BLOCK)."""
    return min(largest, -(-length // SUB_BLOCK) * SUB_BLOCK)


def to_chunks(x: Tensor, chunk: int, dtype: torch.dtype) -> Tensor:
    """(B, L, H, D) -> (N, B·H, C, D), zero-padded at the end of L. Zero k, v, β and log-decay leave the state
    unchanged."""
    batch, length, heads, dim = x.shape
    count = -(-length // chunk)
    padding = count * chunk - length
    if padding:
        x = F.pad(x, (0, 0, 0, 0, 0, padding))
    x = x.view(batch, count, chunk, heads, dim).permute(1, 0, 3, 2, 4)
    return x.reshape(count, batch * heads, chunk, dim).to(dtype)


def from_chunks(x: Tensor, batch: int, length: int) -> Tensor:
    """(N, B·H, C, D) -> (B, L, H, D), without the padding."""
    count, rows, chunk, dim = x.shape
    x = x.view(count, batch, rows // batch, chunk, dim).permute(1, 0, 3, 2, 4)
    return x.reshape(batch, count * chunk, rows // batch, dim)[:, :length]


def first_state(k: Tensor, v: Tensor, initial_state: Tensor | None, dtype: torch.dtype) -> Tensor:
    """The state before the first chunk, (B·H, K, V)."""
    batch, _, heads, key_dim = k.shape
    if initial_state is None:
        return torch.zeros(batch * heads, key_dim, v.shape[-1], dtype=dtype, device=v.device)
    return initial_state.to(dtype).reshape(batch * heads, key_dim, v.shape[-1])


def gates(g: Tensor | None, q: Tensor, chunk: int, dtype: torch.dtype) -> Tensor:
    """Chunked log-decays (N, B·H, C, 1|K); no decay is a scalar decay of 0."""
    if g is None:
        g = q.new_zeros(q.shape[:3])
    return to_chunks(g if g.ndim == 4 else g.unsqueeze(-1), chunk, dtype)


def decay_state(state: Tensor, g: Tensor | None) -> Tensor:
    """One step of decay: state (B, H, K, V) times exp(g) with g (B, H), (B, H, K) or None."""
    if g is None:
        return state
    decay = g.to(state.dtype).exp()
    return state * (decay[..., None, None] if g.ndim == 2 else decay[..., None])


def boundaries(reset: Tensor | None, heads: int, chunk: int, device: torch.device) -> Boundaries:
    """Masks for `reset` (B, L) bool: documents are told apart by counting the resets since the chunk's start."""
    future = torch.ones(chunk, chunk, dtype=torch.bool, device=device).triu(1)
    if reset is None:
        return Boundaries(future)
    resets = to_chunks(reset[..., None, None].expand(-1, -1, heads, 1).to(torch.int32), chunk, torch.int32)
    document = resets.cumsum(-2)
    last = document[..., -1:, :]
    return Boundaries(
        pairs=future | (document != document.transpose(-1, -2)),
        into=document > 0,
        out=document != last,
        through=last > 0,
    )


def decays(g: Tensor, edges: Boundaries) -> Decays:
    """Decays of the chunked natural-log gates g (N, B·H, C, 1|K)."""
    # The running sum is kept in fp64: its differences, not its values, are what matters.
    log = g.clamp_min(MIN_LOG_DECAY).double().cumsum(-2)
    end = log[..., -1:, :]
    return Decays(
        log=log,
        into=_masked((log.to(g.dtype)).exp(), edges.into),
        out=_masked((end - log).to(g.dtype).exp(), edges.out),
        through=_masked(end.to(g.dtype).exp(), edges.through).transpose(-1, -2),
    )


def decayed_scores(rows: list[Tensor], k: Tensor, decay: Decays, edges: Boundaries) -> list[Tensor]:
    """For each x in rows: M[i, j] = Σ_c x[i, c] k[j, c] exp(log[i, c] - log[j, c]) for visible j <= i, else 0.

    rows, k: (N, B·H, C, K). Returns one (N, B·H, C, C) per row operand. Safe for any gate: every exponent taken is
    <= 0.
    """
    if decay.log.shape[-1] == 1:
        return _scores_scalar(rows, k, decay.log, edges)
    scores = _scores_per_channel(rows, k, decay.log)
    # Inside the sub-blocks the future is already excluded; only document boundaries are left to cut.
    return scores if edges.into is None else [x.masked_fill(edges.pairs, 0.0) for x in scores]


def _scores_scalar(rows: list[Tensor], k: Tensor, log: Tensor, edges: Boundaries) -> list[Tensor]:
    difference = (log - log.transpose(-1, -2)).to(k.dtype)
    factor = difference.masked_fill(edges.pairs, float("-inf")).exp()
    keys = k.transpose(-1, -2)
    return [(x @ keys) * factor for x in rows]


def _scores_per_channel(rows: list[Tensor], k: Tensor, log: Tensor) -> list[Tensor]:
    """exp(log_i - log_j) does not factor safely over a whole chunk, so rows are handled in blocks of SUB_BLOCK
    tokens: pairs inside a block by broadcast, pairs with earlier blocks by a matmul with both decays anchored at
    the block's start."""
    size, dtype = SUB_BLOCK, k.dtype
    count = k.shape[-2] // size
    blocked = [x.unflatten(-2, (count, size)) for x in (*rows, k, log)]
    *row_blocks, key_blocks, log_blocks = blocked
    anchors = log_blocks[..., :1, :]
    local = (log_blocks - anchors).to(dtype)

    future = torch.ones(size, size, dtype=torch.bool, device=k.device).triu(1)[..., None]
    pairwise = (local.unsqueeze(-2) - local.unsqueeze(-3)).masked_fill(future, float("-inf")).exp()
    decayed_keys = pairwise * key_blocks.unsqueeze(-3)
    inside = [(decayed_keys @ x.unsqueeze(-1)).squeeze(-1) for x in row_blocks]
    local_decay = local.exp()

    strips: list[list[Tensor]] = [[] for _ in rows]
    for block in range(count):
        start = block * size
        keys = None
        if block:
            to_anchor = (anchors[..., block, :, :] - log[..., :start, :]).to(dtype).exp()
            keys = (k[..., :start, :] * to_anchor).transpose(-1, -2)
        for strip, x, diagonal in zip(strips, row_blocks, inside):
            parts = [] if keys is None else [(x[..., block, :, :] * local_decay[..., block, :, :]) @ keys]
            parts.append(diagonal[..., block, :, :])
            strip.append(F.pad(torch.cat(parts, dim=-1), (0, k.shape[-2] - start - size)))
    return [torch.cat(strip, dim=-2) for strip in strips]


def _masked(x: Tensor, mask: Tensor | None) -> Tensor:
    return x if mask is None else x.masked_fill(mask, 0.0)
