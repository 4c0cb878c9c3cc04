"""The two kinds of work that prepare spreads over a cluster: tokenise a unit of input, write a shard of output.

Both are functions of their arguments that write under the dataset's folder, atomically and always the same bytes, so
either can be run again, anywhere, at any time.
"""

from __future__ import annotations

import hashlib
import io
import json
from collections import Counter
from collections.abc import Iterator
from contextlib import ExitStack
from dataclasses import dataclass, field
from typing import IO, Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq

from lt2.config import ConfigError
from lt2_platform.data.pack import document_hash, join_documents, pack
from lt2_platform.data.readers import Fault, read_rows, rows_before
from lt2_platform.data.sources import Slice, SourceFile
from lt2_platform.data.tokenize import Tokenizer, load_tokenizer
from lt2_platform.storage import Storage

SPLITS = ("train", "validation")
ROW_GROUP = 64  # sequences read together; stream.py shuffles in the same blocks
BATCH_CHARACTERS = 2**20


@dataclass(frozen=True)
class Job:
    """What every task of one prepare run needs to know. `staging` is a folder under `out`; `width` is seq_len + 1."""

    out: str
    staging: str
    tokenizer: str
    text_column: str
    seed: int
    threshold: int
    width: int
    shard_sequences: int


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
    parts: list[dict[str, int]] = field(default_factory=list)
    first_fault: dict[str, Any] | None = None
    lowest: int | None = None
    highest: int | None = None


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
    for batch in _batches(_documents(unit, job, tally, bad)):
        encoded = tokenizer.encode_batch([text for _, _, _, text in batch])
        sides: dict[str, list[np.ndarray]] = {split: [] for split in SPLITS}
        for (file, part, row, text), ids in zip(batch, encoded, strict=True):
            _refuse_if_too_long(len(ids), tokenizer, job, file, part, row)
            value = document_hash(text.encode(), job.seed)
            tally.lowest = value if tally.lowest is None else min(tally.lowest, value)
            tally.highest = value if tally.highest is None else max(tally.highest, value)
            sides["validation" if value < job.threshold else "train"].append(ids)
        for split, documents in sides.items():
            stream = join_documents(documents, tokenizer.bos_id, tokenizer.eos_id)
            outputs[split].write(stream.tobytes())
            tally.tokens[split] += len(stream)
            tally.documents[split] += len(documents)
    return tally


def _documents(unit: Unit, job: Job, tally: _Tally, bad: IO[bytes]) -> Iterator[tuple[SourceFile, Slice, int, str]]:
    remaining = unit.limit
    for index, (file, part) in enumerate(unit.parts):
        counts = {"rows": 0, "documents": 0}
        tally.parts.append(counts)
        for row, text in read_rows(file, part, job.text_column):
            if remaining == 0:
                return
            counts["rows"] = row + 1
            if text is None:
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


def _batches(documents: Iterator[tuple[SourceFile, Slice, int, str]]) -> Iterator[list]:
    batch, size = [], 0
    for document in documents:
        batch.append(document)
        size += len(document[3])
        if size >= BATCH_CHARACTERS:
            yield batch
            batch, size = [], 0
    if batch:
        yield batch


def _refuse_if_too_long(length: int, tokenizer: Tokenizer, job: Job, file: SourceFile, part: Slice, row: int) -> None:
    length += 1 if tokenizer.bos_id is None else 2
    capacity = job.shard_sequences * job.width
    if length <= capacity:
        return
    where = f"{file.name} row {rows_before(file, part) + row}"
    needed = -(-length // job.width)
    raise ConfigError(
        f"document {where} has {length:,} tokens, more than a shard holds ({job.shard_sequences:,} sequences of "
        f"{job.width:,}); set prepare.shard_sequences to {needed:,} or more"
    )


def write_shard(shard: Shard, job: Job) -> tuple[dict[str, Any], np.ndarray]:
    """Write one parquet shard; returns its manifest record and its token counts (vocab_size,) int64."""
    tokenizer = load_tokenizer(job.tokenizer)
    storage = Storage(job.out)
    stream = np.concatenate([_staged_tokens(storage, job, shard.split, *span) for span in shard.spans])
    tokens, doc_ids = pack(stream, job.width, tokenizer.pad_id)
    content = _parquet(np.arange(shard.first, shard.first + len(tokens)), tokens, doc_ids)
    path = f"{shard.split}/part-{shard.index:05d}.parquet"
    storage.write_bytes(path, content)
    counts = np.bincount(tokens[doc_ids >= 0], minlength=tokenizer.vocab_size)
    return {"path": path, "sequences": len(tokens), "sha256": hashlib.sha256(content).hexdigest()}, counts


def _staged_tokens(storage: Storage, job: Job, split: str, unit: int, first: int, last: int) -> np.ndarray:
    fs, path = storage.arrow_fs(staged(job, unit, split))
    with fs.open_input_file(path) as file:
        return np.frombuffer(file.read_at((last - first) * 4, first * 4), dtype=np.uint32)


def _parquet(sequence_ids: np.ndarray, tokens: np.ndarray, doc_ids: np.ndarray) -> bytes:
    width = tokens.shape[1]
    rows = [pa.FixedSizeListArray.from_arrays(pa.array(values.reshape(-1)), width) for values in (tokens, doc_ids)]
    table = pa.table({"sequence_id": pa.array(sequence_ids, pa.int64()), "tokens": rows[0], "doc_ids": rows[1]})
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
