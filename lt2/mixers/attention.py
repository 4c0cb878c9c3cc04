"""Softmax attention over the whole prefix or a sliding window, on one set of weights.

Shapes: B batch, L tokens, D width, H query heads, G key/value heads, E head_dim, M cache slots.
"""

from __future__ import annotations

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from lt2.cache import LayerCache
from lt2.config import Dims
from lt2.layers import OutputGate, RMSNorm
from lt2.mixer_configs import SoftmaxConfig, WindowConfig
from lt2.ops.attention import attention_decode, causal_attention
from lt2.ops.windowed import windowed_attention
from lt2.sequence import SequenceInfo, rotate


class Attention(nn.Module):
    """MHA/GQA with rotary positions, optional q/k RMSNorm, biases and the SDPA output gate (paper §3.4)."""

    def __init__(self, config: SoftmaxConfig, dims: Dims):
        super().__init__()
        H, G, E = self.heads = config.heads(dims)
        self.q_proj = nn.Linear(dims.dim, H * E, bias=config.bias is not None)
        self.k_proj = nn.Linear(dims.dim, G * E, bias=config.bias is not None)
        self.v_proj = nn.Linear(dims.dim, G * E, bias=config.bias is not None)
        self.o_proj = nn.Linear(H * E, dims.dim, bias=config.bias == "qkvo")
        self.q_norm = RMSNorm(E, eps=dims.norm_eps) if config.qk_norm else None
        self.k_norm = RMSNorm(E, eps=dims.norm_eps) if config.qk_norm else None
        self.gate_proj = None if config.gate is None else OutputGate(config.gate, dims.dim, H, E)
        self.rope = config.rope

    def forward(
        self, x: Tensor, spec: SoftmaxConfig, seq: SequenceInfo, cache: LayerCache | None
    ) -> tuple[Tensor, None]:
        B, L, _ = x.shape
        H, _, E = self.heads
        q, k = self.queries_and_keys(x, seq)
        v = self.v_proj(x).view(B, L, -1, E)
        window = spec.window if isinstance(spec, WindowConfig) else None

        if cache is None or (seq.fresh and L > 1):
            o = attend(q, k, v, window, seq.doc_ids)
            if cache is not None:
                store(cache, k, v, window, seq)
        elif L == 1:
            store(cache, k, v, window, seq)
            assert seq.starts is not None
            keys, values = cache["k"].to(q.dtype), cache["v"].to(q.dtype)
            o = attention_decode(q, keys, values, (seq.starts + 1).clamp(max=keys.shape[1]))
        else:
            o = attend_continued(q, k, v, cache, window, seq)
            store(cache, k, v, window, seq)

        if self.gate_proj is not None:
            o = self.gate_proj.gated(o, x)
        return self.o_proj(o.reshape(B, L, H * E)), None

    def queries_and_keys(self, x: Tensor, seq: SequenceInfo) -> tuple[Tensor, Tensor]:
        """(B, L, H, E) and (B, L, G, E), normed and rotated: what the scores are products of."""
        H, G, E = self.heads
        q, k = self.q_proj(x).view(*x.shape[:2], H, E), self.k_proj(x).view(*x.shape[:2], G, E)
        if self.q_norm is not None and self.k_norm is not None:
            q, k = self.q_norm(q), self.k_norm(k)
        if self.rope:
            q, k = rotate(q, *seq.rope[E]), rotate(k, *seq.rope[E])
        return q, k


def attend(q: Tensor, k: Tensor, v: Tensor, window: int | None, doc_ids: Tensor | None) -> Tensor:
    """Causal attention of a whole sequence; q (B, L, H, E), k and v (B, L, G, E) -> (B, L, H, E)."""
    if window is not None:
        return windowed_attention(q, k, v, window=window, doc_ids=doc_ids)
    return causal_attention(q, k, v, doc_ids=doc_ids)


def store(cache: LayerCache, k: Tensor, v: Tensor, window: int | None, seq: SequenceInfo) -> None:
    """Write this pass's keys and values; a window keeps its last tokens in a ring at slot position % window.

    A pad of a full cache lands beyond the row's length, where nothing reads it before it is overwritten. In a ring it
    would evict a token still in sight, so there each slot gathers the last valid token that belongs in it.
    """
    assert seq.starts is not None
    assert seq.lengths is not None
    M, L = cache["k"].shape[1], k.shape[1]
    rows = torch.arange(k.shape[0], device=k.device)[:, None]
    if L == 1 or window is None:
        slots = seq.positions if window is None else seq.positions % M
        for name, new in (("k", k), ("v", v)):
            cache[name][rows, slots] = new.to(cache[name].dtype)
        return
    position = slot_positions(seq.starts + seq.lengths, M)
    source = position - seq.starts[:, None]
    keep_old = (source < 0)[..., None, None]
    for name, new in (("k", k), ("v", v)):
        gathered = new[rows, source.clamp(min=0)].to(cache[name].dtype)
        cache[name].copy_(torch.where(keep_old, cache[name], gathered))


def slot_positions(ends: Tensor, slots: int) -> Tensor:
    """Position held by each ring slot after `ends` (B,) tokens: (B, slots), negative where the slot is empty."""
    last = ends[:, None] - 1
    return last - (last - torch.arange(slots, device=ends.device)) % slots


def attend_continued(
    q: Tensor, k: Tensor, v: Tensor, cache: LayerCache, window: int | None, seq: SequenceInfo
) -> Tensor:
    """Attention of L new tokens over a cache that is not empty, and over themselves."""
    assert seq.starts is not None
    M = cache["k"].shape[1]
    if window is None:
        held = torch.arange(M, device=q.device).expand(q.shape[0], M)
        held = torch.where(held < seq.starts[:, None], held, -1)
    else:
        held = slot_positions(seq.starts, M)
    key_position = torch.cat([held, seq.positions], dim=1)[:, None, :]
    query_position = seq.positions[:, :, None]
    mask = (key_position >= 0) & (key_position <= query_position)
    if window is not None:
        mask &= key_position > query_position - window
    keys, values = (torch.cat([cache[name].to(new.dtype), new], dim=1) for name, new in (("k", k), ("v", v)))
    q, keys, values = (t.transpose(1, 2) for t in (q, keys, values))
    enable_gqa = q.shape[1] != keys.shape[1]
    o = F.scaled_dot_product_attention(q, keys, values, attn_mask=mask[:, None], enable_gqa=enable_gqa)
    return o.transpose(1, 2)
