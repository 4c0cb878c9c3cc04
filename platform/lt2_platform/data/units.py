"""The two kinds of work that prepare spreads over a cluster: tokenise a unit of input, write a shard of output.

Both are functions of their arguments that write under the dataset's folder, atomically and always the same bytes, so
either can be run again, anywhere, at any time.
"""

from __future__ import annotations

import hashlib
import io
import json
from collections import Counter
from collections.abc import Iterator, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, field
from typing import IO, Any, TypeVar

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq

from lt2.config import ConfigError
from lt2_platform.data import overlap
from lt2_platform.data.overlap import Overlap
from lt2_platform.data.pack import IGNORED, document_hash, frame, join_framed, learned, pack, split_framed
from lt2_platform.data.sources.configs import FileSource
from lt2_platform.data.sources.documents import Document, Fault, Piece, text_of
from lt2_platform.data.sources.listing import Slice, SourceFile, plan_units
from lt2_platform.data.sources.readers import LEFT_OUT, read_rows, rows_before
from lt2_platform.data.tokenizers.tokenize import Tokenizer, load_tokenizer
from lt2_platform.storage import Storage

SPLITS = ("train", "validation")
ROW_GROUP = 64  # sequences read together; stream.py shuffles in the same blocks
BATCH_CHARACTERS = 2**20

_Placed = tuple[SourceFile, Slice, int, Document]
"""A document and where it comes from: file, slice, row within the slice."""


@dataclass(frozen=True)
class Job:
    """What every task of one prepare run needs to know. `staging` is a folder under `out`; `width` is seq_len + 1.

    `masked`: shards get a column that says which tokens are learned. `without`: the file of what documents may not
    overlap (lt2_platform.data.overlap).
    """

    out: str
    staging: str
    tokenizer: str
    sources: tuple[FileSource, ...]
    seed: int
    threshold: int
    width: int
    shard_sequences: int
    max_document_tokens: int | None = None
    masked: bool = False
    without: str | None = None


@dataclass(frozen=True)
class Unit:
    """Slices to tokenise in order, stopping after `limit` documents if it is not None."""

    index: int
    parts: tuple[tuple[SourceFile, Slice], ...]
    limit: int | None = None


@dataclass(frozen=True)
class Shard:
    """`sequences` rows from `first`, made of tokens [start, stop) of the staged streams of some units."""

    split: str
    index: int
    first: int
    sequences: int
    spans: tuple[tuple[int, int, int], ...]


@dataclass
class _Tally:
    """Counts of one unit; becomes its record."""

    tokens: Counter[str] = field(default_factory=Counter)
    documents: Counter[str] = field(default_factory=Counter)
    reasons: Counter[str] = field(default_factory=Counter)
    documents_split: int = 0
    parts: list[dict[str, int]] = field(default_factory=list)
    first_fault: dict[str, Any] | None = None
    lowest: int | None = None
    highest: int | None = None


def plan(
    files: Sequence[SourceFile],
    parts: Sequence[FileSource],
    limit: int | None,
    bad: Sequence[str] = (),
    without: Overlap | None = None,
) -> list[Unit]:
    """The units of all files, as far as they hold the first `limit` documents. Raises as `plan_units` does."""
    planned = plan_units(files, parts, bad=bad)
    work = [Unit(index, tuple((files[part.file], part) for part in unit)) for index, unit in enumerate(planned)]
    if limit is None:
        return work
    kept, remaining = [], limit
    for unit in work:
        if not remaining:
            break
        kept.append(Unit(unit.index, unit.parts, remaining))
        remaining -= _count_documents(kept[-1], parts, without)
    return kept


def _count_documents(unit: Unit, parts: Sequence[FileSource], without: Overlap | None) -> int:
    """Usable documents of a unit, counted up to its limit by reading only."""
    found = 0
    for file, part in unit.parts:
        for row in read_rows(file, part, parts[file.source], without):
            found += row.text is not None and not isinstance(row.text, Fault)
            if found == unit.limit:
                return found
    return found


def staged(job: Job, unit: int, kind: str) -> str:
    """Where a unit's staged output of some kind ("train", "validation", "quarantine", "record") lives."""
    return f"{job.staging}/{kind}/{unit:06d}"


