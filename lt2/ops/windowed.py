"""Sliding-window softmax attention at O(L·w) cost and memory: token t sees {t-w+1, ..., t}."""

from __future__ import annotations

import math

import torch
import torch.nn.functional as F
from torch import Tensor

from lt2.ops import dispatch, outline
from lt2.ops.attention import causal_attention, packed_attention, sdpa
from lt2.ops.documents import document_starts, packed_documents, packed_layout


def windowed_attention(
    q: Tensor, k: Tensor, v: Tensor, *, window: int, doc_ids: Tensor | None = None, scale: float | None = None
) -> Tensor:
    """q (B, L, Hq, D); k, v (B, L, Hkv, D), Hq a multiple of Hkv; returns (B, L, Hq, D).

    window >= 1, the token itself included; doc_ids: (B, L), tokens see only their own document; scale: D^-0.5 by
    default. Raises ValueError for window < 1.
    """
    if window < 1:
        raise ValueError(f"window must be >= 1 (it includes the token itself), got {window}")
    scale = 1 / math.sqrt(q.shape[-1]) if scale is None else scale
    if window >= q.shape[1]:
        return causal_attention(q, k, v, doc_ids=doc_ids, scale=scale)
    backend = dispatch.attention_backend("windowed_attention", q)
    if backend == "outline":
        return outline.attention(q, k, v)
    if backend == "torch":
        return _banded(q, k, v, window, doc_ids, scale)
    layout = packed_layout(_no_cuts(q)) if doc_ids is None else packed_documents(doc_ids)
    return packed_attention(q, k, v, layout, scale=scale, window=window)


def _no_cuts(q: Tensor) -> Tensor:
    return torch.zeros(q.shape[:2], dtype=torch.bool, device=q.device)


def _banded(q: Tensor, k: Tensor, v: Tensor, window: int, doc_ids: Tensor | None, scale: float) -> Tensor:
    """Queries in blocks of C; each block sees itself and the `before` previous blocks, as one batched masked SDPA."""
    batch, length = q.shape[:2]
    block = _block_length(window)
    before = -(-(window - 1) // block)
    count = -(-length // block)

    def blocks(x: Tensor) -> Tensor:
        x = F.pad(x, (0, 0, 0, 0, 0, count * block - length))
        return x.view(batch, count, block, *x.shape[2:])

    def with_previous(x: Tensor) -> Tensor:
        # Shifted copies rather than `unfold`, whose backward is a slow scatter.
        x = F.pad(blocks(x), (0, 0, 0, 0, 0, 0, before, 0))
        return torch.cat([x[:, i : i + count] for i in range(before + 1)], dim=2).flatten(0, 1)

    mask = _band_mask(doc_ids, length, window, block, before, count, q.device)
    mask = mask.expand(batch, -1, -1, -1).flatten(0, 1).unsqueeze(1)
    o = sdpa(blocks(q).flatten(0, 1), with_previous(k), with_previous(v), scale=scale, mask=mask)
    return o.reshape(batch, count * block, *o.shape[2:])[:, :length]


def _block_length(window: int) -> int:
    """A quarter of the window, in whole 16s: smaller blocks copy more keys, larger ones score more masked pairs."""
    return max(16, window // 4 // 16 * 16)


def _band_mask(
    doc_ids: Tensor | None, length: int, window: int, block: int, before: int, count: int, device: torch.device
) -> Tensor:
    """(B|1, count, block, keys) bool, True where query and key are in one window and document."""
    query = torch.arange(count * block, device=device).view(1, count, block, 1)
    key = (torch.arange(count, device=device)[:, None] - before) * block + torch.arange(
        (before + 1) * block, device=device
    )
    key = key.view(1, count, 1, -1)
    first = (query - window + 1).clamp_min(0)
    if doc_ids is not None:
        starts = F.pad(document_starts(doc_ids), (0, count * block - length), value=0)
        first = torch.maximum(first, starts.view(-1, count, block, 1))
    return (key >= first) & (key <= query)
