"""A decode step of gated delta-rule attention from its input projection to its output projection, as one kernel.

Short convolution and SiLU, L2 norms of q and k, decay, write strength, state update, read-out, output norm and gate:
left to torch.compile these are twelve kernels of microseconds, where reading the weights of a 1.3B block takes 37 µs.

Shapes: B rows, H heads, K head_k_dim, V head_v_dim, C = H·(2K + V) channels, W size of the convolution.
"""

# Triton passes plain ints as constexpr; pyright cannot know.
# pyright: reportArgumentType=false
from __future__ import annotations

import triton
import triton.language as tl
from torch import Tensor
from torch.library import triton_op, wrap_triton


@triton.jit
def _taps(x_ptr, past_ptr, row, x_row, c, inside, C, W: tl.constexpr, BLOCK_W: tl.constexpr):
    """What the convolution of channels c sees at the new token: (channels, taps), the new input last."""
    t = tl.arange(0, BLOCK_W)[None, :]
    old = past_ptr + (row * (W - 1) + t) * C + c[:, None]
    taps = tl.load(old, mask=inside[:, None] & (t < W - 1), other=0.0)
    new = x_ptr + row * x_row + c[:, None] + 0 * t
    return taps + tl.load(new, mask=inside[:, None] & (t == W - 1), other=0.0).to(taps.dtype)


@triton.jit
def _convolved(taps, weight_ptr, c, inside, W: tl.constexpr, BLOCK_W: tl.constexpr):
    t = tl.arange(0, BLOCK_W)[None, :]
    weight = tl.load(weight_ptr + c[:, None] * W + t, mask=inside[:, None] & (t < W), other=0.0)
    y = tl.sum(taps.to(tl.float32) * weight.to(tl.float32), 1)
    return y * tl.sigmoid(y)


@triton.jit
def _remember(taps, past_ptr, row, c, inside, C, W: tl.constexpr, BLOCK_W: tl.constexpr):
    t = tl.arange(0, BLOCK_W)[None, :]
    at = past_ptr + (row * (W - 1) + t - 1) * C + c[:, None]
    tl.store(at, taps, mask=inside[:, None] & (t > 0) & (t < W))


@triton.jit
def _delta_decode(
    x_ptr, past_ptr, weight_ptr, gate_ptr, ab_ptr, a_log_ptr, dt_bias_ptr, norm_ptr, state_ptr, out_ptr,
    scale, eps, beta_scale, x_row, gate_row, gate_at, ab_row, ab_at,
    C: tl.constexpr, H: tl.constexpr, K: tl.constexpr, V: tl.constexpr, W: tl.constexpr, GATED: tl.constexpr,
    BLOCK_K: tl.constexpr, BLOCK_V: tl.constexpr, BLOCK_W: tl.constexpr,
):  # fmt: skip
    # One program owns a head's channels and its state: nobody else reads what it overwrites.
    row, head = tl.program_id(0).to(tl.int64), tl.program_id(1)
    i, j = tl.arange(0, BLOCK_K), tl.arange(0, BLOCK_V)
    at = state_ptr + (row * H + head) * K * V + i[:, None] * V + j[None, :]
    mask = (i[:, None] < K) & (j[None, :] < V)
    state = tl.load(at, mask=mask, other=0.0)
    q_at, k_at, v_at = head * K + i, (H + head) * K + i, 2 * H * K + head * V + j
    q_taps = _taps(x_ptr, past_ptr, row, x_row, q_at, i < K, C, W, BLOCK_W)
    k_taps = _taps(x_ptr, past_ptr, row, x_row, k_at, i < K, C, W, BLOCK_W)
    v_taps = _taps(x_ptr, past_ptr, row, x_row, v_at, j < V, C, W, BLOCK_W)
    tl.debug_barrier()  # copies of a tap in several threads must all be read before it is overwritten
    _remember(q_taps, past_ptr, row, q_at, i < K, C, W, BLOCK_W)
    _remember(k_taps, past_ptr, row, k_at, i < K, C, W, BLOCK_W)
    _remember(v_taps, past_ptr, row, v_at, j < V, C, W, BLOCK_W)
    q = _convolved(q_taps, weight_ptr, q_at, i < K, W, BLOCK_W)
    k = _convolved(k_taps, weight_ptr, k_at, i < K, W, BLOCK_W)
    u = _convolved(v_taps, weight_ptr, v_at, j < V, W, BLOCK_W)
    q *= tl.rsqrt(tl.sum(q * q, 0) + 1e-6) * tl.cast(scale, tl.float32)  # floats come as fp64 from a compiled caller
    k *= tl.rsqrt(tl.sum(k * k, 0) + 1e-6)
    ab = ab_ptr + row * ab_row + ab_at + head
    a = tl.load(ab).to(tl.float32) + tl.load(dt_bias_ptr + head).to(tl.float32)
    softplus = tl.where(a > 20.0, a, tl.log(1.0 + tl.exp(tl.minimum(a, 20.0))))
    beta = tl.sigmoid(tl.load(ab + H).to(tl.float32)) * tl.cast(beta_scale, tl.float32)
    state *= tl.exp(-tl.exp(tl.load(a_log_ptr + head).to(tl.float32)) * softplus)
    u = (u - tl.sum(state * k[:, None], 0)) * beta
    state += k[:, None] * u[None, :]
    tl.store(at, state, mask=mask)
    o = tl.sum(state * q[:, None], 0)
    o *= tl.rsqrt(tl.sum(o * o, 0) / V + tl.cast(eps, tl.float32))
    o *= tl.load(norm_ptr + j, mask=j < V, other=0.0).to(tl.float32)
    if GATED:
        gate = tl.load(gate_ptr + row * gate_row + gate_at + head * V + j, mask=j < V, other=0.0).to(tl.float32)
        o *= gate * tl.sigmoid(gate)
    tl.store(out_ptr + (row * H + head) * V + j, o.to(out_ptr.dtype.element_ty), mask=j < V)


@triton_op("lt2::delta_decode", mutates_args={"past", "state"})
def delta_decode(
    x: Tensor, past: Tensor, weight: Tensor, gate: Tensor | None, gate_at: int, ab: Tensor, ab_at: int,
    A_log: Tensor, dt_bias: Tensor, norm: Tensor, state: Tensor, eps: float, beta_scale: float,
) -> Tensor:  # fmt: skip
    """The normed and gated read-out (B, H·V) of one token; past (B, W-1, C) and state (B, H, K, V) change in place.

    x (B, ≥ C): q, k and v before the convolution in the first C columns; gate and ab: tensors with H·V columns from
    gate_at on and decay and write strength (2H) from ab_at on, which may be x itself.
    """
    (B, H, K, V), W = state.shape, weight.shape[1]
    if not (past.is_contiguous() and state.is_contiguous()):
        raise ValueError("delta_decode updates its caches in place and needs them contiguous")
    out = x.new_empty(B, H * V)
    gates = x if gate is None else gate  # never read without a gate
    wrap_triton(_delta_decode)[(B, H)](
        x, past, weight, gates, ab, A_log, dt_bias, norm, state, out,
        K**-0.5, eps, beta_scale, x.stride(0), gates.stride(0), gate_at, ab.stride(0), ab_at, past.shape[2], H, K, V,
        W=W, GATED=gate is not None, BLOCK_K=triton.next_power_of_2(K), BLOCK_V=triton.next_power_of_2(V),
        BLOCK_W=triton.next_power_of_2(W), num_warps=8,
    )  # fmt: skip
    return out
