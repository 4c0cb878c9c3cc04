"""DSA's lightning indexer: scores, the keys they select, and the KL that trains them (DeepSeek-V3.2, §2.1).

I[t, s] = sum_j w[t, j] ReLU(q[t, j] · k[s]), one key per token shared over the index heads j. The caller scales w by
heads^-1/2 · dim^-1/2.

Shapes: B batch, L queries, M keys, J index heads, D index dim, K selected keys, H attention heads, G KV heads.
Query t may read keys first[t] .. last[t]; both (B, L) int64. Memory beyond inputs and outputs is one piece of queries.
"""

from __future__ import annotations

from collections.abc import Iterator

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable
from torch.nn import functional as F

from lt2.ops import dispatch, outline
from lt2.ops.sparse import bags
from lt2.ops.sparse.ranking import top_positions

CPU_PIECE = 1 << 20
"""Numbers of the largest intermediate of one piece of queries."""
CUDA_PIECE = 1 << 27


def index_scores(q: Tensor, k: Tensor, w: Tensor) -> Tensor:
    """I of every query and key: q (B, L, J, D), k (B, M, D), w (B, L, J) -> (B, L, M), fp32 (fp64 for fp64 inputs)."""
    B, L, J, D = q.shape
    wide = torch.promote_types(q.dtype, torch.float32)
    with torch.autocast(q.device.type, enabled=False):  # scores in bf16 would tie, and ties go to the latest key
        dots = (q.reshape(B, L * J, D) @ k.to(q.dtype).transpose(1, 2)).view(B, L, J, -1)
        return (w.to(wide)[..., None, :] @ F.relu(dots).to(wide)).squeeze(-2)


@torch.compiler.disable()
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
        end = max(K, dispatch.furthest(last[:, rows], k.shape[1], plus=1))
        scores = index_scores(q[:, rows], k[:, :end], w[:, rows])
        candidates = (index[:end] >= first[:, rows, None]) & (index[:end] <= last[:, rows, None])
        keys[:, rows], found[:, rows] = top_positions(scores, candidates, K)
    return keys, found


@torch.compiler.disable()
def selected_kl(q: Tensor, k: Tensor, w: Tensor, keys: Tensor, found: Tensor, weights: Tensor) -> Tensor:
    """Mean over queries of KL(p || softmax(I)), both over the selected keys: (B,) with gradients to q, k and w.

    weights (B, L, K): attention summed over heads, normalised here to p; it gets no gradient. keys, found: (B, L, K).
    """
    wide = torch.promote_types(q.dtype, torch.float32)
    grads = [torch.zeros_like(x, dtype=wide) for x in (q, k, w)]
    dq, dk, dw = grads
    total = torch.zeros(q.shape[0], dtype=wide, device=q.device)
    if outline.planned():  # which keys were chosen decides what the pieces below are
        return _mean_with_gradients(total, (q, k, w), grads)
    with torch.no_grad(), torch.autocast(q.device.type, enabled=False):
        for b in range(q.shape[0]):
            table = k[b].to(wide)
            for outer in bags.slices(q.shape[1], bags.inverse_size(keys, q.shape[2])):
                d_dots = table.new_empty(outer.stop - outer.start, q.shape[2], keys.shape[-1])
                for inner in bags.slices(len(d_dots), bags.gather_size(table[:, None], keys.shape[-1])):
                    rows = slice(outer.start + inner.start, outer.start + inner.stop)
                    dots = bags.selected_products(q[b, rows], table[:, None], keys[b, rows])  # (C, J, K)
                    scores = (w[b, rows].to(wide)[:, None] @ dots.relu()).squeeze(1)
                    target = weights[b, rows] / weights[b, rows].sum(dim=-1, keepdim=True)
                    loss, d_scores = _kl(target, scores, found[b, rows])
                    total[b] += loss.sum()
                    dw[b, rows] = (dots.relu() @ d_scores[..., None]).squeeze(-1)
                    d_dots[inner] = (dots > 0) * w[b, rows].to(wide)[..., None] * d_scores[:, None]
                    dq[b, rows] = bags.weighted_rows(d_dots[inner], table, keys[b, rows])
                inverse = bags.invert(keys[b, outer], len(table))
                bags.add_inverse(dk[b], d_dots, q[b, outer], inverse)
    return _mean_with_gradients(total, (q, k, w), grads)


