"""Our recurrent ops and cross entropy on flash-linear-attention's Triton kernels: argument order, dtypes, scales,
states and packed documents.

fla is imported inside the functions: importing it starts Triton, which CPU users need not have. All kernels take
(B, L, H, D) and keep states as (B, H, K, V) in fp32, as we do. Documents become pieces of one flattened sequence.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from lt2.ops import dispatch
from lt2.ops.documents import PackedLayout, packed_layout


def gated_linear_attention(
    q: Tensor, k: Tensor, v: Tensor, g: Tensor | None, scale: float, initial_state: Tensor | None, reset: Tensor | None
) -> tuple[Tensor, Tensor]:
    """chunk_simple_gla for no or scalar decay, chunk_gla per channel. Shapes as `lt2.ops.gated_linear_attention`."""
    from fla.ops.gla import chunk_gla
    from fla.ops.simple_gla import chunk_simple_gla

    g = _usable_gate(g, q, delta=False)
    kernel = chunk_gla if g is not None and g.ndim == 4 else chunk_simple_gla
    return _run(kernel, q, k, v, {"g": g}, scale, initial_state, reset)


def gated_delta_rule(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    g: Tensor | None,
    beta: Tensor,
    scale: float,
    initial_state: Tensor | None,
    reset: Tensor | None,
) -> tuple[Tensor, Tensor]:
    """chunk_delta_rule without decay, chunk_gated_delta_rule for scalar, chunk_kda for per-channel decay."""
    from fla.ops.delta_rule import chunk_delta_rule
    from fla.ops.gated_delta_rule import chunk_gated_delta_rule
    from fla.ops.kda import chunk_kda

    if g is None and v.dtype not in dispatch.HALF:
        g = q.new_zeros(q.shape[:3])  # chunk_delta_rule rejects fp32; the gated kernel with decay 1 is the same map
    g = _usable_gate(g, q, delta=True)
    if g is None:
        # This kernel multiplies beta into k without promotion, so it must share their dtype.
        return _run(chunk_delta_rule, q, k, v, {"beta": beta.to(v.dtype)}, scale, initial_state, reset)
    kernel = chunk_kda if g.ndim == 4 else chunk_gated_delta_rule
    return _run(kernel, q, k, v, {"g": g, "beta": beta}, scale, initial_state, reset)


def gated_linear_attention_step(
    q: Tensor, k: Tensor, v: Tensor, g: Tensor | None, scale: float, state: Tensor
) -> tuple[Tensor, Tensor]:
    """fused_recurrent_simple_gla or fused_recurrent_gla on one token. Shapes as
    `lt2.ops.gated_linear_attention_step`."""
    from fla.ops.gla import fused_recurrent_gla
    from fla.ops.simple_gla import fused_recurrent_simple_gla

    if g is not None and g.ndim == 3:
        return _run_step(fused_recurrent_gla, q, k, v, {"gk": g}, scale, state)
    return _run_step(fused_recurrent_simple_gla, q, k, v, {"g": g}, scale, state)


def gated_delta_rule_step(
    q: Tensor, k: Tensor, v: Tensor, g: Tensor | None, beta: Tensor, scale: float, state: Tensor
) -> tuple[Tensor, Tensor]:
    """fused_recurrent_delta_rule, _gated_delta_rule or _kda on one token. Shapes as
    `lt2.ops.gated_delta_rule_step`."""
    from fla.ops.delta_rule import fused_recurrent_delta_rule
    from fla.ops.gated_delta_rule import fused_recurrent_gated_delta_rule
    from fla.ops.kda import fused_recurrent_kda

    if g is None:
        return _run_step(fused_recurrent_delta_rule, q, k, v, {"beta": beta}, scale, state)
    kernel = fused_recurrent_kda if g.ndim == 3 else fused_recurrent_gated_delta_rule
    return _run_step(kernel, q, k, v, {"g": g, "beta": beta}, scale, state)


def cross_entropy_(
    logits: Tensor, targets: Tensor, ignore_index: int, z_loss: float, gradient: bool
) -> tuple[Tensor, Tensor, Tensor | None]:
    """Shapes as `lt2.ops.cross_entropy.cross_entropy_`; the gradient takes the logits' place."""
    from fla.modules.fused_cross_entropy import cross_entropy_loss

    with torch.set_grad_enabled(gradient):
        leaf = logits.detach().requires_grad_(gradient)
        kernel: Any = cross_entropy_loss  # a decorator of fla's hides its signature from pyright
        loss, z = kernel(leaf, targets, lse_square_scale=z_loss, ignore_index=ignore_index, inplace_backward=True)
        grad = torch.autograd.grad(loss.sum(), leaf)[0] if gradient else None
    loss = loss.detach()
    return loss, loss - z, grad


def _usable_gate(g: Tensor | None, q: Tensor, *, delta: bool) -> Tensor | None:
    """Gates in fp32; expanded to one per channel where the scalar kernels' backward is broken (see dispatch)."""
    if g is None:
        return None
    g = g.float()
    if g.ndim == 3 and torch.is_grad_enabled() and dispatch.scalar_gate_backward_is_broken(delta):
        return g.unsqueeze(-1).expand(q.shape)
    return g


def _run(
    kernel,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    gates: dict[str, Tensor | None],
    scale: float,
    initial_state: Tensor | None,
    reset: Tensor | None,
) -> tuple[Tensor, Tensor]:
    """Call a chunk kernel, with one initial state per piece when `reset` cuts the rows into documents."""
    q, k = q.to(v.dtype), k.to(v.dtype)
    state = None if initial_state is None else initial_state.float()
    if reset is None:
        gates = {name: None if x is None else x.contiguous() for name, x in gates.items()}
        return kernel(q=q, k=k, v=v, scale=scale, initial_state=state, output_final_state=True, **gates)
    layout = packed_layout(reset)
    o, pieces = kernel(
        q=_flat(q),
        k=_flat(k),
        v=_flat(v),
        scale=scale,
        initial_state=_piece_states(state, reset, layout),
        output_final_state=True,
        cu_seqlens=layout.cu_seqlens,
        **{name: None if x is None else _flat(x) for name, x in gates.items()},
    )
    return o.reshape(v.shape), pieces[layout.last]


def _run_step(
    kernel, q: Tensor, k: Tensor, v: Tensor, gates: dict[str, Tensor | None], scale: float, state: Tensor
) -> tuple[Tensor, Tensor]:
    q, k = q.to(v.dtype), k.to(v.dtype)
    sequence = {name: None if x is None else x.unsqueeze(1).contiguous() for name, x in gates.items()}
    o, state = kernel(
        q=q.unsqueeze(1),
        k=k.unsqueeze(1),
        v=v.unsqueeze(1),
        scale=scale,
        initial_state=state.float(),
        output_final_state=True,
        **sequence,
    )
    return o.squeeze(1), state


def _flat(x: Tensor) -> Tensor:
    """(B, L, ...) -> (1, B·L, ...)."""
    return x.reshape(1, -1, *x.shape[2:]).contiguous()


def _piece_states(state: Tensor | None, reset: Tensor, layout: PackedLayout) -> Tensor | None:
    """(B, H, K, V) row states -> (N, H, K, V): a row's first piece starts from it unless reset at once, the others
    from zero."""
    if state is None:
        return None
    state = state.masked_fill(reset[:, 0, None, None, None], 0.0)
    pieces = state.new_zeros(layout.cu_seqlens.shape[0] - 1, *state.shape[1:])
    return pieces.index_copy(0, layout.first, state)
