"""Gated linear attention, S_t = Diag(exp g_t) S_{t-1} + k_t v_tᵀ: LA, RetNet, Mamba2 (scalar decay), GLA, HGRN2
(per channel).

Chunkwise form of Yang et al. 2023 (GLA, arXiv:2312.06635) in PyTorch; on CUDA the same call runs fla's kernels.
"""

from __future__ import annotations

import math

import torch
from torch import Tensor

from lt2.ops import dispatch, outline
from lt2.ops.checks import check_sequence, check_step
from lt2.ops.kernels import fla as fla_kernels
from lt2.ops.recurrence import chunking, decay, scan


def gated_linear_attention(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    g: Tensor | None = None,
    *,
    scale: float | None = None,
    initial_state: Tensor | None = None,
    output_final_state: bool = False,
    reset: Tensor | None = None,
    backend: str = "auto",
) -> tuple[Tensor, Tensor | None]:
    """o_t = scale · S_tᵀ q_t over a sequence, differentiable in every float input.

    q, k: (B, L, H, K); v: (B, L, H, V); g: natural-log decay <= 0, (B, L, H) per head or (B, L, H, K) per channel,
    None for no decay; scale: K^-0.5 by default; initial_state: (B, H, K, V); reset: (B, L) bool, True where the
    state is zeroed before the token; backend: "auto", "torch" or "fla".
    Returns o (B, L, H, V) in v's dtype and the final state (B, H, K, V), fp32 (fp64 for fp64 inputs), or None.
    Raises ValueError for shapes that do not match.
    """
    check_sequence(q, k, v, g, None, initial_state, reset)
    scale = 1 / math.sqrt(q.shape[-1]) if scale is None else scale
    chosen = dispatch.backend_for("gated_linear_attention", v, backend)
    if chosen == "outline":
        o, state = outline.recurrence(q, k, v, g, None)
    elif chosen == "fla":
        o, state = fla_kernels.gated_linear_attention(q, k, v, g, scale, initial_state, reset)
    else:
        with torch.autocast(v.device.type, enabled=False):
            o, state = chunking.in_spans(_chunkwise, (q, k, v, g), scale, initial_state, reset)
    return o, state if output_final_state else None


def gated_linear_attention_step(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    g: Tensor | None,
    state: Tensor,
    *,
    scale: float | None = None,
    backend: str = "auto",
) -> tuple[Tensor, Tensor]:
    """One token: q, k (B, H, K); v (B, H, V); g (B, H), (B, H, K) or None; state (B, H, K, V).

    Returns o (B, H, V) in v's dtype and the new state (B, H, K, V); the given state is not modified.
    """
    check_step(q, k, v, g, None, state)
    scale = 1 / math.sqrt(q.shape[-1]) if scale is None else scale
    if dispatch.backend_for("gated_linear_attention_step", v, backend) == "fla":
        return fla_kernels.gated_linear_attention_step(q, k, v, g, scale, state)
    with torch.autocast(v.device.type, enabled=False):
        dtype = chunking.compute_dtype(q, k, v, g, state)
        query, key, value = (x.to(dtype) for x in (q, k, v))
        state = decay.decay_state(state.to(dtype), g)
        state = state + key.unsqueeze(-1) * value.unsqueeze(-2)
        o = torch.einsum("bhk,bhkv->bhv", query * scale, state)
    return o.to(v.dtype), state


def _chunkwise(
    q: Tensor, k: Tensor, v: Tensor, g: Tensor | None, scale: float, initial_state: Tensor | None, reset: Tensor | None
) -> tuple[Tensor, Tensor]:
    batch, length, heads, _ = q.shape
    dtype = chunking.compute_dtype(q, k, v, g, initial_state)
    chunk = chunking.chunk_length(length)
    edges = chunking.boundaries(reset, heads, chunk, v.device)
    gates = decay.decays(chunking.gates(g, q, chunk, dtype), edges)
    state = chunking.first_state(k, v, initial_state, dtype)
    q, k, v_chunks = (chunking.to_chunks(x, chunk, dtype) for x in (q, k, v))
    q = q * scale

    (scores,) = decay.decayed_scores([q], k, gates, edges)
    update = chunking.transposed_times(k * gates.out, v_chunks)
    states, state = scan.linear_scan(update, gates.through, state)
    o = chunking.outputs(q * gates.into, states, scores, v_chunks)
    return chunking.from_chunks(o, batch, length).to(v.dtype), state.view(batch, heads, *state.shape[1:])
