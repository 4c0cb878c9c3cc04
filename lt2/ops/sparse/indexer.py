"""DSA's lightning indexer: scores, the keys they select, and the KL that trains them (DeepSeek-V3.2, §2.1).

I[t, s] = sum_j w[t, j] ReLU(q[t, j] · k[s]), one key per token shared over the index heads j. The caller scales w by
heads^-1/2 · dim^-1/2.

Shapes: B batch, L queries, M keys, J index heads, D index dim, K selected keys, H attention heads, G KV heads.
Query t may read keys first[t] .. last[t]; both (B, L) int64. Memory beyond inputs and outputs is one piece of queries.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable
from torch.nn import functional as F

from lt2.ops.sparse.ranking import top_positions

CPU_PIECE = 1 << 20
"""Numbers of the largest intermediate of one piece of queries."""
CUDA_PIECE = 1 << 27


def index_scores(q: Tensor, k: Tensor, w: Tensor) -> Tensor:
    """I of every query and key: q (B, L, J, D), k (B, M, D), w (B, L, J) -> (B, L, M), fp32 (fp64 for fp64 inputs)."""
    B, L, J, D = q.shape
    wide = torch.promote_types(q.dtype, torch.float32)
    dots = (q.reshape(B, L * J, D) @ k.transpose(1, 2)).view(B, L, J, -1)
    return (w.to(wide)[..., None, :] @ F.relu(dots).to(wide)).squeeze(-2)


@torch.compiler.disable
@torch.no_grad()
def select_keys(q: Tensor, k: Tensor, w: Tensor, first: Tensor, last: Tensor, *, top_k: int) -> tuple[Tensor, Tensor]:
    """The top_k best-scored keys of each query: keys (B, L, min(top_k, M)) int64 and found, bool of the same shape.

    Equal scores go to the latest key (`top_positions`), so prefill and decoding agree.
    """
    B, L, J, _ = q.shape
    K = min(top_k, k.shape[1])
    keys = first.new_empty(B, L, K)
    found = torch.empty_like(keys, dtype=torch.bool)
    index = torch.arange(k.shape[1], device=q.device)
    for rows in _pieces(q, B * (J + 2) * k.shape[1]):
        # Reading how far a piece sees is free on CPU, a synchronisation on CUDA.
        end = k.shape[1] if q.is_cuda else max(K, int(last[:, rows].max()) + 1)
        scores = index_scores(q[:, rows], k[:, :end], w[:, rows])
        candidates = (index[:end] >= first[:, rows, None]) & (index[:end] <= last[:, rows, None])
        keys[:, rows], found[:, rows] = top_positions(scores, candidates, K)
    return keys, found


@torch.compiler.disable
def selected_kl(q: Tensor, k: Tensor, w: Tensor, keys: Tensor, found: Tensor, weights: Tensor) -> Tensor:
    """Mean over queries of KL(p || softmax(I)), both over the selected keys: a scalar with gradients to q, k and w.

    weights (B, L, K): attention summed over heads, normalised here to p; it gets no gradient. keys, found: (B, L, K).
    """
    target = weights / weights.sum(dim=-1, keepdim=True)

    def piece(b: int, rows: slice, q: Tensor, k: Tensor, w: Tensor) -> Tensor:
        dots = q @ k.view(q.shape[0], -1, k.shape[-1]).transpose(1, 2)  # (C, J, K)
        scores = (w[:, None] @ F.relu(dots)).squeeze(1)
        return _kl(target[b, rows], scores, found[b, rows])

    return _Trained.apply(q, k, w, keys, piece, q.shape[2] * keys.shape[-1] * q.shape[3])


@torch.compiler.disable
def dense_kl(
    q: Tensor, k: Tensor, w: Tensor, q_attention: Tensor, k_attention: Tensor, first: Tensor, *, scale: float
) -> Tensor:
    """Mean over queries of KL(p || softmax(I)), both over the whole causal prefix from `first` on (the warm-up).

    p is the head-averaged softmax of q_attention (B, L, H, E) · k_attention (B, L, G, E) · scale, recomputed here piece
    by piece, without gradient. Returns a scalar with gradients to q, k and w.
    """
    B, L, H, E = q_attention.shape
    G = k_attention.shape[2]
    q_attention = q_attention.detach().view(B, L, G, H // G, E)
    k_attention = k_attention.detach()
    index = torch.arange(L, device=q.device)

    def piece(b: int, rows: slice, q: Tensor, k: Tensor, w: Tensor) -> Tensor:
        prefix = index[: k.shape[0]]
        visible = (prefix >= first[b, rows, None]) & (prefix <= index[rows, None])
        with torch.no_grad():
            dots = torch.einsum("cgre,mge->cgrm", q_attention[b, rows], k_attention[b, : k.shape[0]])
            attention = dots.to(q.dtype) * scale
            attention = attention.masked_fill(~visible[:, None, None], float("-inf")).softmax(dim=-1)
            target = attention.mean(dim=(1, 2))
        return _kl(target, index_scores(q[None], k[None], w[None])[0], visible)

    return _Trained.apply(q, k, w, None, piece, (q.shape[2] + H) * L)


def _kl(target: Tensor, scores: Tensor, visible: Tensor) -> Tensor:
    """Sum over rows of KL(target || softmax of the visible scores)."""
    log_r = scores.masked_fill(~visible, float("-inf")).log_softmax(dim=-1).masked_fill(~visible, 0.0)
    return (torch.xlogy(target, target) - target * log_r).sum()


Piece = Callable[[int, slice, Tensor, Tensor, Tensor], Tensor]


class _Trained(torch.autograd.Function):
    """A scalar mean over queries whose gradients are taken in the forward, one piece at a time, and only scaled later.

    A piece sees the keys of its causal prefix, or with `keys` (B, L, K) the selected ones, gathered.
    """

    @staticmethod
    def forward(ctx, q: Tensor, k: Tensor, w: Tensor, keys: Tensor | None, piece: Piece, per_query: int) -> Tensor:
        wide = torch.promote_types(q.dtype, torch.float32)
        total = q.new_zeros((), dtype=wide)
        needed = any(ctx.needs_input_grad)
        grads = [x.new_zeros(x.shape, dtype=wide) for x in (q, k, w)] if needed else []
        with torch.autocast(q.device.type, enabled=False):
            for b in range(q.shape[0]):
                for rows in _pieces(q, per_query):
                    flat = None if keys is None else keys[b, rows].flatten()
                    own = k[b, : rows.stop] if flat is None else k[b].index_select(0, flat)
                    leaves = [x.to(wide).detach().requires_grad_(needed) for x in (q[b, rows], own, w[b, rows])]
                    with torch.set_grad_enabled(needed):
                        loss = piece(b, rows, *leaves)
                    total += loss.detach()
                    if not needed:
                        continue
                    dq, dk, dw = torch.autograd.grad(loss, leaves)
                    grads[0][b, rows], grads[2][b, rows] = dq, dw
                    if flat is None:
                        grads[1][b, : rows.stop] += dk
                    else:
                        grads[1][b].index_add_(0, flat, dk)
        n_queries = q.shape[0] * q.shape[1]
        ctx.save_for_backward(*((g / n_queries).to(x.dtype) for g, x in zip(grads, (q, k, w))))
        return total / n_queries

    @staticmethod
    @once_differentiable
    def backward(ctx, d_loss):
        dq, dk, dw = (d_loss.to(g.dtype) * g for g in ctx.saved_tensors)
        return dq, dk, dw, None, None, None


def _pieces(q: Tensor, per_query: int) -> Iterator[slice]:
    size = max(1, (CUDA_PIECE if q.is_cuda else CPU_PIECE) // per_query)
    for start in range(0, q.shape[1], size):
        yield slice(start, start + size)