def tokenize_unit(unit: Unit, job: Job) -> dict[str, Any]:
    """Stage a unit's marked token streams and bad rows; returns its record, or {"error": message} for bad input.

    A unit whose record is already there is not done again.
    """
    storage = Storage(job.out)
    record_path = staged(job, unit.index, "record")
    if storage.exists(record_path):
        return storage.read_json(record_path)
    try:
        with ExitStack() as stack:
            outputs = {kind: stack.enter_context(storage.writer(staged(job, unit.index, kind))) for kind in SPLITS}
            bad = stack.enter_context(storage.writer(staged(job, unit.index, "quarantine")))
            tally = _tokenize(unit, job, outputs, bad)
    except ConfigError as error:  # raised here, it would reach the driver wrapped in Ray's own exception
        return {"error": str(error)}
    record = {"unit": unit.index, **vars(tally)}
    storage.write_json(record_path, record)
    return record


def _tokenize(unit: Unit, job: Job, outputs: dict[str, IO[bytes]], bad: IO[bytes]) -> _Tally:
    tokenizer = load_tokenizer(job.tokenizer)
    tally = _Tally()
    for batch in in_batches(_documents(unit, job, tally, bad), BATCH_CHARACTERS):
        documents = [document for _, _, _, document in batch]
        source = job.sources[batch[0][0].source]
        made = framed_pieces(documents, tokenizer, source, masked=job.masked, limit=job.max_document_tokens)
        sides: dict[str, list[np.ndarray]] = {split: [] for split in SPLITS}
        for (file, part, row, document), pieces in zip(batch, made, strict=True):
            _refuse_if_too_long(len(pieces[0]), job, file, part, row)
            tally.documents_split += len(pieces) > 1
            value = document_hash(text_of(document).encode(), job.seed)
            tally.lowest = value if tally.lowest is None else min(tally.lowest, value)
            tally.highest = value if tally.highest is None else max(tally.highest, value)
            sides["validation" if value < job.threshold else "train"] += pieces
        for split, documents in sides.items():
            stream = join_framed(documents)
            outputs[split].write(stream.tobytes())
            tally.tokens[split] += len(stream)
            tally.documents[split] += len(documents)
    return tally


def framed_pieces(
    documents: list[Document], tokenizer: Tokenizer, source: FileSource, *, masked: bool, limit: int | None
) -> list[list[np.ndarray]]:
    """What becomes of each document: framed pieces of at most `limit` tokens.

    Raises ConfigError for parts that are not to be learned where no loss_mask (`masked`) would say so: all would be.
    """
    pieces = () if masked else (piece for one in documents if not isinstance(one, str) for piece in one)
    if not all(piece.learned for piece in pieces):
        raise ConfigError(
            f"source type {source.type!r} gives pieces that are not learned, but its masks_loss is false; make it true"
        )
    bos, eos = tokenizer.bos_id, tokenizer.eos_id
    return [split_framed(frame(ids, bos, eos), limit, bos) for ids in encode_documents(tokenizer, documents)]


def encode_documents(tokenizer: Tokenizer, documents: list[Document]) -> list[np.ndarray]:
    """Token ids of each document, uint32, without BOS and EOS; those that are not learned have the IGNORED bit."""
    pieces = [(Piece(one),) if isinstance(one, str) else one for one in documents]
    specials = [[tokenizer.special_id(piece.text) if piece.special else None for piece in one] for one in pieces]
    ordinary = [piece.text for one, ids in zip(pieces, specials) for piece, id_ in zip(one, ids) if id_ is None]
    encoded = iter(tokenizer.encode_batch(ordinary))
    found = []
    for one, ids in zip(pieces, specials, strict=True):
        arrays = [next(encoded) if id_ is None else np.array([id_], dtype=np.uint32) for id_ in ids]
        arrays = [array if piece.learned else array | IGNORED for piece, array in zip(one, arrays, strict=True)]
        found.append(arrays[0] if len(arrays) == 1 else np.concatenate(arrays))
    return found


