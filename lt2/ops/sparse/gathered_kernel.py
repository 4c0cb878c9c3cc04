"""`selected_attention` as Triton kernels: one program per query and KV head gathers its keys tile by tile.

Shapes as in `gathered.py`; the tables are read as (N, M, E) with M = P·S tokens. A program holds the R query heads of
its KV head as one tile, padded to 16 rows for the tensor cores. The backward adds into keys and values with atomics, in
fp32, so its sums are not bitwise reproducible.
"""

# Triton passes plain ints as constexpr; pyright cannot know.
# pyright: reportArgumentType=false
from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor
from torch.autograd.function import once_differentiable

TILE = 64
"""Selected tokens per step of the loop."""


@triton.jit
def _load_queries(x, n, t, L, R: tl.constexpr, D: tl.constexpr, BR: tl.constexpr, BD: tl.constexpr):
    """Rows (n, t, :, :) of x (N, L, R, D), zero-padded to (BR, BD)."""
    r, d = tl.arange(0, BR), tl.arange(0, BD)
    pointers = x + ((n * L + t) * R + r[:, None]) * D + d[None, :]
    return tl.load(pointers, mask=(r[:, None] < R) & (d[None, :] < D), other=0.0)


@triton.jit
def _selected(blocks, counts, j, T: tl.constexpr, S: tl.constexpr):
    """Token of each slot j of one query's selection, and whether it is visible."""
    slot, within = j // S, j % S
    inside = j < T
    token = tl.load(blocks + slot, mask=inside, other=0).to(tl.int64) * S + within
    return token, inside & (within < tl.load(counts + slot, mask=inside, other=0))


@triton.jit
def _load_rows(x, token, visible, D: tl.constexpr, BD: tl.constexpr):
    """Rows `token` of x (M, D), zero where not visible: (tile, BD)."""
    d = tl.arange(0, BD)
    return tl.load(x + token[:, None] * D + d[None, :], mask=visible[:, None] & (d[None, :] < D), other=0.0)


