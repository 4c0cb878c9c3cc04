"""Attention over selected blocks of keys: each query reads its own list, and nothing else is computed.

Shapes: N rows (batch × KV heads), L queries, R query heads per KV head, E key dim, V value dim, P blocks of S tokens
in the table, K selected blocks. The extra memory is one piece of queries' gathered keys and values.
"""

from __future__ import annotations

import importlib.util
import os
from collections.abc import Iterator

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from lt2.ops import dispatch

CPU_PIECE = 1 << 19
"""Gathered numbers per piece on CPU: keys of a few megabytes stay in cache between the gather and the product."""
CUDA_PIECE = 1 << 26


@torch.compiler.disable
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
    with torch.autocast(q.device.type, enabled=False):
        if gather_backend(q, backend) == "triton":
            from lt2.ops.sparse.gathered_kernel import TritonSelected

            o, weights = TritonSelected.apply(q, k, v, blocks, counts, scale, return_weights)
        else:
            o, weights = _Selected.apply(q, k, v, blocks, counts, scale, return_weights)
    return o, weights if return_weights else None


def gather_backend(q: Tensor, requested: str = "auto") -> str:
    """Return "triton" or "torch" for `selected_attention` on q's device and dtype.

    Raises ValueError for "triton" where it cannot run.
    """
    runs = q.is_cuda or (q.device.type == "cpu" and os.environ.get("TRITON_INTERPRET") == "1")
    able = runs and q.dtype != torch.float64 and importlib.util.find_spec("triton") is not None
    if requested == "triton" and not able:
        raise ValueError(f"the Triton gather needs CUDA, triton and no fp64; got {q.dtype} on {q.device}")
    backend = "triton" if able and requested != "torch" else "torch"
    dispatch.announce("selected_attention", q.device.type, backend)
    return backend


class _Selected(torch.autograd.Function):
    """Gather, softmax and sum, piece by piece; the backward gathers again instead of keeping anything per key."""

    @staticmethod
    def forward(ctx, q, k, v, blocks, counts, scale, return_weights):
        N, L, R, _ = q.shape
        B, _, K = blocks.shape
        wide = torch.promote_types(v.dtype, torch.float32)
        o = v.new_empty(N, L, R, v.shape[-1])
        lse = q.new_empty(N, L, R, 1, dtype=wide)
        weights = q.new_zeros(B, L, K * k.shape[2], dtype=wide) if return_weights else None
        for n, rows in _pieces(q, k, K):
            b = n * B // N
            keys, values = (_gather(x[n], blocks[b, rows]) for x in (k, v))
            scores = _scores(q[n, rows], keys, counts[b, rows], k.shape[2], scale, wide)
            lse[n, rows] = scores.logsumexp(dim=-1, keepdim=True)
            p = (scores - lse[n, rows]).exp()
            o[n, rows] = p.to(v.dtype) @ values
            if weights is not None:
                weights[b, rows] += p.sum(dim=1)
        ctx.save_for_backward(q, k, v, blocks, counts, o, lse)
        ctx.scale = scale
        if weights is not None:
            ctx.mark_non_differentiable(weights)
        return o, weights

    @staticmethod
    @once_differentiable
    def backward(ctx, do, _):
        q, k, v, blocks, counts, o, lse = ctx.saved_tensors
        wide = lse.dtype
        N, P, S = k.shape[:3]
        B = blocks.shape[0]
        dq = torch.empty_like(q)
        dk, dv = (x.new_zeros(N, P, S * x.shape[-1], dtype=wide) for x in (k, v))
        delta = (do.to(wide) * o.to(wide)).sum(dim=-1, keepdim=True)
        for n, rows in _pieces(q, k, blocks.shape[-1]):
            b = n * B // N
            index = blocks[b, rows]
            keys, values = (_gather(x[n], index) for x in (k, v))
            scores = _scores(q[n, rows], keys, counts[b, rows], S, ctx.scale, wide)
            p = (scores - lse[n, rows]).exp()
            dp = (do[n, rows] @ values.transpose(1, 2)).to(wide)
            ds = (p * (dp - delta[n, rows]) * ctx.scale).to(k.dtype)
            dq[n, rows] = ds @ keys
            into_keys = ds.transpose(1, 2) @ q[n, rows]
            into_values = p.to(v.dtype).transpose(1, 2) @ do[n, rows]
            flat = index.flatten()
            dk[n].index_add_(0, flat, into_keys.view(len(flat), -1).to(wide))
            dv[n].index_add_(0, flat, into_values.view(len(flat), -1).to(wide))
        return dq, dk.view(k.shape).to(k.dtype), dv.view(v.shape).to(v.dtype), None, None, None, None


def _pieces(q: Tensor, k: Tensor, n_blocks: int) -> Iterator[tuple[int, slice]]:
    """(row, slice of queries) whose gathered keys fit the budget."""
    per_query = n_blocks * k.shape[2] * k.shape[3]
    size = max(1, (CUDA_PIECE if q.is_cuda else CPU_PIECE) // per_query)
    for n in range(q.shape[0]):
        for start in range(0, q.shape[1], size):
            yield n, slice(start, start + size)


def _gather(table: Tensor, index: Tensor) -> Tensor:
    """table (P, S, D), index (C, K) -> (C, K·S, D)."""
    found = table.flatten(1).index_select(0, index.flatten())
    return found.view(index.shape[0], -1, table.shape[-1])


def _scores(q: Tensor, keys: Tensor, counts: Tensor, S: int, scale: float, wide: torch.dtype) -> Tensor:
    """Scaled scores (C, R, K·S), very negative where a token is not visible."""
    visible = torch.arange(S, device=q.device) < counts[..., None]
    scores = (q @ keys.transpose(1, 2)).to(wide) * scale
    return scores.masked_fill(~visible.flatten(1)[:, None], torch.finfo(wide).min)
