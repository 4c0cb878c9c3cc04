"""Attention over selected blocks of keys: each query reads its own list, and nothing else is computed.

Shapes: N rows (batch × KV heads), L queries, R query heads per KV head, E key dim, V value dim, P blocks of S tokens
in the table, K selected blocks, T = K·S selected tokens, C queries of one piece. The extra memory is that of a piece.
"""

from __future__ import annotations

import functools
import importlib.util

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from lt2.ops import dispatch, outline
from lt2.ops.sparse import bags


@torch.compiler.disable()
def selected_attention(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    blocks: Tensor,
    counts: Tensor,
    *,
    scale: float | None = None,
    return_weights: bool = False,
    backend: str = "auto",
) -> tuple[Tensor, Tensor | None]:
    """Softmax attention of each query over the first `counts` tokens of each of its `blocks`.

    q: (N, L, R, E); k: (N, P, S, E); v: (N, P, S, V). blocks, counts: (B, L, K) int64 with N a multiple of B: the
    N // B KV heads of one sequence share a selection. An empty slot has count 0 (and any valid block); every query must
    see at least one token. scale: E^-0.5 by default. backend: "auto", "torch" or "triton".

    Returns o (N, L, R, V) and, on request, the attention weights summed over all heads of a sequence, (B, L, K·S) in
    fp32 (fp64 for fp64 inputs), which carry no gradient.
    """
    scale = q.shape[-1] ** -0.5 if scale is None else scale
    if q.shape[0] % blocks.shape[0]:
        raise ValueError(f"{q.shape[0]} rows of q cannot share the selections of {blocks.shape[0]} sequences")
    q, k = q.to(v.dtype), k.to(v.dtype)
    if outline.planned() == "cuda" or (outline.planned() and k.shape[2] == 1):  # single keys are regrouped by value
        o, weights = outline.selected(q, k, v, blocks, counts)
        return o, weights if return_weights else None
    with torch.autocast(q.device.type, enabled=False):
        if gather_backend(q, backend) == "triton":
            from lt2.ops.sparse.gathered_kernel import TritonSelected

            o, weights = TritonSelected.apply(q, k, v, blocks, counts, scale, return_weights)
        else:
            o, weights = _Selected.apply(q, k, v, blocks, counts, scale, return_weights)
    return o, weights if return_weights else None


