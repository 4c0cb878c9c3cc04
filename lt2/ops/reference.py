"""Slow, obvious versions of every op, written from the equations alone: the oracles the fast ones are tested against.

Shapes (all ops): B batch, L tokens, H heads, K key dim, V value dim. Any floating dtype; fp64 in, fp64 out.
Nothing here shares code with the chunkwise or CUDA paths.
"""

from __future__ import annotations

import math

import torch
from torch import Tensor


def recurrent_gated_linear_attention(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    g: Tensor | None = None,
    *,
    scale: float | None = None,
    initial_state: Tensor | None = None,
    reset: Tensor | None = None,
) -> tuple[Tensor, Tensor]:
    """S_t = Diag(exp g_t) S_{t-1} + k_t v_tᵀ and o_t = scale · S_tᵀ q_t, one token at a time.

    q, k: (B, L, H, K); v: (B, L, H, V); g: natural-log decay (B, L, H) or (B, L, H, K) or None for no decay;
    initial_state: (B, H, K, V); reset: (B, L) bool, True where the state is zeroed before the token.
    Returns o (B, L, H, V) and the final state (B, H, K, V).
    """
    scale = 1 / math.sqrt(q.shape[-1]) if scale is None else scale
    state = _start(k, v, initial_state)
    outputs = []
    for t in range(q.shape[1]):
        state = _decayed(state, g, reset, t)
        state = state + torch.einsum("bhk,bhv->bhkv", k[:, t], v[:, t])
        outputs.append(scale * torch.einsum("bhk,bhkv->bhv", q[:, t], state))
    return torch.stack(outputs, dim=1), state


def recurrent_gated_delta_rule(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    g: Tensor | None,
    beta: Tensor,
    *,
    scale: float | None = None,
    initial_state: Tensor | None = None,
    reset: Tensor | None = None,
) -> tuple[Tensor, Tensor]:
    """S_t = (I - β_t k_t k_tᵀ) Diag(exp g_t) S_{t-1} + β_t k_t v_tᵀ and o_t = scale · S_tᵀ q_t, one token at a time.

    Shapes as in `recurrent_gated_linear_attention`; beta: (B, L, H). k is used as given (no normalisation).
    """
    scale = 1 / math.sqrt(q.shape[-1]) if scale is None else scale
    state = _start(k, v, initial_state)
    outputs = []
    for t in range(q.shape[1]):
        state = _decayed(state, g, reset, t)
        error = v[:, t] - torch.einsum("bhk,bhkv->bhv", k[:, t], state)
        state = state + torch.einsum("bh,bhk,bhv->bhkv", beta[:, t], k[:, t], error)
        outputs.append(scale * torch.einsum("bhk,bhkv->bhv", q[:, t], state))
    return torch.stack(outputs, dim=1), state


def softmax_attention(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    *,
    window: int | None = None,
    doc_ids: Tensor | None = None,
    scale: float | None = None,
) -> Tensor:
    """Dense causal softmax attention through the whole L×L score matrix.

    q: (B, L, Hq, D); k, v: (B, L, Hkv, D), Hq a multiple of Hkv (query head h reads KV head h·Hkv//Hq);
    window w: token t sees {t-w+1..t}; doc_ids: (B, L), tokens see only their own document. Returns (B, L, Hq, D).
    """
    scale = 1 / math.sqrt(q.shape[-1]) if scale is None else scale
    length, group = q.shape[1], q.shape[2] // k.shape[2]
    k, v = (x.repeat_interleave(group, dim=2) for x in (k, v))
    position = torch.arange(length, device=q.device)
    distance = position[:, None] - position[None, :]
    visible = (distance >= 0) & (distance < (length if window is None else window))
    visible = visible.expand(q.shape[0], 1, length, length)
    if doc_ids is not None:
        visible = visible & (doc_ids[:, None, :, None] == doc_ids[:, None, None, :])
    scores = scale * torch.einsum("bihd,bjhd->bhij", q, k)
    weights = scores.masked_fill(~visible, float("-inf")).softmax(dim=-1)
    return torch.einsum("bhij,bjhd->bihd", weights, v)


def _start(k: Tensor, v: Tensor, initial_state: Tensor | None) -> Tensor:
    if initial_state is not None:
        return initial_state
    batch, _, heads, key_dim = k.shape
    return v.new_zeros(batch, heads, key_dim, v.shape[-1])


def _decayed(state: Tensor, g: Tensor | None, reset: Tensor | None, t: int) -> Tensor:
    if reset is not None:
        state = torch.where(reset[:, t, None, None, None], torch.zeros_like(state), state)
    if g is None:
        return state
    decay = g[:, t].exp()
    return state * (decay[..., None, None] if g.ndim == 3 else decay[..., None])
