"""Sliding-window softmax attention at O(L·w) cost and memory: token t sees {t-w+1, ..., t}."""

from __future__ import annotations

import math

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.autograd.function import once_differentiable

from lt2.ops import dispatch, outline
from lt2.ops.attention import causal_attention, packed_attention, sdpa
from lt2.ops.documents import document_starts, packed_documents, whole_rows


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
    layout = whole_rows(q.shape[0], q.shape[1], q.device) if doc_ids is None else packed_documents(doc_ids)
    return packed_attention(q, k, v, layout, scale=scale, window=window)


def _banded(q: Tensor, k: Tensor, v: Tensor, window: int, doc_ids: Tensor | None, scale: float) -> Tensor:
    """A head of about one window by causal attention; from there on queries in blocks of C, each of which sees itself
    and the `before` previous blocks, as one batched masked SDPA."""
    batch, length = q.shape[:2]
    block = _block_length(window)
    before = -(-(window - 1) // block)
    head = min(before * block, length)
    count = -(-(length - head) // block)
    padding = (0, 0, 0, 0, 0, head + count * block - length)
    starts = None if doc_ids is None else document_starts(doc_ids)
    q_head, q_rest = q.split([head, length - head], dim=1)
    outputs = []
    if head:
        plain = starts is None and head <= window
        token = torch.arange(head, device=q.device)
        mask = None if plain else _visible(token[:, None], token, window, starts).view(-1, 1, head, head)
        outputs.append(sdpa(q_head, k[:, :head], v[:, :head], scale=scale, mask=mask, causal=plain))
    if count:
        queries = F.pad(q_rest, padding).view(batch * count, block, *q.shape[2:])
        keys, values = (_Overlapping.apply(F.pad(x, padding), count, block).flatten(0, 1) for x in (k, v))
        mask = _band_mask(starts, window, block, before, count, q.device)
        o = sdpa(queries, keys, values, scale=scale, mask=mask)
        outputs.append(o.reshape(batch, count * block, *o.shape[2:])[:, : length - head])
    return torch.cat(outputs, dim=1)


class _Overlapping(torch.autograd.Function):
    """The spans that blocks of queries see: (B, (count + before)·block, …) -> (B, count, (before + 1)·block, …).

    A view, where shifted copies would hold every token before + 1 times. `unfold` is the same view, but its backward
    is a slow scatter.
    """

    @staticmethod
    def forward(ctx, x, count, block):
        ctx.count, ctx.block = count, block
        span = x.shape[1] - (count - 1) * block
        row, token = x.stride()[:2]
        size = (x.shape[0], count, span, *x.shape[2:])
        return x.as_strided(size, (row, block * token, token, *x.stride()[2:]), x.storage_offset())

    @staticmethod
    @once_differentiable
    def backward(ctx, grad):
        batch, count, span = grad.shape[:3]
        block = ctx.block
        total = grad.new_zeros(batch, (count - 1) * block + span, *grad.shape[3:])
        blocks = total.view(batch, -1, block, *grad.shape[3:])
        for i in range(span // block):
            blocks[:, i : i + count] += grad[:, :, i * block : (i + 1) * block]
        return total, None, None


def _block_length(window: int) -> int:
    """A quarter of the window, in whole 16s: smaller blocks copy more keys, larger ones score more masked pairs."""
    return max(16, window // 4 // 16 * 16)


def _band_mask(starts: Tensor | None, window: int, block: int, before: int, count: int, device: torch.device) -> Tensor:
    """(B·count, 1, block, keys) bool, or one of all blocks, (1, 1, block, keys), where there are no documents."""
    span = (before + 1) * block
    offset = torch.arange(span, device=device)
    if starts is None:
        return _visible(offset[before * block :, None], offset, window)[None, None]
    key = torch.arange(count, device=device)[:, None] * block + offset  # (count, keys)
    padded = F.pad(starts, (0, (before + count) * block - starts.shape[1]))
    return _visible(key[:, before * block :, None], key[:, None], window, padded).flatten(0, 1).unsqueeze(1)


def _visible(query: Tensor, key: Tensor, window: int, starts: Tensor | None = None) -> Tensor:
    """Where a query's and a key's position (broadcast against each other) are in one window, bool; with `starts`
    (B, L), the first position of each token's document, also in one document, with a batch dimension in front."""
    first = query - window + 1
    if starts is not None:
        first = torch.maximum(first, starts[:, query])
    return (key >= first) & (key <= query)