@triton.jit
def _forward_kernel(
    q, k, v, blocks, counts, o, lse, weights, scale, L, M, heads,
    R: tl.constexpr, E: tl.constexpr, V: tl.constexpr, T: tl.constexpr, S: tl.constexpr,
    BR: tl.constexpr, BE: tl.constexpr, BV: tl.constexpr, BT: tl.constexpr, WEIGHTS: tl.constexpr,
):  # fmt: skip
    t, n = tl.program_id(0).to(tl.int64), tl.program_id(1).to(tl.int64)
    row = (n // heads) * L + t
    blocks += row * (T // S)
    counts += row * (T // S)
    k += n * M * E
    v += n * M * V
    queries = _load_queries(q, n, t, L, R, E, BR, BE)
    top = tl.full([BR], -1e30, dtype=tl.float32)
    total = tl.zeros([BR], dtype=tl.float32)
    acc = tl.zeros([BR, BV], dtype=tl.float32)
    for start in range(0, T, BT):
        token, visible = _selected(blocks, counts, start + tl.arange(0, BT), T, S)  # pyright: ignore[reportGeneralTypeIssues]
        keys = _load_rows(k, token, visible, E, BE)
        scores = tl.dot(queries, tl.trans(keys), input_precision="ieee") * scale
        scores = tl.where(visible[None, :], scores, -float("inf"))
        higher = tl.maximum(top, tl.max(scores, 1))
        p = tl.exp(scores - higher[:, None])
        shrink = tl.exp(top - higher)
        total = total * shrink + tl.sum(p, 1)
        values = _load_rows(v, token, visible, V, BV)
        acc = acc * shrink[:, None] + tl.dot(p.to(values.dtype), values, input_precision="ieee")
        top = higher
    r, d = tl.arange(0, BR), tl.arange(0, BV)
    base = (n * L + t) * R
    inside = (r[:, None] < R) & (d[None, :] < V)
    tl.store(o + (base + r[:, None]) * V + d[None, :], (acc / total[:, None]).to(o.dtype.element_ty), mask=inside)
    log_sum = top + tl.log(total)
    tl.store(lse + base + r, log_sum, mask=r < R)
    if WEIGHTS:
        for start in range(0, T, BT):
            j = start + tl.arange(0, BT)
            token, visible = _selected(blocks, counts, j, T, S)
            keys = _load_rows(k, token, visible, E, BE)
            scores = tl.dot(queries, tl.trans(keys), input_precision="ieee") * scale
            p = tl.exp(scores - log_sum[:, None])
            p = tl.where(visible[None, :] & (r[:, None] < R), p, 0.0)
            tl.atomic_add(weights + row * T + j, tl.sum(p, 0), mask=j < T)


@triton.jit
def _backward_kernel(
    q, k, v, blocks, counts, do, lse, delta, dq, dk, dv, scale, L, M, heads,
    R: tl.constexpr, E: tl.constexpr, V: tl.constexpr, T: tl.constexpr, S: tl.constexpr,
    BR: tl.constexpr, BE: tl.constexpr, BV: tl.constexpr, BT: tl.constexpr,
):  # fmt: skip
    t, n = tl.program_id(0).to(tl.int64), tl.program_id(1).to(tl.int64)
    row = (n // heads) * L + t
    blocks += row * (T // S)
    counts += row * (T // S)
    k += n * M * E
    v += n * M * V
    dk += n * M * E
    dv += n * M * V
    queries = _load_queries(q, n, t, L, R, E, BR, BE)
    outputs = _load_queries(do, n, t, L, R, V, BR, BV)
    r, e, d = tl.arange(0, BR), tl.arange(0, BE), tl.arange(0, BV)
    base = (n * L + t) * R
    log_sum = tl.load(lse + base + r, mask=r < R, other=0.0)
    inner = tl.load(delta + base + r, mask=r < R, other=0.0)
    acc = tl.zeros([BR, BE], dtype=tl.float32)
    for start in range(0, T, BT):
        token, visible = _selected(blocks, counts, start + tl.arange(0, BT), T, S)  # pyright: ignore[reportGeneralTypeIssues]
        keys = _load_rows(k, token, visible, E, BE)
        values = _load_rows(v, token, visible, V, BV)
        scores = tl.dot(queries, tl.trans(keys), input_precision="ieee") * scale
        p = tl.where(visible[None, :] & (r[:, None] < R), tl.exp(scores - log_sum[:, None]), 0.0)
        dp = tl.dot(outputs, tl.trans(values), input_precision="ieee")
        ds = (p * (dp - inner[:, None]) * scale).to(keys.dtype)
        acc += tl.dot(ds, keys, input_precision="ieee")
        into_keys = tl.dot(tl.trans(ds), queries, input_precision="ieee")
        into_values = tl.dot(tl.trans(p.to(outputs.dtype)), outputs, input_precision="ieee")
        tl.atomic_add(dk + token[:, None] * E + e[None, :], into_keys, mask=visible[:, None] & (e[None, :] < E))
        tl.atomic_add(dv + token[:, None] * V + d[None, :], into_values, mask=visible[:, None] & (d[None, :] < V))
    inside = (r[:, None] < R) & (e[None, :] < E)
    tl.store(dq + (base + r[:, None]) * E + e[None, :], acc.to(dq.dtype.element_ty), mask=inside)


class TritonSelected(torch.autograd.Function):
    """Arguments and results as `gathered._Selected`."""

    @staticmethod
    def forward(ctx, q, k, v, blocks, counts, scale, return_weights):
        q, k, v = (x.contiguous() for x in (q, k, v))
        blocks, counts = (x.to(torch.int32).contiguous() for x in (blocks, counts))
        N, L, R, _ = q.shape
        o = v.new_empty(N, L, R, v.shape[-1])
        lse = q.new_empty(N, L, R, dtype=torch.float32)
        weights = None
        if return_weights:
            weights = lse.new_zeros(*blocks.shape[:2], blocks.shape[2] * k.shape[2])
        _forward_kernel[(L, N)](
            q, k, v, blocks, counts, o, lse, weights if return_weights else lse, scale,
            **_sizes(q, k, v, blocks), WEIGHTS=return_weights,
        )  # fmt: skip
        ctx.save_for_backward(q, k, v, blocks, counts, o, lse)
        ctx.scale = scale
        if weights is not None:
            ctx.mark_non_differentiable(weights)
        return o, weights

    @staticmethod
    @once_differentiable
    def backward(ctx, do, _):
        q, k, v, blocks, counts, o, lse = ctx.saved_tensors
        do = do.contiguous()
        delta = (do.float() * o.float()).sum(dim=-1)
        dq = torch.empty_like(q)
        dk, dv = (torch.zeros_like(x, dtype=torch.float32) for x in (k, v))
        _backward_kernel[(q.shape[1], q.shape[0])](
            q, k, v, blocks, counts, do, lse, delta, dq, dk, dv, ctx.scale, **_sizes(q, k, v, blocks)
        )
        return dq, dk.to(k.dtype), dv.to(v.dtype), None, None, None, None


def _sizes(q: Tensor, k: Tensor, v: Tensor, blocks: Tensor) -> dict[str, int]:
    (N, L, R, E), (P, S), V = q.shape, k.shape[1:3], v.shape[-1]
    tile = lambda size: max(16, int(triton.next_power_of_2(size)))  # noqa: E731
    T = blocks.shape[2] * S
    return {
        "L": L, "M": P * S, "heads": N // blocks.shape[0], "R": R, "E": E, "V": V, "T": T, "S": S,
        "BR": tile(R), "BE": tile(E), "BV": tile(V), "BT": min(TILE, tile(T)),
    }  # fmt: skip
