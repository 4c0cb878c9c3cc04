from __future__ import annotations

import torch

from lt2.ops.documents import document_changes, document_starts, packed_documents, packed_layout, whole_rows

DOC_IDS = torch.tensor([[4, 4, 7, 7, 7, -1], [0, 0, 0, 0, 0, 0], [3, 2, 2, 1, 1, 1]])


def test_documents_are_runs_of_equal_ids():
    assert document_starts(DOC_IDS).tolist() == [[0, 0, 2, 2, 2, 5], [0] * 6, [0, 1, 1, 3, 3, 3]]
    assert document_changes(DOC_IDS).int().tolist() == [[0, 0, 1, 0, 0, 1], [0] * 6, [0, 1, 0, 1, 0, 0]]


def test_layout_cuts_at_rows_and_documents():
    layout = packed_documents(DOC_IDS)
    assert layout.cu_seqlens.tolist() == [0, 2, 5, 6, 12, 13, 15, 18]
    assert layout.cu_seqlens.dtype == torch.int32
    assert layout.first.tolist() == [0, 3, 4]
    assert layout.last.tolist() == [2, 3, 6]


def test_layout_implies_row_starts_and_is_remembered_by_object():
    starts = torch.zeros(2, 4, dtype=torch.bool)
    starts[1, 2] = True
    layout = packed_layout(starts)
    assert layout.cu_seqlens.tolist() == [0, 4, 6, 8]
    assert not starts[0, 0]
    assert packed_layout(starts) is layout
    assert packed_layout(starts.clone()) is not layout


def test_whole_rows_are_the_layout_without_any_start():
    found, expected = whole_rows(3, 6, torch.device("cpu")), packed_layout(torch.zeros(3, 6, dtype=torch.bool))
    for name in ("cu_seqlens", "first", "last"):
        assert torch.equal(getattr(found, name), getattr(expected, name))
        assert getattr(found, name).dtype == getattr(expected, name).dtype
