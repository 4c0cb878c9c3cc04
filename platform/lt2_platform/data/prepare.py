"""Text in, packed and tokenised shards out: the `prepare` step, on Ray Data.

Two passes over units that depend on the input alone. First every unit of input is tokenised into a staged stream of
marked tokens per split; then, when all lengths are known, every shard is cut out of the concatenation of those streams.
The rows are therefore consecutive windows of the documents in source order, however the work was spread.
"""

from __future__ import annotations

import hashlib
import json
import logging
import os
from collections import Counter
from collections.abc import Iterator, Sequence
from contextlib import suppress
from typing import Any, Literal

import numpy as np
from pydantic import Field

from lt2.config import Config, ConfigError
from lt2_platform.data import sources, units
from lt2_platform.data.pack import entropy, forced_threshold, holdout_threshold, spans
from lt2_platform.data.readers import peek_columns, read_rows
from lt2_platform.data.spread import some_ray, spread
from lt2_platform.data.tokenize import Tokenizer, describe, load_tokenizer
from lt2_platform.data.units import SPLITS, Job, Shard, Unit, staged, tokenize_unit, write_shard
from lt2_platform.storage import Storage, absolute

SCHEMA_VERSION = 1
MANIFEST = "manifest.json"
SHARD_TOKENS = 4 * 2**20
logger = logging.getLogger(__name__)


class PrepareConfig(Config):
    """What to read and how to cut it.

    A text file is one document, or several when it is long: it is cut at a blank line about every 128 KiB.
    `shard_sequences` None means about 4 Mi tokens per shard; `max_documents` keeps the first ones in source order.
    """

    source: str | tuple[str, ...] = sources.STDLIB
    format: Literal["auto", "text", "jsonl", "parquet"] = "auto"
    text_column: str = "text"
    tokenizer: str = "byte"
    seq_len: int = Field(default=1024, ge=1)
    validation_fraction: float = Field(default=0.01, ge=0, lt=1)
    seed: int = Field(default=0, ge=-(2**63), lt=2**63)
    shard_sequences: int | None = Field(default=None, ge=1)
    max_documents: int | None = Field(default=None, ge=1)


def prepare(config: PrepareConfig, out: str, *, parallelism: int | None = None) -> dict[str, Any]:
    """Write the packed dataset of `config` under `out` (a local folder or s3:// URI) and return its manifest.

    `parallelism` caps the tasks that run at once (default: what the cluster has); it never changes a byte of the
    output. Uses the running Ray, or a local one for the duration. Interrupted, the same call goes on where it
    stopped; manifest.json is written last. Raises ConfigError for input or settings that cannot work.
    """
    tokenizer = load_tokenizer(config.tokenizer)
    files = sources.find_files(config.source, config.format)
    _check_first_columns(files, config.text_column)
    work = _units(files, config)
    storage = Storage(out)
    fingerprint = _fingerprint(config, tokenizer, files)
    if storage.exists(MANIFEST):
        return _finished(storage, fingerprint)
    storage.check_writable()
    try:
        with some_ray(parallelism):
            manifest = _build(config, tokenizer, files, work, storage, fingerprint, parallelism)
    except ConfigError:
        _discard(storage)
        raise
    storage.write_json(MANIFEST, manifest)
    storage.delete(".staging")
    return manifest


