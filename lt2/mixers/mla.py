"""Multi-head latent attention (DeepSeek-V2): one small latent per token stands for the keys and values of all heads.

Shapes: B batch, L tokens, D width, H heads, E head_dim (not rotated), P rope_head_dim, V v_head_dim, C kv_rank, M cache
slots.
"""

from __future__ import annotations

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from lt2.cache import LayerCache
from lt2.config import Dims
from lt2.layers import OutputGate, RMSNorm
from lt2.mixer_configs import MLAConfig
from lt2.ops import dispatch
from lt2.ops.attention import causal_attention
from lt2.sequence import SequenceInfo, rotate


class LatentAttention(nn.Module):
    """Keys and values are expanded from the latent in training; decoding absorbs the expansion into q and o, so that
    attention runs over the cached latents themselves, as one KV head of width C + P."""

    def __init__(self, config: MLAConfig, dims: Dims):
        super().__init__()
        H, E, V = self.heads = config.heads(dims)
        self.rope_dim, self.kv_rank = P, C = config.rope_head_dim, config.kv_rank
        self.q_down = self.q_norm = None
        if config.q_rank is not None:
            self.q_down = nn.Linear(dims.dim, config.q_rank, bias=False)
            self.q_norm = RMSNorm(config.q_rank, eps=dims.norm_eps)
        self.q_proj = nn.Linear(config.q_rank or dims.dim, H * (E + P), bias=False)
        self.kv_down = nn.Linear(dims.dim, C + P, bias=False)
        self.kv_norm = RMSNorm(C, eps=dims.norm_eps)
        self.kv_up = nn.Linear(C, H * (E + V), bias=False)
        self.o_proj = nn.Linear(H * V, dims.dim, bias=False)
        self.gate_proj = None if config.gate is None else OutputGate(config.gate, dims.dim, H, V)

    def forward(self, x: Tensor, spec: MLAConfig, seq: SequenceInfo, cache: LayerCache | None) -> tuple[Tensor, None]:
        B, L, _ = x.shape
        H, E, V = self.heads
        low = x if self.q_down is None or self.q_norm is None else self.q_norm(self.q_down(x))
        q, q_rope = self.q_proj(low).view(B, L, H, E + self.rope_dim).split([E, self.rope_dim], dim=-1)
        latent, k_rope = self.kv_down(x).split([self.kv_rank, self.rope_dim], dim=-1)
        latent = self.kv_norm(latent)
        q_rope = rotate(q_rope, *seq.rope[self.rope_dim])
        k_rope = rotate(k_rope[:, :, None], *seq.rope[self.rope_dim])  # one key for all heads

        if cache is not None:
            rows = torch.arange(B, device=x.device)[:, None]
            entry = torch.cat([latent, k_rope.squeeze(2)], dim=-1)
            cache["latent"][rows, seq.positions] = entry.to(cache["latent"].dtype)
        if cache is None or (seq.fresh and L > 1):
            o = self._expanded(q, q_rope, latent, k_rope, seq)
        else:
            o = self._absorbed(q, q_rope, cache["latent"].to(q.dtype), seq)

        if self.gate_proj is not None:
            o = self.gate_proj.gated(o, x)
        return self.o_proj(o.reshape(B, L, H * V)), None

    def _expanded(self, q: Tensor, q_rope: Tensor, latent: Tensor, k_rope: Tensor, seq: SequenceInfo) -> Tensor:
        """Whole sequences: q (B, L, H, E), q_rope (B, L, H, P), latent (B, L, C), k_rope (B, L, 1, P) ->
        (B, L, H, V)."""
        B, L, H, E = q.shape
        V = self.heads[2]
        k, v = self.kv_up(latent).view(B, L, H, E + V).split([E, V], dim=-1)
        q = torch.cat([q, q_rope], dim=-1)
        k = torch.cat([k, k_rope.expand(-1, -1, H, -1)], dim=-1)
        # Flash kernels want one width for keys and values, and without one SDPA would build L×L scores.
        width = max(E + self.rope_dim, V)
        scale = q.shape[-1] ** -0.5
        q, k, v = (F.pad(t, (0, width - t.shape[-1])) for t in (q, k, v))
        return causal_attention(q, k, v, doc_ids=seq.doc_ids, scale=scale)[..., :V]

    def _absorbed(self, q: Tensor, q_rope: Tensor, cached: Tensor, seq: SequenceInfo) -> Tensor:
        """L new tokens over cached latents (B, M, C + P) that already hold them -> (B, L, H, V)."""
        B, L, H, E = q.shape
        V, C = self.heads[2], self.kv_rank
        up = self.kv_up.weight.to(q.dtype).view(H, E + V, C)
        q = torch.cat([torch.einsum("blhe,hec->blhc", q, up[:, :E]), q_rope], dim=-1)
        scale = (E + self.rope_dim) ** -0.5
        cached = cached[:, : dispatch.furthest(seq.positions, cached.shape[1], plus=1)]
        index = torch.arange(cached.shape[1], device=q.device)
        visible = (index <= seq.positions[..., None])[:, None]  # (B, 1, L, M)
        keys = cached[:, None]
        # One token's heads act as queries of the one KV head, so its latents are read once.
        queries = q if L == 1 else q.transpose(1, 2)
        o = F.scaled_dot_product_attention(queries, keys, keys, attn_mask=visible, scale=scale, enable_gqa=L > 1)
        o = o if L == 1 else o.transpose(1, 2)
        return torch.einsum("blhc,hvc->blhv", o[..., :C], up[:, E:])
