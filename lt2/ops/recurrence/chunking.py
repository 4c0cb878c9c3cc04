"""What the two chunkwise recurrences share: the chunk-major layout and document boundaries.

Layout: (B, L, H, D) becomes (N, B·H, C, D): chunk first, so that the only sequential part, the walk over N chunks,
reads contiguous slices.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.autograd.function import once_differentiable

# Fastest on CPU in fp32 for all mixers at head dim 64: longer chunks spend more on the C×C work (and the delta
# rule's solve), shorter ones on the walk over chunks.
CHUNK = 32

# Tokens taken at a time, see in_spans; a whole number of chunks.
SPAN = 1024

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


def compute_dtype(*tensors: Tensor | None) -> torch.dtype:
    """fp64 if any input is fp64, else fp32: the recurrences lose too much in half precision."""
    return torch.float64 if any(x is not None and x.dtype == torch.float64 for x in tensors) else torch.float32


def chunk_length(length: int) -> int:
    """Chunk size for a sequence of `length` tokens: CHUNK, or less for a short sequence (a multiple of SUB_BLOCK)."""
    return min(CHUNK, -(-length // SUB_BLOCK) * SUB_BLOCK)


def to_chunks(x: Tensor, chunk: int, dtype: torch.dtype) -> Tensor:
    """(B, L, H, D) -> (N, B·H, C, D), zero-padded at the end of L. Zero k, v, β and log-decay leave the state
    unchanged."""
    batch, length, heads, dim = x.shape
    count = -(-length // chunk)
    padding = count * chunk - length
    if padding:
        x = F.pad(x, (0, 0, 0, 0, 0, padding))
    x = x.view(batch, count, chunk, heads, dim).permute(1, 0, 3, 2, 4)
    # With one row the reshape is a view, and every product over it would make its own copy.
    return x.reshape(count, batch * heads, chunk, dim).to(dtype).contiguous()


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


def outputs(q_into: Tensor, states: Tensor, scores: Tensor, values: Tensor) -> Tensor:
    """What each chunk reads from its past and from itself: q_into (N, R, C, K) @ states (N, R, K, V) + scores @
    values."""
    past = q_into @ states
    return torch.baddbmm(past.flatten(0, 1), scores.flatten(0, 1), values.flatten(0, 1)).view_as(past)


def times_transposed(a: Tensor, b: Tensor) -> Tensor:
    """a bᵀ for (N, R, I, D) and (N, R, J, D) -> (N, R, I, J)."""
    return _TimesTransposed.apply(a, b)


def transposed_times(a: Tensor, b: Tensor) -> Tensor:
    """aᵀ b for (N, R, D, I) and (N, R, D, J) -> (N, R, I, J)."""
    return _TransposedTimes.apply(a, b)


# `a @ b.transpose(-1, -2)` would do, but autograd then hands back gradients in transposed memory order, and every
# later sum with another gradient of the same tensor pays for a strided copy.
class _TimesTransposed(torch.autograd.Function):
    @staticmethod
    def forward(ctx, a, b):
        ctx.save_for_backward(a, b)
        return a @ b.transpose(-1, -2)

    @staticmethod
    @once_differentiable
    def backward(ctx, grad):
        a, b = ctx.saved_tensors
        return grad @ b, grad.transpose(-1, -2) @ a


class _TransposedTimes(torch.autograd.Function):
    @staticmethod
    def forward(ctx, a, b):
        ctx.save_for_backward(a, b)
        return a.transpose(-1, -2) @ b

    @staticmethod
    @once_differentiable
    def backward(ctx, grad):
        a, b = ctx.saved_tensors
        return b @ grad.transpose(-1, -2), a @ grad


def in_spans(
    chunkwise: Callable[..., tuple[Tensor, Tensor]],
    tensors: tuple[Tensor | None, ...],
    scale: float,
    initial_state: Tensor | None,
    reset: Tensor | None,
) -> tuple[Tensor, Tensor]:
    """chunkwise(*tensors, scale, initial_state, reset) over (B, L, …) tensors, SPAN tokens at a time; (o, final state).

    The same chunks and sums as in one piece. Intermediates of all chunks at once outgrow what a CPU allocator keeps for
    reuse: at 16k tokens page faults nearly doubled the time per token of per-channel decays.
    """
    length = next(x.shape[1] for x in tensors if x is not None)
    if length <= SPAN:
        return chunkwise(*tensors, scale, initial_state, reset)
    outputs, state = [], initial_state
    n_spans = -(-length // SPAN)
    # Not x[:, a:b]: each slice's backward would fill a gradient of the whole length with zeros.
    spans = [[None] * n_spans if x is None else x.split(SPAN, dim=1) for x in (*tensors, reset)]
    for *pieces, piece_of_reset in zip(*spans, strict=True):
        o, state = chunkwise(*pieces, scale, state, piece_of_reset)
        outputs.append(o)
    assert state is not None
    return torch.cat(outputs, dim=1), state
