"""Attention of one new token over a long cache on CUDA: the cache is read by many programs at once, then combined.

A decode step has one query per row, so parallelism over (row, head) alone leaves most of the GPU idle at small batch;
splitting the cache along its length fills it (Flash-Decoding, Dao et al. 2023). The grid depends on shapes only, so a
captured CUDA graph stays valid while the cache fills; what a program reads depends on the row's length, so that a short
prefix in a long cache is spread over all programs too.

Shapes: B rows, M cache slots, G key/value heads, R query heads per key/value head, E head_dim, S splits.
"""

# Triton passes plain ints as constexpr; pyright cannot know.
# pyright: reportArgumentType=false, reportOperatorIssue=false
from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor
from torch.library import triton_op, wrap_triton

BLOCK_M = 64
PROGRAMS = 4 * 132  # a few waves on an H100's multiprocessors
LOG2E = tl.constexpr(1.4426950408889634)


@triton.jit
def _partial(
    q_ptr, k_ptr, v_ptr, length_ptr, acc_ptr, max_ptr, sum_ptr, scale,
    G, R, E, V, S, k_row, k_slot, v_row, v_slot,
    BLOCK_M: tl.constexpr, BLOCK_R: tl.constexpr, BLOCK_E: tl.constexpr, BLOCK_V: tl.constexpr,
):  # fmt: skip
    pair, split = tl.program_id(0), tl.program_id(1)
    row, head = pair // G, pair % G
    length = tl.load(length_ptr + row).to(tl.int32)
    chunk = tl.cdiv(tl.cdiv(length, S), BLOCK_M) * BLOCK_M
    start = split * chunk
    stop = tl.minimum(start + chunk, length)
    scale = tl.cast(scale, tl.float32) * LOG2E  # a float argument arrives as fp64 from a compiled caller
    r, e, v = tl.arange(0, BLOCK_R), tl.arange(0, BLOCK_E), tl.arange(0, BLOCK_V)
    q_mask = (r[:, None] < R) & (e[None, :] < E)
    q = tl.load(q_ptr + (pair * R + r[:, None]) * E + e[None, :], mask=q_mask, other=0.0)
    acc = tl.zeros([BLOCK_R, BLOCK_V], tl.float32)
    high = tl.full([BLOCK_R], -1.0e30, tl.float32)
    total = tl.zeros([BLOCK_R], tl.float32)
    k_base = k_ptr + row.to(tl.int64) * k_row + head * E
    v_base = v_ptr + row.to(tl.int64) * v_row + head * V
    for at in range(start, stop, BLOCK_M):
        m = at + tl.arange(0, BLOCK_M)
        seen = m < stop
        slot = m.to(tl.int64)[:, None]
        k = tl.load(k_base + slot * k_slot + e[None, :], mask=seen[:, None] & (e[None, :] < E), other=0.0)
        if BLOCK_R == 1:
            score = tl.sum(k.to(tl.float32) * q.to(tl.float32), 1)[None, :]
        else:
            score = tl.dot(q, tl.trans(k).to(q.dtype), input_precision="ieee")
        score = tl.where(seen[None, :], score * scale, -1.0e30)
        new_high = tl.maximum(high, tl.max(score, 1))
        p = tl.exp2(score - new_high[:, None])
        p = tl.where(seen[None, :], p, 0.0)
        shrink = tl.exp2(high - new_high)
        value = tl.load(v_base + slot * v_slot + v[None, :], mask=seen[:, None] & (v[None, :] < V), other=0.0)
        if BLOCK_R == 1:
            weighted = tl.sum(tl.trans(p) * value.to(tl.float32), 0)[None, :]
        else:
            weighted = tl.dot(p.to(q.dtype), value.to(q.dtype), input_precision="ieee")
        acc = acc * shrink[:, None] + weighted
        total = total * shrink + tl.sum(p, 1)
        high = new_high
    out = (pair * S + split) * R + r
    tl.store(acc_ptr + out[:, None] * V + v[None, :], acc, mask=(r[:, None] < R) & (v[None, :] < V))
    tl.store(max_ptr + out, high, mask=r < R)
    tl.store(sum_ptr + out, total, mask=r < R)


@triton.jit
def _combine(
    acc_ptr, max_ptr, sum_ptr, out_ptr, R, V, S, BLOCK_S: tl.constexpr, BLOCK_V: tl.constexpr
):  # fmt: skip
    pair, r = tl.program_id(0), tl.program_id(1)
    s, v = tl.arange(0, BLOCK_S), tl.arange(0, BLOCK_V)
    at = (pair * S + s) * R + r
    high = tl.load(max_ptr + at, mask=s < S, other=-1.0e30)
    weight = tl.exp2(high - tl.max(high, 0))
    total = tl.sum(weight * tl.load(sum_ptr + at, mask=s < S, other=0.0), 0)
    mask = (s[:, None] < S) & (v[None, :] < V)
    acc = tl.load(acc_ptr + at[:, None].to(tl.int64) * V + v[None, :], mask=mask, other=0.0)
    o = tl.sum(acc * weight[:, None], 0) / total
    tl.store(out_ptr + (pair * R + r) * V + v, o.to(out_ptr.dtype.element_ty), mask=v < V)


@triton_op("lt2::split_attention_decode", mutates_args={})
def split_attention_decode(q: Tensor, k_cache: Tensor, v_cache: Tensor, lengths: Tensor, scale: float) -> Tensor:
    """q (B, 1, G*R, E), k_cache (B, M, G, E), v_cache (B, M, G, V), lengths (B,) int >= 1 -> (B, 1, G*R, V).

    Only the first lengths[b] slots of row b are read. Head dimensions must be contiguous in the caches.
    """
    B, _, heads, E = q.shape
    M, G, V = k_cache.shape[1], k_cache.shape[2], v_cache.shape[3]
    R = heads // G
    S = max(1, min(-(-M // BLOCK_M), PROGRAMS // (B * G)))
    acc = q.new_empty(B * G, S, R, V, dtype=torch.float32)
    high = q.new_empty(B * G, S, R, dtype=torch.float32)
    total = torch.empty_like(high)
    out = q.new_empty(B, 1, heads, V)
    BLOCK_R = 1 if R == 1 else max(16, triton.next_power_of_2(R))
    BLOCK_E, BLOCK_V = (max(16, triton.next_power_of_2(n)) for n in (E, V))
    wrap_triton(_partial)[(B * G, S)](
        q.contiguous(), k_cache, v_cache, lengths, acc, high, total, scale,
        G, R, E, V, S, k_cache.stride(0), k_cache.stride(1), v_cache.stride(0), v_cache.stride(1),
        BLOCK_M=BLOCK_M, BLOCK_R=BLOCK_R, BLOCK_E=BLOCK_E, BLOCK_V=BLOCK_V,
    )  # fmt: skip
    wrap_triton(_combine)[(B * G, R)](
        acc, high, total, out, R, V, S, BLOCK_S=triton.next_power_of_2(S), BLOCK_V=BLOCK_V
    )
    return out
