"""Causal softmax attention over a sequence, with packed documents, and over a cache for one new token."""

from __future__ import annotations

import math
from typing import Any, cast

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.nn.attention import SDPBackend, sdpa_kernel

from lt2.ops import dispatch, outline
from lt2.ops.documents import PackedLayout, document_changes, packed_documents

# On H100 cuDNN's kernels are ahead of the flash kernels in PyTorch; each backend steps aside for shapes it cannot do.
_PREFERENCE = [
    SDPBackend.CUDNN_ATTENTION,
    SDPBackend.FLASH_ATTENTION,
    SDPBackend.EFFICIENT_ATTENTION,
    SDPBackend.MATH,
]


def causal_attention(
    q: Tensor, k: Tensor, v: Tensor, *, doc_ids: Tensor | None = None, scale: float | None = None
) -> Tensor:
    """Full causal attention: q (B, L, Hq, D); k, v (B, L, Hkv, D), Hq a multiple of Hkv; returns (B, L, Hq, D).

    doc_ids: (B, L), tokens see only their own document (a run of equal ids); the cost is then Σ document_length².
    scale: D^-0.5 by default. No L×L mask is ever built.
    """
    scale = 1 / math.sqrt(q.shape[-1]) if scale is None else scale
    if doc_ids is None:
        return _causal(q, k, v, scale)
    if dispatch.attention_backend("causal_attention with documents", q) != "torch":
        return packed_attention(q, k, v, packed_documents(doc_ids), scale=scale, window=None)
    return _by_document(q, k, v, doc_ids, scale)


def attention_decode(q: Tensor, k_cache: Tensor, v_cache: Tensor, lengths: Tensor) -> Tensor:
    """One query per sequence against its cache: q (B, 1, Hq, D); k_cache, v_cache (B, M, Hkv, D); lengths (B,) int
    >= 1, how many cache entries of each sequence are valid (the new token's included). Returns (B, 1, Hq, D)."""
    scale = 1 / math.sqrt(q.shape[-1])
    backend = dispatch.attention_backend("attention_decode", q)
    if backend == "flash_attn":
        from flash_attn import flash_attn_with_kvcache

        return flash_attn_with_kvcache(q, k_cache, v_cache, cache_seqlens=lengths.to(torch.int32), softmax_scale=scale)
    if q.is_cuda and not torch.is_grad_enabled():
        from lt2.ops.kernels.attention_decode import split_attention_decode

        return split_attention_decode(q, k_cache, v_cache, lengths, scale)
    longest = dispatch.furthest(lengths, k_cache.shape[1])
    k_cache, v_cache = k_cache[:, :longest], v_cache[:, :longest]
    batch, _, heads, dim = q.shape
    kv_heads = k_cache.shape[2]
    grouped = q.view(batch, kv_heads, heads // kv_heads, dim)  # the query heads of one KV head act as its queries
    visible = torch.arange(k_cache.shape[1], device=q.device) < lengths[:, None]
    o = F.scaled_dot_product_attention(
        grouped, k_cache.transpose(1, 2), v_cache.transpose(1, 2), attn_mask=visible[:, None, None], scale=scale
    )
    return o.reshape(batch, 1, heads, v_cache.shape[-1])


def packed_attention(
    q: Tensor, k: Tensor, v: Tensor, layout: PackedLayout, *, scale: float, window: int | None
) -> Tensor:
    """Causal or windowed attention inside the pieces of a packed layout, by variable-length flash kernels (CUDA,
    half)."""
    length = q.shape[1]  # an upper bound on any piece, known without asking the device
    offsets = layout.cu_seqlens
    flat_q, flat_k, flat_v = (x.reshape(-1, *x.shape[2:]) for x in (q, k, v))
    if dispatch.attention_backend("packed_attention", q) == "flash_attn":
        from flash_attn import flash_attn_varlen_func

        band = (-1, -1) if window is None else (window - 1, 0)
        o = flash_attn_varlen_func(
            flat_q, flat_k, flat_v, offsets, offsets, length, length, softmax_scale=scale, causal=True, window_size=band
        )
    else:
        from torch.nn.attention.varlen import varlen_attn

        band = (-1 if window is None else window - 1, 0)
        options: dict[str, Any] = {"scale": scale, "window_size": band}
        if q.shape[2] != k.shape[2]:
            if dispatch.varlen_shares_heads():
                options["enable_gqa"] = True
            else:
                shared = q.shape[2] // k.shape[2]
                flat_k, flat_v = (x.repeat_interleave(shared, dim=1) for x in (flat_k, flat_v))
        o = varlen_attn(flat_q, flat_k, flat_v, offsets, offsets, length, length, **options)
    return cast(Tensor, o).view(*q.shape[:-1], v.shape[-1])


def sdpa(q: Tensor, k: Tensor, v: Tensor, *, scale: float, mask: Tensor | None = None, causal: bool = False) -> Tensor:
    """PyTorch's SDPA in our layout (B, L, H, D); mask (B|1, 1, Lq, Lk) bool, True where visible."""
    gqa = q.shape[2] != k.shape[2]
    q, k, v = (x.transpose(1, 2) for x in (q, k, v))
    o = F.scaled_dot_product_attention(q, k, v, attn_mask=mask, is_causal=causal, scale=scale, enable_gqa=gqa)
    return o.transpose(1, 2)


def _causal(q: Tensor, k: Tensor, v: Tensor, scale: float) -> Tensor:
    if outline.planned() == "cuda":
        return outline.attention(q, k, v)
    if not q.is_cuda:
        return sdpa(q, k, v, scale=scale, causal=True)
    if dispatch.attention_backend("causal_attention", q) == "flash_attn":
        from flash_attn import flash_attn_func

        return flash_attn_func(q, k, v, softmax_scale=scale, causal=True)
    with sdpa_kernel(_PREFERENCE, set_priority=True):
        return sdpa(q, k, v, scale=scale, causal=True)


def _by_document(q: Tensor, k: Tensor, v: Tensor, doc_ids: Tensor, scale: float) -> Tensor:
    """One causal call per document: exact, no masks, and nothing computed across documents."""
    changes = document_changes(doc_ids)
    if not changes.any():
        return _causal(q, k, v, scale)
    rows = []
    for row, row_changes in enumerate(changes):
        cuts = [0, *row_changes.nonzero().squeeze(-1).tolist(), q.shape[1]]
        spans = [slice(start, end) for start, end in zip(cuts, cuts[1:])]
        pieces = [_causal(q[row : row + 1, x], k[row : row + 1, x], v[row : row + 1, x], scale) for x in spans]
        rows.append(torch.cat(pieces, dim=1))
    return torch.cat(rows, dim=0)
