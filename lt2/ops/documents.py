"""Packed documents: where each begins inside its row, and the flattened layout that variable-length kernels want.

A document is a maximal run of equal ids in `doc_ids` (B, L): a new one begins wherever the id changes.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor
from torch.utils.weak import WeakTensorKeyDictionary


@dataclass(frozen=True)
class PackedLayout:
    """Rows of a batch flattened to one sequence of B·L tokens and cut at every row and document start.

    cu_seqlens: (N+1,) int32 offsets of the N pieces; first, last: (B,) index of each row's first and last piece.
    """

    cu_seqlens: Tensor
    first: Tensor
    last: Tensor


# Every layer of every loop asks for the layout of the same mask, and finding it synchronises with the device.
_layouts: WeakTensorKeyDictionary = WeakTensorKeyDictionary()


def document_changes(doc_ids: Tensor) -> Tensor:
    """(B, L) bool, True on the first token of every document except the row's first."""
    changes = torch.zeros_like(doc_ids, dtype=torch.bool)
    changes[:, 1:] = doc_ids[:, 1:] != doc_ids[:, :-1]
    return changes


def document_starts(doc_ids: Tensor) -> Tensor:
    """(B, L) int64, the position in its row of the first token of each token's document."""
    position = torch.arange(doc_ids.shape[1], device=doc_ids.device).expand_as(doc_ids)
    return torch.where(document_changes(doc_ids), position, 0).cummax(dim=1).values


def whole_rows(batch: int, length: int, device: torch.device) -> PackedLayout:
    """Layout of rows that are one piece each; unlike `packed_layout` of no starts, it asks the device nothing."""
    rows = torch.arange(batch + 1, device=device)
    return PackedLayout((rows * length).to(torch.int32), rows[:-1], rows[:-1])


def packed_layout(starts: Tensor) -> PackedLayout:
    """Layout for `starts` (B, L) bool, True where a piece begins (row starts are implied).

    Remembered per tensor object: pass the same mask, unmodified, to all layers.
    """
    layout = _layouts.get(starts)
    if layout is None:
        layout = _layouts[starts] = _packed_layout(starts)
    return layout


def packed_documents(doc_ids: Tensor) -> PackedLayout:
    """Layout for `doc_ids` (B, L), remembered per tensor object like `packed_layout`."""
    layout = _layouts.get(doc_ids)
    if layout is None:
        layout = _layouts[doc_ids] = _packed_layout(document_changes(doc_ids))
    return layout


def _packed_layout(starts: Tensor) -> PackedLayout:
    batch, length = starts.shape
    starts = starts.clone()
    starts[:, 0] = True
    offsets = starts.flatten().nonzero().squeeze(-1)
    end = offsets.new_full((1,), batch * length)
    last = starts.sum(dim=1).cumsum(dim=0) - 1
    first = torch.cat([last.new_zeros(1), last[:-1] + 1])
    return PackedLayout(torch.cat([offsets, end]).to(torch.int32), first, last)
