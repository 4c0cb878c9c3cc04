"""Packing against plain loops."""

import math

import numpy as np
import pytest

from lt2_platform.data.pack import (
    PADDING,
    START,
    document_hash,
    entropy,
    forced_threshold,
    frame,
    holdout_threshold,
    join_framed,
    pack,
    spans,
)


def documents(count, seed=0):
    rng = np.random.default_rng(seed)
    return [rng.integers(0, 200, rng.integers(1, 30)).astype(np.uint32) for _ in range(count)]


def joined(ids, bos, eos):
    return join_framed([frame(document, bos, eos) for document in ids])


@pytest.mark.parametrize("bos", [None, 256])
def test_stream_holds_every_document_between_its_specials(bos):
    ids = documents(20)
    stream = joined(ids, bos, 257)
    expected, starts = [], []
    for document in ids:
        starts.append(len(expected))
        expected += ([] if bos is None else [bos]) + document.tolist() + [257]
    assert (stream & ~START).tolist() == expected
    assert np.flatnonzero(stream & START).tolist() == starts
    assert len(joined([], bos, 257)) == 0


@pytest.mark.parametrize("width", [1, 2, 7, 64, 1000])
def test_rows_are_consecutive_windows(width):
    ids = documents(40)
    stream = joined(ids, 256, 257)
    tokens, doc_ids = pack(stream, width, pad_id=258)
    flat = [(token, number) for number, document in enumerate(ids) for token in [256, *document.tolist(), 257]]
    padding = -len(flat) % width
    assert tokens.reshape(-1).tolist() == [token for token, _ in flat] + [258] * padding
    for row in range(len(tokens)):
        inside = [number for _, number in flat[row * width : (row + 1) * width]]
        expected = [number - inside[0] for number in inside]
        assert doc_ids[row].tolist() == expected + [PADDING] * (width - len(inside))
    assert tokens.dtype == doc_ids.dtype == np.int32


def test_any_cut_of_a_stream_packs_to_the_same_rows():
    stream = joined(documents(40), 256, 257)
    tokens, doc_ids = pack(stream, 16, 258)
    for cut in (16, 160, 320):
        halves = [pack(part, 16, 258) for part in (stream[:cut], stream[cut:])]
        assert np.array_equal(np.concatenate([half[0] for half in halves]), tokens)
        assert np.array_equal(np.concatenate([half[1] for half in halves]), doc_ids)


def test_spans_cover_the_range_once():
    counts = [5, 0, 3, 10, 1]
    whole = [(part, place) for part, count in enumerate(counts) for place in range(count)]
    for start in range(20):
        for stop in range(start, 20):
            found = [(part, place) for part, a, b in spans(counts, start, stop) for place in range(a, b)]
            assert found == whole[start:stop]


def test_hash_depends_on_content_and_seed_only():
    assert document_hash(b"text", 1) == document_hash(b"text", 1) == 5795145719362181170  # pinned: it decides splits
    assert len({document_hash(b"text", seed) for seed in (-1, 0, 1)}) == 3
    assert document_hash(b"texu", 1) != document_hash(b"text", 1)


def test_held_out_share():
    threshold = holdout_threshold(0.1)
    held = sum(document_hash(str(i).encode(), 0) < threshold for i in range(20_000))
    assert abs(held / 20_000 - 0.1) < 4 * math.sqrt(0.1 * 0.9 / 20_000)
    assert holdout_threshold(0) == 0


@pytest.mark.parametrize(
    ("threshold", "hashes", "held"),
    [
        (50, [10, 60], [10]),  # chance was fine
        (5, [10, 60, 70], [10]),  # nothing held out: the lowest is
        (100, [10, 60], [10]),  # nothing to train on: the highest stays
        (100, [10], []),  # one document: training needs it
        (5, [60, 60], []),  # copies of one document stay together
        (0, [10, 60], []),  # validation_fraction 0
    ],
)
def test_forced_threshold(threshold, hashes, held):
    forced = forced_threshold(threshold, min(hashes), max(hashes))
    assert [value for value in hashes if value < forced] == held


def test_entropy():
    assert entropy(np.array([1, 1, 1, 1, 0])) == pytest.approx(math.log(4), abs=1e-15)
    assert entropy(np.array([3, 1])) == pytest.approx(0.75 * math.log(4 / 3) + 0.25 * math.log(4), abs=1e-15)
    assert entropy(np.zeros(4)) == 0.0
