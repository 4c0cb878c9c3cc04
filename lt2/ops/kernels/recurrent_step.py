"""One decode step of a recurrent memory on CUDA, updating its state in place: the state is read and written once.

Covers gated linear attention and the gated delta rule with no, per-head or per-channel decay:
S <- Diag(exp g) S;  u = beta (v - S^T k) or v;  S <- S + k u^T;  o = scale S^T q.

Shapes: B rows, H heads, K head_k_dim, V head_v_dim.
"""

# Triton passes plain ints as constexpr; pyright cannot know.
# pyright: reportArgumentType=false
from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor
from torch.library import triton_op, wrap_triton


@triton.jit
def _step(
    q_ptr, k_ptr, v_ptr, g_ptr, beta_ptr, state_ptr, out_ptr, scale, K, V,
    DECAY: tl.constexpr, DELTA: tl.constexpr, BLOCK_K: tl.constexpr, BLOCK_V: tl.constexpr,
):  # fmt: skip
    head, part = tl.program_id(0).to(tl.int64), tl.program_id(1)
    i, j = tl.arange(0, BLOCK_K), part * BLOCK_V + tl.arange(0, BLOCK_V)
    at = state_ptr + head * K * V + i[:, None] * V + j[None, :]
    mask = (i[:, None] < K) & (j[None, :] < V)
    state = tl.load(at, mask=mask, other=0.0).to(tl.float32)
    k = tl.load(k_ptr + head * K + i, mask=i < K, other=0.0).to(tl.float32)
    u = tl.load(v_ptr + head * V + j, mask=j < V, other=0.0).to(tl.float32)
    if DECAY == 1:
        state *= tl.exp(tl.load(g_ptr + head).to(tl.float32))
    if DECAY == 2:
        state *= tl.exp(tl.load(g_ptr + head * K + i, mask=i < K, other=0.0).to(tl.float32))[:, None]
    if DELTA:
        u = (u - tl.sum(state * k[:, None], 0)) * tl.load(beta_ptr + head).to(tl.float32)
    state += k[:, None] * u[None, :]
    q = tl.load(q_ptr + head * K + i, mask=i < K, other=0.0).to(tl.float32) * tl.cast(scale, tl.float32)
    o = tl.sum(state * q[:, None], 0)
    tl.store(at, state.to(state_ptr.dtype.element_ty), mask=mask)
    tl.store(out_ptr + head * V + j, o.to(out_ptr.dtype.element_ty), mask=j < V)


@triton_op("lt2::recurrent_step", mutates_args={"state"})
def recurrent_step(
    q: Tensor, k: Tensor, v: Tensor, g: Tensor | None, beta: Tensor | None, state: Tensor, scale: float
) -> Tensor:
    """q, k (B, H, K), v (B, H, V), g (B, H) or (B, H, K) or None, beta (B, H) or None -> o (B, H, V) in v's dtype.

    `state` (B, H, K, V), contiguous, is updated in place. With beta the delta rule, without it a plain write.
    """
    B, H, K = q.shape
    V = v.shape[-1]
    if not state.is_contiguous():
        raise ValueError("recurrent_step updates the state in place and needs it contiguous")
    out = torch.empty_like(v, memory_format=torch.contiguous_format)
    BLOCK_V = min(32, triton.next_power_of_2(V))
    absent = state  # never read
    wrap_triton(_step)[(B * H, triton.cdiv(V, BLOCK_V))](
        q.contiguous(), k.contiguous(), v.contiguous(),
        absent if g is None else g.contiguous(), absent if beta is None else beta.contiguous(),
        state, out, scale, K, V,
        DECAY=0 if g is None else g.dim() - 1, DELTA=beta is not None,
        BLOCK_K=triton.next_power_of_2(K), BLOCK_V=BLOCK_V,
    )  # fmt: skip
    return out
