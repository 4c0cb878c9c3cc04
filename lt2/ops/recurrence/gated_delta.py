"""The gated delta rule, S_t = (I - β_t k_t k_tᵀ) Diag(exp g_t) S_{t-1} + β_t k_t v_tᵀ: DeltaNet, GDN (scalar
decay), KDA (per channel).

Chunkwise WY form of Yang et al. 2024 (DeltaNet arXiv:2406.06484, Gated DeltaNet arXiv:2412.06464) in PyTorch; on
CUDA the same call runs fla's kernels.
"""

from __future__ import annotations

import math

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from lt2.ops import dispatch, outline
from lt2.ops.checks import check_sequence, check_step
from lt2.ops.kernels import fla as fla_kernels
from lt2.ops.recurrence import chunking, decay, scan


def gated_delta_rule(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    g: Tensor | None,
    beta: Tensor,
    *,
    scale: float | None = None,
    initial_state: Tensor | None = None,
    output_final_state: bool = False,
    reset: Tensor | None = None,
    backend: str = "auto",
) -> tuple[Tensor, Tensor | None]:
    """o_t = scale · S_tᵀ q_t over a sequence, differentiable in every float input.

    q, k: (B, L, H, K), k L2-normalised by the caller; v: (B, L, H, V); g: natural-log decay <= 0, (B, L, H) per
    head or (B, L, H, K) per channel, None for no decay; beta: (B, L, H) in [0, 2]; scale: K^-0.5 by default;
    initial_state: (B, H, K, V); reset: (B, L) bool, True where the state is zeroed before the token;
    backend: "auto", "torch" or "fla".
    Returns o (B, L, H, V) in v's dtype and the final state (B, H, K, V), fp32 (fp64 for fp64 inputs), or None.
    Raises ValueError for shapes that do not match.
    """
    check_sequence(q, k, v, g, beta, initial_state, reset)
    scale = 1 / math.sqrt(q.shape[-1]) if scale is None else scale
    chosen = dispatch.backend_for("gated_delta_rule", v, backend)
    if chosen == "outline":
        o, state = outline.recurrence(q, k, v, g, beta)
    elif chosen == "fla":
        o, state = fla_kernels.gated_delta_rule(q, k, v, g, beta, scale, initial_state, reset)
    else:
        with torch.autocast(v.device.type, enabled=False):
            o, state = chunking.in_spans(_chunkwise, (q, k, v, g, beta), scale, initial_state, reset)
    return o, state if output_final_state else None


def gated_delta_rule_step(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    g: Tensor | None,
    beta: Tensor,
    state: Tensor,
    *,
    scale: float | None = None,
    backend: str = "auto",
) -> tuple[Tensor, Tensor]:
    """One token: q, k (B, H, K); v (B, H, V); g (B, H), (B, H, K) or None; beta (B, H); state (B, H, K, V).

    Returns o (B, H, V) in v's dtype and the new state (B, H, K, V); the given state is not modified.
    """
    check_step(q, k, v, g, beta, state)
    scale = 1 / math.sqrt(q.shape[-1]) if scale is None else scale
    if dispatch.backend_for("gated_delta_rule_step", v, backend) == "fla":
        return fla_kernels.gated_delta_rule_step(q, k, v, g, beta, scale, state)
    with torch.autocast(v.device.type, enabled=False):
        dtype = chunking.compute_dtype(q, k, v, g, beta, state)
        query, key, value, rate = (x.to(dtype) for x in (q, k, v, beta))
        state = decay.decay_state(state.to(dtype), g)
        error = (value - torch.einsum("bhk,bhkv->bhv", key, state)) * rate.unsqueeze(-1)
        state = state + key.unsqueeze(-1) * error.unsqueeze(-2)
        o = torch.einsum("bhk,bhkv->bhv", query * scale, state)
    return o.to(v.dtype), state


def _chunkwise(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    g: Tensor | None,
    beta: Tensor,
    scale: float,
    initial_state: Tensor | None,
    reset: Tensor | None,
) -> tuple[Tensor, Tensor]:
    batch, length, heads, key_dim = q.shape
    dtype = chunking.compute_dtype(q, k, v, g, beta, initial_state)
    chunk = chunking.chunk_length(length)
    edges = chunking.boundaries(reset, heads, chunk, v.device)
    gates = decay.decays(chunking.gates(g, q, chunk, dtype), edges)
    state = chunking.first_state(k, v, initial_state, dtype)
    q, k, v_chunks, beta = (chunking.to_chunks(x, chunk, dtype) for x in (q, k, v, beta.unsqueeze(-1)))
    q = q * scale

    # Within a chunk the values actually written are u - w S, where (I + β·tril(k kᵀ ∘ decay, -1)) [u | w] = β·[v |
    # k·decay]. One small inverse serves u and w, with β folded into its columns.
    interaction, scores = decay.decayed_scores([k, q], k, gates, edges)
    inverse = _UnitLowerInverse.apply(interaction * beta) * beta.transpose(-1, -2)
    u, w = inverse @ v_chunks, inverse @ (k * gates.into)

    written, states, state = scan.delta_scan(u, w, k * gates.out, gates.through, state)
    o = chunking.outputs(q * gates.into, states, scores, written)
    return chunking.from_chunks(o, batch, length).to(v.dtype), state.view(batch, heads, *state.shape[1:])


class _UnitLowerInverse(torch.autograd.Function):
    """(I + tril(a, -1))^-1 of (..., C, C). As a function of its own because the inverse is all that its gradient needs,
    where a solve's would solve again."""

    @staticmethod
    def forward(ctx, a):
        identity = torch.eye(a.shape[-1], dtype=a.dtype, device=a.device).expand_as(a)
        inverse = torch.linalg.solve_triangular(a, identity, upper=False, unitriangular=True)
        ctx.save_for_backward(inverse)
        return inverse

    @staticmethod
    @once_differentiable
    def backward(ctx, grad):
        (inverse,) = ctx.saved_tensors
        transposed = inverse.transpose(-1, -2)
        return (transposed @ grad @ transposed).tril_(-1).neg_()