def _build(
    config: PrepareConfig,
    tokenizer: Tokenizer,
    files: Sequence[sources.SourceFile],
    work: Sequence[Unit],
    storage: Storage,
    fingerprint: str,
    parallelism: int | None,
) -> dict[str, Any]:
    file = _copy_tokenizer(config.tokenizer, storage)
    width = config.seq_len + 1
    shard_sequences = config.shard_sequences or max(units.ROW_GROUP, SHARD_TOKENS // width // 64 * 64)

    def job(threshold: int) -> Job:
        staging = f".staging/{_digest([fingerprint, threshold, sources.UNIT_BYTES, sources.MAX_UNITS])[:16]}"
        tokenizer_at = storage.join(file) if file else config.tokenizer
        return Job(
            storage.root, staging, tokenizer_at, config.text_column, config.seed, threshold, width, shard_sequences
        )

    chosen = job(holdout_threshold(config.validation_fraction))
    records = _tokenize(work, chosen, parallelism)
    _refuse_empty(records, files)
    lowest = min(record["lowest"] for record in records if record["lowest"] is not None)
    highest = max(record["highest"] for record in records if record["highest"] is not None)
    forced = forced_threshold(chosen.threshold, lowest, highest)
    if forced != chosen.threshold:
        # Chance left one side without a document, so the corpus is small: dividing it again is cheap.
        chosen = job(forced)
        records = _tokenize(work, chosen, parallelism)
    for made in (*SPLITS, "quarantine"):
        storage.delete(made)  # what an interrupted run left, half-written temporary files included
    splits = _write_splits(records, chosen, parallelism)
    return {
        "schema_version": SCHEMA_VERSION,
        "fingerprint": fingerprint,
        "tokenizer": {**describe(tokenizer), "file": file},
        "seq_len": config.seq_len,
        "seed": config.seed,
        "config": config.model_dump(mode="json"),
        "sources": _describe_sources(files, work, records),
        "splits": splits,
        "quarantine": _write_quarantine(work, records, storage, chosen),
    }


def _tokenize(work: Sequence[Unit], job: Job, parallelism: int | None) -> list[dict[str, Any]]:
    records, tokens = [], 0
    for record in spread(tokenize_unit, work, job, parallelism):
        if "error" in record:
            raise ConfigError(record["error"])
        records.append(record)
        tokens += sum(record["tokens"].values())
        logger.info("tokenised %d of %d units, %s tokens", len(records), len(work), f"{tokens:,}")
    return sorted(records, key=lambda record: record["unit"])


def _write_splits(records: Sequence[dict[str, Any]], job: Job, parallelism: int | None) -> dict[str, Any]:
    totals = {split: sum(record["tokens"].get(split, 0) for record in records) for split in SPLITS}
    # The end of the training stream that fills no row is dropped; validation keeps it, padded.
    rows = {"train": totals["train"] // job.width, "validation": -(-totals["validation"] // job.width)}
    if not rows["train"]:
        raise ConfigError(
            f"the corpus has {totals['train']:,} training tokens, fewer than one sequence of seq_len + 1 = "
            f"{job.width:,}; lower prepare.seq_len or add text"
        )
    shards = [shard for split in SPLITS for shard in _shards(records, job, split, rows[split], totals[split])]
    files: dict[str, list[dict[str, Any]]] = {split: [] for split in SPLITS}
    counts = {split: np.zeros(1, dtype=np.int64) for split in SPLITS}
    for done, (file, shard_counts) in enumerate(spread(write_shard, shards, job, parallelism), start=1):
        logger.info("wrote %d of %d shards", done, len(shards))
        split = file["path"].split("/")[0]
        files[split].append(file)
        counts[split] = counts[split] + shard_counts
    return {
        split: {
            "files": sorted(files[split], key=lambda file: file["path"]),
            "sequences": rows[split],
            "tokens": min(rows[split] * job.width, totals[split]),
            "dropped_tokens": max(0, totals[split] - rows[split] * job.width),
            "documents": sum(record["documents"].get(split, 0) for record in records),
            "unigram_entropy": entropy(counts[split]),
        }
        for split in SPLITS
    }


def _shards(records: Sequence[dict[str, Any]], job: Job, split: str, rows: int, total: int) -> Iterator[Shard]:
    counts = [record["tokens"].get(split, 0) for record in records]
    for index, first in enumerate(range(0, rows, job.shard_sequences)):
        sequences = min(job.shard_sequences, rows - first)
        start, stop = first * job.width, min((first + sequences) * job.width, total)
        yield Shard(split, index, first, sequences, tuple(spans(counts, start, stop)))


def _write_quarantine(
    work: Sequence[Unit], records: Sequence[dict[str, Any]], storage: Storage, job: Job
) -> dict[str, Any]:
    """quarantine/part-*.jsonl with rows numbered from the start of their file; returns the manifest's summary."""
    seen: Counter[str] = Counter()
    reasons: Counter[str] = Counter()
    parts = 0
    for unit, record in zip(work, records, strict=True):
        first_rows = []
        for (file, _), counts in zip(unit.parts, record["parts"], strict=False):
            first_rows.append(seen[file.path])
            seen[file.path] += counts["rows"]
        if not record["reasons"]:
            continue
        reasons.update(record["reasons"])
        with (
            storage.open(staged(job, unit.index, "quarantine")) as bad,
            storage.writer(f"quarantine/part-{parts:05d}.jsonl") as target,
        ):
            for line in bad:
                fault = json.loads(line)
                fault["row"] += first_rows[fault.pop("part")]
                target.write(json.dumps(fault, ensure_ascii=False).encode() + b"\n")
        parts += 1
    return {"rows": sum(reasons.values()), "reasons": dict(sorted(reasons.items())), "files": parts}


def _describe_sources(
    files: Sequence[sources.SourceFile], work: Sequence[Unit], records: Sequence[dict[str, Any]]
) -> list[dict[str, Any]]:
    documents: Counter[str] = Counter()
    for unit, record in zip(work, records, strict=True):
        for (file, _), counts in zip(unit.parts, record["parts"], strict=False):
            documents[file.path] += counts["documents"]
    return [sources.describe(file, documents[file.path]) for file in files]


def _units(files: Sequence[sources.SourceFile], config: PrepareConfig) -> list[Unit]:
    planned = sources.plan_units(files, config.text_column)
    work = [Unit(index, tuple((files[part.file], part) for part in unit)) for index, unit in enumerate(planned)]
    if config.max_documents is None:
        return work
    kept, remaining = [], config.max_documents
    for unit in work:
        if not remaining:
            break
        kept.append(Unit(unit.index, unit.parts, remaining))
        remaining -= _count_documents(kept[-1], config.text_column)
    return kept


def _count_documents(unit: Unit, text_column: str) -> int:
    """Usable documents of a unit, counted up to its limit by reading only."""
    found = 0
    for file, part in unit.parts:
        for row in read_rows(file, part, text_column):
            found += isinstance(row.text, str)
            if found == unit.limit:
                return found
    return found


def _check_first_columns(files: Sequence[sources.SourceFile], text_column: str) -> None:
    first = next((file for file in files if file.format == "jsonl"), None)
    columns = peek_columns(first) if first else []
    if first and columns and text_column not in columns:
        raise sources.missing_column(first.name, text_column, columns)


def _refuse_empty(records: Sequence[dict[str, Any]], files: Sequence[sources.SourceFile]) -> None:
    if any(sum(record["documents"].values()) for record in records):
        return
    reasons = sum((Counter(record["reasons"]) for record in records), Counter())
    described = files[0].name if len(files) == 1 else f"{files[0].name} and {len(files) - 1} more"
    if not reasons:
        raise ConfigError(f"the corpus is empty: no document in {described}; give a source with text")
    fault = next(record["first_fault"] for record in records if record["first_fault"])
    listed = ", ".join(f"{reason}: {count:,}" for reason, count in sorted(reasons.items()))
    raise ConfigError(
        f"no usable row in {described} ({listed}), the first being row {fault['row']} of {fault['source']}; "
        "check prepare.format and prepare.text_column"
    )


def _fingerprint(config: PrepareConfig, tokenizer: Tokenizer, files: Sequence[sources.SourceFile]) -> str:
    """Names everything the output depends on, and nothing else."""
    settings = config.model_dump(mode="json", exclude={"source", "tokenizer"})
    versions = [[file.name, file.format, file.compression, file.bytes, file.version] for file in files]
    return _digest([SCHEMA_VERSION, sources.PIECE_BYTES, settings, tokenizer.sha256, versions])


def _digest(value: Any) -> str:
    return hashlib.sha256(json.dumps(value, sort_keys=True).encode()).hexdigest()


def _finished(storage: Storage, fingerprint: str) -> dict[str, Any]:
    manifest = storage.read_json(MANIFEST)
    if manifest.get("fingerprint") == fingerprint:
        storage.delete(".staging")
        return manifest
    raise ConfigError(f"{storage.root} holds a dataset of other input or settings; choose another folder or delete it")


def _copy_tokenizer(spec: str, storage: Storage) -> str | None:
    """Keep the tokenizer's files in the dataset, where every worker and every later step can read them."""
    if spec == "byte":
        return None
    location = absolute(spec)
    folder, name = location.rsplit("/", 1)
    origin = Storage(folder)
    for each in (name, "tokenizer_config.json"):
        if each == name or origin.exists(each):
            storage.write_bytes(f"tokenizer/{each}", origin.read_bytes(each))
    return f"tokenizer/{name}"


def _discard(storage: Storage) -> None:
    for made in (".staging", "tokenizer", *SPLITS, "quarantine"):
        storage.delete(made)
    with suppress(OSError):  # only an empty local folder goes; on S3 there are no folders
        os.rmdir(storage.root)