@torch.compiler.disable()
def dense_kl(
    q: Tensor, k: Tensor, w: Tensor, q_attention: Tensor, k_attention: Tensor, first: Tensor, *, scale: float
) -> Tensor:
    """Mean over queries of KL(p || softmax(I)), both over the whole causal prefix from `first` on (the warm-up).

    p is the head-averaged softmax of q_attention (B, L, H, E) · k_attention (B, L, G, E) · scale, recomputed here piece
    by piece, without gradient. Returns (B,) with gradients to q, k and w.
    """
    B, L, H, E = q_attention.shape
    J, G = q.shape[2], k_attention.shape[2]
    wide = torch.promote_types(q.dtype, torch.float32)
    grads = [torch.zeros_like(x, dtype=wide) for x in (q, k, w)]
    dq, dk, dw = grads
    total = torch.zeros(B, dtype=wide, device=q.device)
    index = torch.arange(L, device=q.device)
    with torch.no_grad(), torch.autocast(q.device.type, enabled=False):
        grouped = q_attention.reshape(B, L, G, H // G, E).permute(0, 2, 1, 3, 4)
        k_attention = k_attention.to(q_attention.dtype).permute(0, 2, 3, 1)  # (B, G, E, L)
        for rows in _pieces(q, B * (2 * J + 2 * H) * L):
            C, M = rows.stop - rows.start, rows.stop  # queries, and how far they see
            visible = (index[:M] >= first[:, rows, None]) & (index[:M] <= index[rows, None])
            attention = grouped[:, :, rows].reshape(B, G, -1, E) @ k_attention[..., :M]
            attention = attention.view(B, G, C, H // G, M).to(wide) * scale
            attention = attention.masked_fill(~visible[:, None, :, None], float("-inf")).softmax(dim=-1)
            q_piece, k_piece, w_piece = q[:, rows].flatten(1, 2).to(wide), k[:, :M].to(wide), w[:, rows].to(wide)
            dots = (q_piece @ k_piece.transpose(1, 2)).view(B, C, J, M)
            scores = (w_piece[..., None, :] @ dots.relu()).squeeze(-2)
            loss, d_scores = _kl(attention.mean(dim=(1, 3)), scores, visible)
            total += loss.sum(dim=1)
            dw[:, rows] = (dots.relu() @ d_scores[..., None]).squeeze(-1)
            d_dots = ((dots > 0) * w_piece[..., None] * d_scores[:, :, None]).flatten(1, 2)
            dq[:, rows] = (d_dots @ k_piece).view(B, C, J, -1)
            dk[:, :M] += d_dots.transpose(1, 2) @ q_piece
    return _mean_with_gradients(total, (q, k, w), grads)


def _kl(target: Tensor, scores: Tensor, visible: Tensor) -> tuple[Tensor, Tensor]:
    """KL(target || softmax of the visible scores) of each query, and its gradient to the scores."""
    scores = scores.masked_fill(~visible, torch.finfo(scores.dtype).min)
    loss = torch.xlogy(target, target) - target * scores.log_softmax(dim=-1).masked_fill(~visible, 0.0)
    return loss.sum(dim=-1), scores.softmax(dim=-1) - target


def _mean_with_gradients(total: Tensor, inputs: tuple[Tensor, ...], grads: list[Tensor]) -> Tensor:
    n_queries = inputs[0].shape[1]
    scaled = [(g / n_queries).to(x.dtype) for g, x in zip(grads, inputs)]
    return _KnownGradient.apply(total / n_queries, *inputs, *scaled)


class _KnownGradient(torch.autograd.Function):
    """Losses (B,) whose gradients were computed along with them, so that nothing of size L × M outlives its piece."""

    @staticmethod
    def forward(ctx, loss, q, k, w, dq, dk, dw):
        ctx.save_for_backward(dq, dk, dw)
        return loss.clone()

    @staticmethod
    @once_differentiable
    def backward(ctx, d_loss):
        scaled = (d_loss.view(-1, *(1,) * (g.dim() - 1)).to(g.dtype) * g for g in ctx.saved_tensors)
        return None, *scaled, None, None, None


def _pieces(q: Tensor, per_query: int) -> Iterator[slice]:
    on_card = q.is_cuda or outline.planned() == "cuda"
    return bags.slices(q.shape[1], (CUDA_PIECE if on_card else CPU_PIECE) // per_query)
