"""What the recurrent mixers share: running a recurrence with or without a cache, and the Mamba-style decay.

Shapes: B batch, L tokens, H heads, K head_k_dim, V head_v_dim.
"""

from __future__ import annotations

import math

import torch
from torch import Tensor
from torch.nn import functional as F

from lt2.cache import LayerCache
from lt2.layers import l2_normalise, mask_padding
from lt2.ops.recurrence.gated_delta import gated_delta_rule
from lt2.ops.recurrence.gated_linear import gated_linear_attention
from lt2.ops.recurrence.step import recurrent_step_
from lt2.sequence import SequenceInfo


def run_linear_attention(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    g: Tensor | None,
    seq: SequenceInfo,
    cache: LayerCache | None,
    *,
    scale: float | None = None,
) -> Tensor:
    """Gated linear attention over a whole pass, or one decode step of it; reads and writes cache["state"] (B, H, K, V).

    q, k (B, L, H, K); v (B, L, H, V); log-decay g (B, L, H), (B, L, H, K) or None; scale K^-0.5 by default.
    Returns (B, L, H, V).
    """
    if cache is None:
        return gated_linear_attention(q, k, v, g, scale=scale, reset=seq.reset)[0]
    if is_step(q, seq):
        step_g = None if g is None else g[:, 0]
        return recurrent_step_(q[:, 0], k[:, 0], v[:, 0], step_g, None, cache["state"], scale=scale)[:, None]
    k, g = mask_update(k, g, seq)
    o, state = gated_linear_attention(q, k, v, g, scale=scale, initial_state=cache["state"], output_final_state=True)
    assert state is not None
    cache["state"].copy_(state)
    return o


def run_delta_rule(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    g: Tensor | None,
    beta: Tensor,
    seq: SequenceInfo,
    cache: LayerCache | None,
) -> Tensor:
    """The gated delta rule over a whole pass, or one decode step of it; reads and writes cache["state"] (B, H, K, V).

    Shapes as `run_linear_attention`, and write strengths beta (B, L, H).
    """
    if cache is None:
        return gated_delta_rule(q, k, v, g, beta, reset=seq.reset)[0]
    if is_step(q, seq):
        step_g = None if g is None else g[:, 0]
        return recurrent_step_(q[:, 0], k[:, 0], v[:, 0], step_g, beta[:, 0], cache["state"])[:, None]
    k, g = mask_update(k, g, seq)
    o, state = gated_delta_rule(q, k, v, g, beta, initial_state=cache["state"], output_final_state=True)
    assert state is not None
    cache["state"].copy_(state)
    return o


def is_step(q: Tensor, seq: SequenceInfo) -> bool:
    """One token per row, none of them padding, so the one-token kernels apply."""
    return q.shape[1] == 1 and seq.valid is None


def mask_update(k: Tensor, g: Tensor | None, seq: SequenceInfo) -> tuple[Tensor, Tensor | None]:
    """Keys and log-decays that leave the state as it is at padded tokens."""
    if g is None:
        return mask_padding(seq, k)[0], None
    k, g = mask_padding(seq, k, g)
    return k, g


def split_heads(x: Tensor, heads: int) -> Tensor:
    """(B, L, H·E) -> (B, L, H, E)."""
    return x.unflatten(-1, (heads, -1))


def split_qkv(qkv: Tensor, heads: tuple[int, int, int]) -> tuple[Tensor, Tensor, Tensor]:
    """(B, L, H·(2K+V)) -> L2-normalised q and k (B, L, H, K), and v (B, L, H, V), as the delta rule takes them."""
    H, K, V = heads
    q, k, v = qkv.split([H * K, H * K, H * V], dim=-1)
    return l2_normalise(split_heads(q, H)), l2_normalise(split_heads(k, H)), split_heads(v, H)


def log_decay(a: Tensor, A_log: Tensor, dt_bias: Tensor) -> Tensor:
    """log alpha = -exp(A_log) softplus(a + dt_bias), in fp32: bf16 would round decays near 1 to no decay."""
    wide = torch.promote_types(a.dtype, torch.float32)
    return -A_log.to(wide).exp() * F.softplus(a.to(wide) + dt_bias.to(wide))


@torch.no_grad()
def init_decay(A_log: Tensor, dt_bias: Tensor, *, least: float) -> None:
    """A ~ U(least, 16) and a time step log-uniform in [1e-3, 1e-1], as Mamba2 and fla initialise them."""
    A_log.copy_(torch.empty_like(A_log).uniform_(least, 16).log())
    dt = torch.empty_like(dt_bias).uniform_(math.log(1e-3), math.log(1e-1)).exp()
    dt_bias.copy_(dt + torch.log(-torch.expm1(-dt)))  # inverse of softplus