def group_queries(q: Tensor, kv_heads: int) -> Tensor:
    """(B, L, H, E) -> (B·G, L, H/G, E): the query heads of one KV head become one row."""
    B, L, H, E = q.shape
    return q.view(B, L, kv_heads, H // kv_heads, E).permute(0, 2, 1, 3, 4).reshape(-1, L, H // kv_heads, E)


def ungroup_queries(o: Tensor, batch: int) -> Tensor:
    """(B·G, L, R, E) -> (B, L, G·R, E)."""
    _, L, R, E = o.shape
    return o.view(batch, -1, L, R, E).permute(0, 2, 1, 3, 4).reshape(batch, L, -1, E)


def gather_backend(q: Tensor, requested: str = "auto") -> str:
    """Return "triton" or "torch" for `selected_attention` on q's device and dtype.

    Raises ValueError for "triton" where it cannot run.
    """
    able = dispatch.triton_runs(q) and q.dtype != torch.float64 and _has_triton()
    if requested == "triton" and not able:
        raise ValueError(f"the Triton gather needs CUDA, triton and no fp64; got {q.dtype} on {q.device}")
    backend = "triton" if able and requested != "torch" else "torch"
    dispatch.announce("selected_attention", q.device.type, backend)
    return backend


@functools.cache
def _has_triton() -> bool:
    return importlib.util.find_spec("triton") is not None


class _Selected(torch.autograd.Function):
    """Scores, softmax and weighted sum, piece by piece, in fp32 or wider; the backward computes the scores again."""

    @staticmethod
    def forward(ctx, q, k, v, blocks, counts, scale, return_weights):
        N, L, R, _ = q.shape
        B, _, K = blocks.shape
        wide = torch.promote_types(v.dtype, torch.float32)
        o = v.new_empty(N, L, R, v.shape[-1])
        weights = q.new_zeros(B, L, K * k.shape[2], dtype=wide) if return_weights else None
        for n in range(N):
            b = n * B // N
            keys, values = k[n].to(wide), v[n].to(wide).flatten(0, 1)
            for rows in bags.slices(L, bags.gather_size(keys, K)):
                scores = _scores(q[n, rows], keys, blocks[b, rows], counts[b, rows], scale)
                p = scores.softmax(dim=-1)
                o[n, rows] = bags.weighted_rows(p, values, bags.block_tokens(blocks[b, rows], k.shape[2]))
                if weights is not None:
                    weights[b, rows] += p.sum(dim=1)
        ctx.save_for_backward(q, k, v, blocks, counts, o)
        ctx.scale = scale
        if weights is not None:
            ctx.mark_non_differentiable(weights)
        return o, weights

    @staticmethod
    @once_differentiable
    def backward(ctx, do, _):
        q, k, v, blocks, counts, o = ctx.saved_tensors
        wide = torch.promote_types(v.dtype, torch.float32)
        (N, L, R), (P, S), B = q.shape[:3], k.shape[1:3], blocks.shape[0]
        dq = torch.empty_like(q)
        dk, dv = (torch.zeros_like(x, dtype=wide) for x in (k, v))
        delta = (do.to(wide) * o).sum(dim=-1)
        for b in range(B):
            for rows in bags.slices(L, bags.inverse_size(blocks, R)):
                selection = (blocks[b, rows], counts[b, rows])
                inverse = bags.invert(blocks[b, rows], P) if S == 1 else None
                for n in range(b * N // B, (b + 1) * N // B):
                    of_queries = (q[n, rows], do[n, rows], delta[n, rows])
                    of_keys = (k[n], v[n], dk[n], dv[n])
                    dq[n, rows] = _backward_piece(*of_queries, *of_keys, *selection, inverse, ctx.scale)
        return dq, dk.to(k.dtype), dv.to(v.dtype), None, None, None, None


def _backward_piece(
    q: Tensor,
    do: Tensor,
    delta: Tensor,
    k: Tensor,
    v: Tensor,
    dk: Tensor,
    dv: Tensor,
    blocks: Tensor,
    counts: Tensor,
    inverse: bags.Inverse | None,
    scale: float,
) -> Tensor:
    """dq (C, R, E) of a piece of queries of one row; adds into dk (P, S, E) and dv (P, S, V).

    With `inverse` (single tokens) the weights of the piece are kept and summed over the inverted selection at the end.
    """
    (C, R, _), S, K = q.shape, k.shape[1], blocks.shape[1]
    keys, values = k.to(delta.dtype), v.to(delta.dtype)
    dq = torch.empty_like(q)
    all_p, all_ds = (delta.new_empty(C, R, K if inverse else 0) for _ in range(2))
    for rows in bags.slices(C, bags.gather_size(keys, K)):
        scores = _scores(q[rows], keys, blocks[rows], counts[rows], scale)
        p = scores.softmax(dim=-1)  # not exp(scores - lse): exp is 10x slower where it underflows
        ds = bags.selected_products(do[rows], values, blocks[rows]).sub_(delta[rows, :, None]).mul_(p).mul_(scale)
        dq[rows] = bags.weighted_rows(ds, keys.flatten(0, 1), bags.block_tokens(blocks[rows], S)).to(q.dtype)
        if inverse:
            all_p[rows], all_ds[rows] = p, ds
        else:
            bags.add_blocks(dk, ds, q[rows], blocks[rows])
            bags.add_blocks(dv, p, do[rows], blocks[rows])
    if inverse:
        bags.add_inverse(dk[:, 0], all_ds, q, inverse)
        bags.add_inverse(dv[:, 0], all_p, do, inverse)
    return dq


def _scores(q: Tensor, keys: Tensor, blocks: Tensor, counts: Tensor, scale: float) -> Tensor:
    """Scaled products (C, R, T), very negative where a token is not visible."""
    scores = bags.selected_products(q, keys, blocks).mul_(scale)
    visible = torch.arange(keys.shape[1], device=q.device) < counts[..., None]
    return scores.masked_fill_(~visible.flatten(1)[:, None], torch.finfo(scores.dtype).min)
