"""One decode step of a recurrent memory that updates its state in place, as decode caches need."""

from __future__ import annotations

import torch
from torch import Tensor

from lt2.ops import dispatch
from lt2.ops.recurrence.gated_delta import gated_delta_rule_step
from lt2.ops.recurrence.gated_linear import gated_linear_attention_step


def recurrent_step_(
    q: Tensor, k: Tensor, v: Tensor, g: Tensor | None, beta: Tensor | None, state: Tensor, *, scale: float | None = None
) -> Tensor:
    """One token through the delta rule (with beta) or linear attention (without); `state` is overwritten.

    q, k (B, H, K); v (B, H, V); log-decay g (B, H), (B, H, K) or None; beta (B, H); state (B, H, K, V).
    Returns o (B, H, V) in v's dtype. On CUDA one fused Triton kernel that `torch.compile` and CUDA graphs can hold.
    """
    if state.is_cuda and state.dtype == torch.float32 and not torch.is_grad_enabled():
        from lt2.ops.kernels.recurrent_step import recurrent_step

        dispatch.announce("recurrent_step_", "cuda", "triton")
        return recurrent_step(q, k, v, g, beta, state, q.shape[-1] ** -0.5 if scale is None else scale)
    if beta is None:
        o, new = gated_linear_attention_step(q, k, v, g, state, scale=scale)
    else:
        o, new = gated_delta_rule_step(q, k, v, g, beta, state, scale=scale)
    state.copy_(new)
    return o
