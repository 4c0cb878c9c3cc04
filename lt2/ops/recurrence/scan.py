"""The sequential part of the chunkwise recurrences: the state's walk over the chunks.

Written as autograd functions because the walk is short matmuls and nothing else: autograd's bookkeeping (stacking and
splitting one tensor per chunk, forward and backward) would cost as much as the walk. Every state is written once,
in place.

N chunks, R = B·H rows, C tokens a chunk, K and V head dims. `through` is the decay across a chunk, (N, R, K, 1) or
(N, R, 1, 1).
"""

from __future__ import annotations

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable


def linear_scan(update: Tensor, through: Tensor, state: Tensor) -> tuple[Tensor, Tensor]:
    """S_{n+1} = through_n ∘ S_n + update_n from S_0 = state (R, K, V); update: (N, R, K, V).

    Returns the states each chunk starts from, (N, R, K, V), and the one after the last, (R, K, V).
    """
    return _LinearScan.apply(update, through, state)


def delta_scan(u: Tensor, w: Tensor, k_out: Tensor, through: Tensor, state: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """new_n = u_n - w_n S_n and S_{n+1} = through_n ∘ S_n + k_out_nᵀ new_n from S_0 = state (R, K, V).

    u: (N, R, C, V); w, k_out: (N, R, C, K). Returns the values written, new (N, R, C, V), the states each chunk
    starts from, (N, R, K, V), and the one after the last, (R, K, V).
    """
    return _DeltaScan.apply(u, w, k_out, through, state)


class _LinearScan(torch.autograd.Function):
    @staticmethod
    def forward(ctx, update, through, state):
        states = update.new_empty(update.shape[0] + 1, *update.shape[1:])
        states[0] = state
        slots = states.unbind(0)
        for n, (added, decay) in enumerate(zip(update.unbind(0), through.unbind(0))):
            torch.addcmul(added, slots[n], decay, out=slots[n + 1])
        ctx.save_for_backward(through, states)
        return states[:-1], states[-1].clone()

    @staticmethod
    @once_differentiable
    def backward(ctx, d_states, d_last):
        through, states = ctx.saved_tensors
        grads = torch.empty_like(states)
        grads[-1] = d_last
        slots, decays, outer = grads.unbind(0), through.unbind(0), d_states.unbind(0)
        for n in reversed(range(len(outer))):
            torch.addcmul(outer[n], slots[n + 1], decays[n], out=slots[n])
        d_through = _through_gradient(grads, states, through) if ctx.needs_input_grad[1] else None
        return grads[1:], d_through, grads[0]


class _DeltaScan(torch.autograd.Function):
    @staticmethod
    def forward(ctx, u, w, k_out, through, state):
        states = u.new_empty(u.shape[0] + 1, *state.shape)
        states[0] = state
        new = torch.empty_like(u)
        slots, news = states.unbind(0), new.unbind(0)
        chunks = zip(u.unbind(0), w.unbind(0), k_out.transpose(-1, -2).unbind(0), through.unbind(0))
        for n, (u_n, w_n, k_n, decay) in enumerate(chunks):
            torch.baddbmm(u_n, w_n, slots[n], alpha=-1, out=news[n])
            torch.mul(slots[n], decay, out=slots[n + 1])
            slots[n + 1].baddbmm_(k_n, news[n])
        ctx.save_for_backward(w, k_out, through, states, new)
        return new, states[:-1], states[-1].clone()

    @staticmethod
    @once_differentiable
    def backward(ctx, d_new, d_states, d_last):
        w, k_out, through, states, new = ctx.saved_tensors
        grads, d_u = torch.empty_like(states), torch.empty_like(new)
        grads[-1] = d_last
        slots, d_us, outer, decays = grads.unbind(0), d_u.unbind(0), d_states.unbind(0), through.unbind(0)
        d_news, keys, w_rows = d_new.unbind(0), k_out.unbind(0), w.transpose(-1, -2).unbind(0)
        for n in reversed(range(len(outer))):
            torch.baddbmm(d_news[n], keys[n], slots[n + 1], out=d_us[n])
            torch.addcmul(outer[n], slots[n + 1], decays[n], out=slots[n])
            slots[n].baddbmm_(w_rows[n], d_us[n], alpha=-1)
        d_w = (d_u @ states[:-1].transpose(-1, -2)).neg_()
        d_k_out = new @ grads[1:].transpose(-1, -2)
        d_through = _through_gradient(grads, states, through) if ctx.needs_input_grad[3] else None
        return d_u, d_w, d_k_out, d_through, grads[0]


def _through_gradient(grads: Tensor, states: Tensor, through: Tensor) -> Tensor:
    """Σ grad of S_{n+1} ∘ S_n over V, and over K too for a scalar decay: then a plain dot product of flattened
    states."""
    after, before = grads[1:], states[:-1]
    if through.shape[-2] != 1:
        return (after * before).sum(-1, keepdim=True)
    return after.flatten(2).unsqueeze(-2) @ before.flatten(2).unsqueeze(-1)
