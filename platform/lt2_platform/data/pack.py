"""Documents to fixed-length rows: pure functions on arrays, the same whatever ran where.

A *marked* stream is a flat uint32 array of token ids whose top bit is set on the first token of every document, so a
stream can be cut anywhere and still say where its documents start. The next bit marks tokens that are not learned.
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterator, Sequence

import numpy as np

START = np.uint32(1 << 31)
IGNORED = np.uint32(1 << 30)
TOKEN = np.uint32((1 << 30) - 1)
PADDING = -1  # doc_ids value of positions that hold no token
HASH_SPACE = 1 << 64


def frame(ids: np.ndarray, bos_id: int | None, eos_id: int) -> np.ndarray:
    """`bos ids eos` uint32, without `bos` where that is None; where `ids` has tokens that are IGNORED, bos is too, and
    eos as the last of them."""
    before = 0 if bos_id is None else 1
    framed = np.empty(before + len(ids) + 1, dtype=np.uint32)
    framed[before:-1] = ids
    framed[:before], framed[-1] = bos_id or 0, eos_id
    if len(ids) and ids.max() >= IGNORED:
        framed[:before] |= IGNORED
        framed[-1] |= ids[-1] & IGNORED
    return framed


def split_framed(document: np.ndarray, limit: int | None, bos_id: int | None) -> list[np.ndarray]:
    """A framed document in pieces of at most `limit` tokens, each beginning with bos; only the last ends with eos."""
    if limit is None or len(document) <= limit:
        return [document]
    head = document[: 0 if bos_id is None else 1]
    body, size = document[len(head) :], limit - len(head)
    return [np.concatenate([head, body[at : at + size]]) for at in range(0, len(body), size)]


def join_framed(documents: Sequence[np.ndarray]) -> np.ndarray:
    """Marked stream (n_tokens,) uint32 of documents that have their bos and eos."""
    if not documents:
        return np.empty(0, dtype=np.uint32)
    stream = np.concatenate(documents)
    lengths = np.array([len(document) for document in documents], dtype=np.int64)
    stream[np.cumsum(lengths) - lengths] |= START
    return stream


def pack(stream: np.ndarray, width: int, pad_id: int) -> tuple[np.ndarray, np.ndarray]:
    """Cut a marked stream into rows: tokens and doc_ids, both (n_rows, width) int32.

    doc_ids counts documents from 0 inside each row (a row that starts mid-document calls that one 0), so
    `cu_seqlens` are the places where it changes. A short last row is filled with `pad_id`, its doc_ids with -1.
    """
    n_rows = -(-len(stream) // width)
    padded = np.full(n_rows * width, pad_id, dtype=np.uint32)
    padded[: len(stream)] = stream
    starts = ((padded & START) != 0).reshape(n_rows, width)
    doc_ids = np.cumsum(starts, axis=1, dtype=np.int32)
    doc_ids -= doc_ids[:, :1]
    tokens = (padded & TOKEN).astype(np.int32).reshape(n_rows, width)
    doc_ids.reshape(-1)[len(stream) :] = PADDING
    return tokens, doc_ids


def learned(stream: np.ndarray, width: int) -> np.ndarray:
    """Which tokens of `pack`'s rows count in the loss, (n_rows, width) bool; padding does not."""
    mask = np.zeros(-(-len(stream) // width) * width, dtype=bool)
    mask[: len(stream)] = (stream & IGNORED) == 0
    return mask.reshape(-1, width)


def spans(counts: Sequence[int], start: int, stop: int) -> Iterator[tuple[int, int, int]]:
    """Where [start, stop) of a concatenation lies: (part, first, last) for each part of `counts[part]` tokens."""
    offset = 0
    for part, count in enumerate(counts):
        first, last = max(start - offset, 0), min(stop - offset, count)
        if first < last:
            yield part, first, last
        offset += count
        if offset >= stop:
            return


def document_hash(content: bytes, seed: int) -> int:
    """64 bits that depend on a document's content and the seed: copies of a document share their fate."""
    key = seed.to_bytes(8, "little", signed=True)
    return int.from_bytes(hashlib.blake2b(content, digest_size=8, key=key).digest(), "little")


def holdout_threshold(fraction: float) -> int:
    """Documents whose hash is below this are held out: on average `fraction` of them."""
    return int(fraction * HASH_SPACE)


def forced_threshold(threshold: int, lowest: int, highest: int) -> int:
    """`threshold`, moved just enough that hashes from `lowest` to `highest` fall on both sides, if they can."""
    if threshold == 0 or lowest == highest:
        return 0  # nothing to hold out, or a single distinct document: training needs it
    if lowest >= threshold:
        return lowest + 1
    if highest < threshold:
        return highest
    return threshold


def entropy(counts: np.ndarray) -> float:
    """Unigram entropy in nats per token of token counts (vocab,)."""
    total = int(counts.sum())
    if total == 0:
        return 0.0
    p = counts[counts > 0] / total
    return float(-(p * np.log(p)).sum())
