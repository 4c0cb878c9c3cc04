"""DeepSeek sparse attention: a lightning indexer picks the keys that attention reads (DeepSeek-V3.2; paper Table 1).

Shapes: B batch, L tokens, D width, H query heads, G KV heads, E head_dim, J index heads, I index_dim, M cache slots.
"""

from __future__ import annotations

import torch
from torch import Tensor, nn

from lt2.cache import LayerCache
from lt2.config import Dims
from lt2.layers import OutputGate, RMSNorm
from lt2.mixer_configs import DSAConfig
from lt2.mixers.nsa import store_heads_first
from lt2.ops.attention import causal_attention
from lt2.ops.documents import document_starts
from lt2.ops.sparse import dense_kl, group_queries, select_keys, selected_attention, selected_kl, ungroup_queries
from lt2.sequence import SequenceInfo, rotate


class LightningIndexer(nn.Module):
    """Index queries (J heads), one index key per token, and the heads' weights, from a detached input."""

    def __init__(self, config: DSAConfig, dims: Dims):
        super().__init__()
        self.heads, self.dim, self.rope_dim = config.index_heads, config.index_dim, config.index_rope_dim
        self.q_proj = nn.Linear(dims.dim, self.heads * self.dim, bias=False)
        self.k_proj = nn.Linear(dims.dim, self.dim, bias=False)
        self.k_norm = nn.LayerNorm(self.dim)
        self.w_proj = nn.Linear(dims.dim, self.heads, bias=False)

    def forward(self, x: Tensor, seq: SequenceInfo) -> tuple[Tensor, Tensor, Tensor]:
        """x (B, L, D) -> q (B, L, J, I), k (B, L, I), w (B, L, J)."""
        B, L, _ = x.shape
        x = x.detach()
        q = self._rotated(self.q_proj(x).view(B, L, self.heads, self.dim), seq)
        k = self._rotated(self.k_norm(self.k_proj(x))[:, :, None], seq).squeeze(2)
        w = self.w_proj(x) * (self.heads * self.dim) ** -0.5
        return q, k.to(q.dtype), w.to(q.dtype)

    def _rotated(self, x: Tensor, seq: SequenceInfo) -> Tensor:
        if not self.rope_dim:
            return x
        turning, still = x.split([self.rope_dim, self.dim - self.rope_dim], dim=-1)
        return torch.cat([rotate(turning, *seq.rope[self.rope_dim]), still], dim=-1)


class SparseAttention(nn.Module):
    """Softmax attention over the top_k keys of the indexer, with the SDPA output gate (paper §3.4).

    The auxiliary loss is the indexer's KL, reported in training mode without a cache.
    """

    def __init__(self, config: DSAConfig, dims: Dims):
        super().__init__()
        H, G, E = self.heads = config.heads(dims)
        self.q_proj = nn.Linear(dims.dim, H * E, bias=config.bias is not None)
        self.k_proj = nn.Linear(dims.dim, G * E, bias=config.bias is not None)
        self.v_proj = nn.Linear(dims.dim, G * E, bias=config.bias is not None)
        self.o_proj = nn.Linear(H * E, dims.dim, bias=config.bias == "qkvo")
        self.q_norm = RMSNorm(E, eps=dims.norm_eps) if config.qk_norm else None
        self.k_norm = RMSNorm(E, eps=dims.norm_eps) if config.qk_norm else None
        self.gate_proj = None if config.gate is None else OutputGate(config.gate, dims.dim, H, E)
        self.indexer = LightningIndexer(config, dims)
        self.rope = config.rope

    def forward(
        self, x: Tensor, spec: DSAConfig, seq: SequenceInfo, cache: LayerCache | None
    ) -> tuple[Tensor, Tensor | None]:
        B, L, _ = x.shape
        H, G, E = self.heads
        q = self.q_proj(x).view(B, L, H, E)
        k = self.k_proj(x).view(B, L, G, E)
        v = self.v_proj(x).view(B, L, G, E)
        if self.q_norm is not None and self.k_norm is not None:
            q, k = self.q_norm(q), self.k_norm(k)
        if self.rope:
            q, k = rotate(q, *seq.rope[E]), rotate(k, *seq.rope[E])
        index = self.indexer(x, seq)

        aux = None
        if cache is not None:
            store_heads_first(cache, seq, k=k, v=v)
            rows = torch.arange(B, device=x.device)[:, None]
            cache["index_k"][rows, seq.positions] = index[1].to(cache["index_k"].dtype)
        if cache is None or (seq.fresh and L > 1):
            o, aux = attend(q, k, v, index, spec, seq, train_indexer=self.training and cache is None)
        else:
            o = attend_cached(q, index, cache, spec.top_k, seq)

        if self.gate_proj is not None:
            o = self.gate_proj.gated(o, x)
        return self.o_proj(o.reshape(B, L, H * E)), aux


def attend(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    index: tuple[Tensor, Tensor, Tensor],
    spec: DSAConfig,
    seq: SequenceInfo,
    *,
    train_indexer: bool,
) -> tuple[Tensor, Tensor | None]:
    """DSA of whole sequences and the indexer's loss: q (B, L, H, E), k and v (B, L, G, E) -> (B, L, H, E).

    Dense in warm-up, and where top_k leaves nothing out, which is the same function at less cost.
    """
    B, L, H, E = q.shape
    last = torch.arange(L, device=q.device).expand(B, L)
    first = torch.zeros_like(last) if seq.doc_ids is None else document_starts(seq.doc_ids)
    warming_up = seq.step is not None and seq.step < spec.warmup_steps
    if warming_up or spec.top_k >= L:
        aux = dense_kl(*index, q, k, first, scale=E**-0.5) if train_indexer else None
        return causal_attention(q, k, v, doc_ids=seq.doc_ids), aux
    keys, found = select_keys(*index, first, last, top_k=spec.top_k)
    k, v = (heads_first(x).flatten(0, 1).unsqueeze(2) for x in (k, v))
    grouped = group_queries(q, k.shape[0] // B)
    o, weights = selected_attention(grouped, k, v, keys, found.long(), return_weights=train_indexer)
    aux = selected_kl(*index, keys, found, weights) if weights is not None else None
    return ungroup_queries(o, B), aux


def attend_cached(
    q: Tensor, index: tuple[Tensor, Tensor, Tensor], cache: LayerCache, top_k: int, seq: SequenceInfo
) -> Tensor:
    """DSA of L new tokens over a cache that already holds them; q (B, L, H, E) -> (B, L, H, E)."""
    index_q, index_k, index_w = index
    keys, found = select_keys(
        index_q,
        cache["index_k"].to(index_k.dtype),
        index_w,
        torch.zeros_like(seq.positions),
        seq.positions,
        top_k=top_k,
    )
    G = cache["k"].shape[1]
    k, v = (cache[name].to(q.dtype).flatten(0, 1).unsqueeze(2) for name in ("k", "v"))
    o, _ = selected_attention(group_queries(q, G), k, v, keys, found.long())
    return ungroup_queries(o, q.shape[0])


def heads_first(x: Tensor) -> Tensor:
    """(B, L, G, E) -> (B, G, L, E)."""
    return x.transpose(1, 2).contiguous()