def _documents(unit: Unit, job: Job, tally: _Tally, bad: IO[bytes]) -> Iterator[_Placed]:
    remaining = unit.limit
    without = None if job.without is None else overlap.read(job.without)
    for index, (file, part) in enumerate(unit.parts):
        counts = {"rows": 0, "documents": 0, "left_out": 0}
        tally.parts.append(counts)
        for row, text in read_rows(file, part, job.sources[file.source], without):
            if remaining == 0:
                return
            counts["rows"] = row + 1
            if text is None:
                continue
            if text is LEFT_OUT:
                counts["left_out"] += 1
                continue
            if isinstance(text, Fault):
                fault = {"source": file.name, "part": index, "row": row, "reason": text.reason, "sample": text.sample}
                bad.write(json.dumps(fault, ensure_ascii=False).encode() + b"\n")
                tally.reasons[text.reason] += 1
                tally.first_fault = tally.first_fault or fault
                continue
            counts["documents"] += 1
            remaining = None if remaining is None else remaining - 1
            yield file, part, row, text


Placed = TypeVar("Placed", bound=tuple[Any, ...])


def in_batches(documents: Iterator[Placed], characters: int) -> Iterator[list[Placed]]:
    """Lists of what ends in a document, each of `characters` or a little more; the last is what is left."""
    batch: list[Placed] = []
    size = 0
    for placed in documents:
        batch.append(placed)
        size += len(text_of(placed[-1]))
        if size >= characters:
            yield batch
            batch, size = [], 0
    if batch:
        yield batch


def _refuse_if_too_long(length: int, job: Job, file: SourceFile, part: Slice, row: int) -> None:
    capacity = job.shard_sequences * job.width
    if length <= capacity:
        return
    where = f"{file.name} row {rows_before(file, part) + row}"
    needed = -(-length // job.width)
    raise ConfigError(
        f"document {where} has {length:,} tokens, more than a shard holds ({job.shard_sequences:,} sequences of "
        f"{job.width:,}); set prepare.max_document_tokens to split such, or prepare.shard_sequences to {needed:,} or "
        "more"
    )


def write_shard(shard: Shard, job: Job) -> tuple[dict[str, Any], np.ndarray]:
    """Write one parquet shard; returns its manifest record and its token counts (vocab_size,) int64."""
    tokenizer = load_tokenizer(job.tokenizer)
    storage = Storage(job.out)
    stream = np.concatenate([_staged_tokens(storage, job, shard.split, *span) for span in shard.spans])
    tokens, doc_ids = pack(stream, job.width, tokenizer.pad_id)
    columns = {"tokens": tokens, "doc_ids": doc_ids}
    if job.masked:
        columns["loss_mask"] = learned(stream, job.width)
    content = _parquet(np.arange(shard.first, shard.first + len(tokens)), columns)
    path = f"{shard.split}/part-{shard.index:05d}.parquet"
    storage.write_bytes(path, content)
    counts = np.bincount(tokens[doc_ids >= 0], minlength=tokenizer.vocab_size)
    return {"path": path, "sequences": len(tokens), "sha256": hashlib.sha256(content).hexdigest()}, counts


def _staged_tokens(storage: Storage, job: Job, split: str, unit: int, first: int, last: int) -> np.ndarray:
    fs, path = storage.arrow_fs(staged(job, unit, split))
    with fs.open_input_file(path) as file:
        return np.frombuffer(file.read_at((last - first) * 4, first * 4), dtype=np.uint32)


def _parquet(sequence_ids: np.ndarray, columns: dict[str, np.ndarray]) -> bytes:
    table = pa.table(
        {"sequence_id": pa.array(sequence_ids, pa.int64())}
        | {
            name: pa.FixedSizeListArray.from_arrays(pa.array(values.reshape(-1)), values.shape[1])
            for name, values in columns.items()
        }
    )
    buffer = io.BytesIO()
    pq.write_table(
        table,
        buffer,
        row_group_size=ROW_GROUP,
        compression="zstd",
        compression_level=1,
        # doc_ids are a few small integers. Token ids would overflow a dictionary; their high bytes compress well apart
        # from the low ones: a quarter smaller and written twice as fast as plain. (pyarrow's stub knows only bool.)
        use_dictionary=["doc_ids.list.element"],  # pyright: ignore[reportArgumentType]
        column_encoding={"tokens.list.element": "BYTE_STREAM_SPLIT"},
        write_statistics=False,
        write_page_checksum=True,
    )
    return buffer.getvalue()
