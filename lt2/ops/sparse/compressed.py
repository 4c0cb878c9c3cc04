"""NSA's compressed branch: attention over mean-pooled blocks, whose weights also choose the blocks to read in full.

Shapes: N rows (batch × KV heads), B batch, L queries, R query heads per KV head, E key dim, V value dim, P blocks.
"""

from __future__ import annotations

from collections.abc import Iterator

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from lt2.ops import outline
from lt2.ops.sparse.bags import slices
from lt2.ops.sparse.ranking import top_positions

CPU_PIECE = 1 << 20
"""Scores per piece of queries; memory beyond inputs and outputs."""
CUDA_PIECE = 1 << 26


@torch.compiler.disable()
def compressed_attention(
    q: Tensor, k: Tensor, v: Tensor, first: Tensor, position: Tensor, *, block_size: int, top: int, scale: float
) -> tuple[Tensor, Tensor, Tensor]:
    """Attention over the pooled blocks that lie fully in a query's past, and the `top` blocks it should read in full.

    q: (N, L, R, E); k: (N, P, E); v: (N, P, V); first: (B, L) int64, the first block of the query's document; position:
    (B, L) int64 within the document; N a multiple of B.

    Returns o (N, L, R, V), zero where no block is fully past; blocks (N, L, top) int64 and found (N, L, top) bool, as
    `top_positions`: blocks are ranked by their weight averaged over the R heads, the document's first and the query's
    own and previous block always among them (Yuan et al. 2025, §3.3.2, as fla's `naive_nsa_topk`).
    """
    q, k = q.to(v.dtype), k.to(v.dtype)
    repeat = q.shape[0] // first.shape[0]
    first, position = (x.repeat_interleave(repeat, dim=0) for x in (first, position))
    with torch.autocast(q.device.type, enabled=False):
        return _Compressed.apply(q, k, v, first, position, block_size, top, scale)


class _Compressed(torch.autograd.Function):
    """Dense within a piece of queries; the backward recomputes the piece's weights."""

    @staticmethod
    def forward(ctx, q, k, v, first, position, block_size, top, scale):
        N, L, R, _ = q.shape
        wide = torch.promote_types(v.dtype, torch.float32)
        o = v.new_empty(N, L, R, v.shape[-1])
        blocks = first.new_empty(N, L, min(top, k.shape[1]))
        found = torch.empty_like(blocks, dtype=torch.bool)
        index = torch.arange(k.shape[1], device=q.device)
        for rows in _pieces(q, k):
            start, own = first[:, rows, None], position[:, rows, None] // block_size
            p = _weights(q[:, rows], k, first[:, rows], position[:, rows], block_size, scale, wide)
            o[:, rows] = _apply(p.to(v.dtype), v)
            current = start + own
            forced = (index == start) | (index == current) | (index == current - 1)
            score = p.mean(dim=2).masked_fill(forced, float("inf"))
            candidates = (index >= start) & (index <= current)
            blocks[:, rows], found[:, rows] = top_positions(score, candidates, top)
        ctx.save_for_backward(q, k, v, first, position, o)
        ctx.block_size, ctx.scale = block_size, scale
        ctx.mark_non_differentiable(blocks, found)
        return o, blocks, found

    @staticmethod
    @once_differentiable
    def backward(ctx, do, *_):
        q, k, v, first, position, o = ctx.saved_tensors
        wide = torch.promote_types(v.dtype, torch.float32)
        dq = torch.empty_like(q)
        dk, dv = (x.new_zeros(x.shape, dtype=wide) for x in (k, v))
        delta = (do.to(wide) * o.to(wide)).sum(dim=-1, keepdim=True)
        for rows in _pieces(q, k):
            p = _weights(q[:, rows], k, first[:, rows], position[:, rows], ctx.block_size, ctx.scale, wide)
            dp = _apply(do[:, rows], v.transpose(1, 2)).to(wide)
            ds = (p * (dp - delta[:, rows]) * ctx.scale).to(k.dtype)
            dq[:, rows] = _apply(ds, k)
            dk += (ds.flatten(1, 2).transpose(1, 2) @ q[:, rows].flatten(1, 2)).to(wide)
            dv += (p.to(v.dtype).flatten(1, 2).transpose(1, 2) @ do[:, rows].flatten(1, 2)).to(wide)
        return dq, dk.to(k.dtype), dv.to(v.dtype), None, None, None, None, None


def _pieces(q: Tensor, k: Tensor) -> Iterator[slice]:
    per_query = q.shape[0] * q.shape[2] * k.shape[1]
    on_card = q.is_cuda or outline.planned() == "cuda"
    return slices(q.shape[1], (CUDA_PIECE if on_card else CPU_PIECE) // per_query)


def _apply(x: Tensor, table: Tensor) -> Tensor:
    """x (N, C, R, A) @ table (N, A, D) -> (N, C, R, D), as one product per row."""
    N, C, R, A = x.shape
    return (x.reshape(N, C * R, A) @ table).view(N, C, R, -1)


def _weights(
    q: Tensor,
    k: Tensor,
    first: Tensor,
    position: Tensor,
    block_size: int,
    scale: float,
    wide: torch.dtype,
) -> Tensor:
    """Weights (N, C, R, P) over the blocks fully past, all zero where there is none."""
    index = torch.arange(k.shape[1], device=q.device)
    end = first + (position + 1) // block_size
    hidden = ((index < first[..., None]) | (index >= end[..., None]))[:, :, None]
    scores = _apply(q, k.transpose(1, 2)).to(wide).mul_(scale)
    return scores.masked_fill_(hidden, torch.finfo(wide).min).softmax(dim=-1).masked_fill_(hidden, 0.0)
