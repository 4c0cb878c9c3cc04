"""Text in, packed and tokenised shards out: the `prepare` step, on Ray Data.

Two passes over units that depend on the input alone. First every unit of input is tokenised into a staged stream of
marked tokens per split; then, when all lengths are known, every shard is cut out of the concatenation of those streams.
The rows are therefore consecutive windows of the documents in source order, however the work was spread.
"""

from __future__ import annotations

import logging
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Literal

from pydantic import Field, model_validator

from lt2.config import Config, ConfigError
from lt2_platform.data import folder, mixture, units
from lt2_platform.data.cut import write_splits
from lt2_platform.data.live import on_the_fly
from lt2_platform.data.manifest import MANIFEST, SCHEMA_VERSION, describe_sources, refuse_empty, write_quarantine
from lt2_platform.data.overlap import Decontaminate, Overlap, with_pack
from lt2_platform.data.pack import HASH_SPACE, forced_threshold, holdout_threshold
from lt2_platform.data.sources import listing as sources
from lt2_platform.data.sources.configs import (
    STDLIB,
    AnySource,
    FileSource,
    MixtureConfig,
    OpenThoughtsConfig,
    SourceConfig,
    identity,
    parts_of,
)
from lt2_platform.data.sources.readers import bad_beginnings
from lt2_platform.data.spread import some_ray, spread
from lt2_platform.data.tokenizers.tokenize import Tokenizer, describe, load_tokenizer, tokenizer_files
from lt2_platform.data.units import SPLITS, Job, Unit, tokenize_unit
from lt2_platform.json_values import sha256_of
from lt2_platform.storage import Storage

SHARD_TOKENS = 4 * 2**20
logger = logging.getLogger(__name__)


class PrepareConfig(Config):
    """What to read and how to cut it.

    `source` is a path, several, or a source config (lt2_platform.data.sources.configs); `format` and `text_column` are
    for bare paths. A text file is one document, or several when it is long: it is cut at a blank line about every 128
    KiB. `shard_sequences` None means about 4 Mi tokens per shard; `max_documents` keeps the first ones in source order.
    Documents of more than `max_document_tokens`, BOS and EOS included, are split into several, each with a BOS; only
    the last ends with the EOS.

    tokenize "on_the_fly", for corpora too big to prepare: only a validation split is packed, of documents of held-out
    units, and training tokenises the rest itself (lt2_platform.data.live.lanes), from the files as they are listed now.

    decontaminate: leave out, as bad rows, documents that share a run of words with the items of an evaluation pack.
    """

    source: AnySource = STDLIB
    format: Literal["auto", "text", "jsonl", "parquet"] = "auto"
    text_column: str = "text"
    tokenizer: str = "byte"
    seq_len: int = Field(default=1024, ge=1)
    validation_fraction: float = Field(default=0.01, ge=0, lt=1)
    seed: int = Field(default=0, ge=-(2**63), lt=2**63)
    shard_sequences: int | None = Field(default=None, ge=1)
    max_documents: int | None = Field(default=None, ge=1)
    max_document_tokens: int | None = Field(default=None, ge=3)
    tokenize: Literal["ahead", "on_the_fly"] = "ahead"
    decontaminate: Decontaminate | None = None

    @model_validator(mode="after")
    def _check_source(self) -> PrepareConfig:
        if isinstance(self.source, SourceConfig) and not isinstance(self.source, MixtureConfig):
            for name in ("format", "text_column"):
                if getattr(self, name) != type(self).model_fields[name].default:
                    raise ValueError(f"{name} is for a source that is a path; set it inside source, or drop it")
        if self.tokenize == "on_the_fly" and self.max_documents is not None:
            raise ValueError("max_documents keeps a few documents, which are better prepared; drop it or tokenize")
        shares = self.source.sources if isinstance(self.source, MixtureConfig) else ()
        if self.tokenize == "on_the_fly" and any(share.weight is None for share in shares):
            raise ValueError("on_the_fly does not know how many tokens a source has; give every source a weight")
        if shares and self.max_documents is not None:
            raise ValueError("max_documents would leave all but the first sources of a mixture out; drop it")
        return self

    @property
    def parts(self) -> list[FileSource]:
        """The sources to read, in order."""
        return parts_of(self.source, format=self.format, text_column=self.text_column)


def prepare(config: PrepareConfig, out: str, *, parallelism: int | None = None) -> dict[str, Any]:
    """Write the packed dataset of `config` under `out` (a local folder or s3:// URI) and return its manifest.

    `parallelism` caps the tasks that run at once (default: what the cluster has); it never changes a byte of the
    output. Uses the running Ray, or a local one for the duration. Interrupted, the same call goes on where it
    stopped; manifest.json is written last. Raises ConfigError for input or settings that cannot work, for all bad files
    at once where that shows without reading them, and for a folder with files of another's where its own would be.
    """
    tokenizer = load_tokenizer(config.tokenizer)
    live = config.tokenize == "on_the_fly"
    files, bad = sources.look_through(config.parts, sampled=live)
    bad += bad_beginnings(files, config.parts)
    listing = on_the_fly.plan(config, files, bad) if live else None
    evaluated = None if config.decontaminate is None else with_pack(config.decontaminate)
    work = [] if live else units.plan(files, config.parts, config.max_documents, bad, evaluated)
    storage = Storage(out)
    fingerprint = _fingerprint(config, tokenizer, files, evaluated)
    if storage.exists(MANIFEST):
        return folder.finished(storage, fingerprint, tokenizer)
    folder.claim(storage)
    try:
        with some_ray(parallelism):
            if evaluated is not None:
                evaluated.write(storage)
            file = _copy_tokenizer(config.tokenizer, storage)
            made = _Making(config, tokenizer, file, storage, fingerprint, evaluated)
            if listing is not None:
                manifest = _build_live(made, listing, parallelism)
            else:
                manifest = _build(made, files, work, parallelism)
    except ConfigError:
        if not storage.exists(MANIFEST):
            folder.discard(storage)
        raise
    except FileNotFoundError:  # what was staged is gone
        if not storage.exists(MANIFEST):
            raise
        return folder.finished(storage, fingerprint, tokenizer)
    if manifest is None:
        return folder.finished(storage, fingerprint, tokenizer)
    folder.finish(storage, manifest)
    return manifest


@dataclass(frozen=True)
class _Making:
    """A dataset in the making. file: the tokenizer's own in it, None for the built-in one. evaluated: what no document
    of it may overlap."""

    config: PrepareConfig
    tokenizer: Tokenizer
    file: str | None
    storage: Storage
    fingerprint: str
    evaluated: Overlap | None

    def job(self, threshold: int) -> Job:
        config, width = self.config, self.config.seq_len + 1
        ids = folder.special_ids(self.tokenizer)
        made_of = [self.fingerprint, threshold, sources.UNIT_BYTES, sources.MAX_UNITS, ids]
        return Job(
            out=self.storage.root,
            staging=f"{folder.STAGING}/{sha256_of(made_of)[:16]}",
            tokenizer=self.storage.join(self.file) if self.file else config.tokenizer,
            sources=tuple(config.parts),
            seed=config.seed,
            threshold=threshold,
            width=width,
            shard_sequences=config.shard_sequences or max(units.ROW_GROUP, SHARD_TOKENS // width // 64 * 64),
            max_document_tokens=config.max_document_tokens,
            masked=any(part.masks_loss for part in config.parts),
            without=None if self.evaluated is None else self.storage.join(self.evaluated.file),
        )

    def manifest(self) -> dict[str, Any]:
        """The manifest's entries that only depend on the config."""
        config = self.config
        masked = {"loss_mask": True} if any(part.masks_loss for part in config.parts) else {}
        return {
            "schema_version": SCHEMA_VERSION,
            "fingerprint": self.fingerprint,
            # Every checkpoint has this record.
            "tokenizer": {**describe(self.tokenizer), "file": self.file, **chat_templates(config)},
            "seq_len": config.seq_len,
            "seed": config.seed,
            "config": _settings(config),
            **masked,
            **({} if self.evaluated is None else {"decontaminated": self.evaluated.record()}),
        }


def _build(
    made: _Making, files: Sequence[sources.SourceFile], work: Sequence[Unit], parallelism: int | None
) -> dict[str, Any] | None:
    """Tokenise and write the shards. Returns the manifest, or None where another process has written it meanwhile."""
    config = made.config
    job = made.job(holdout_threshold(config.validation_fraction))
    records = _tokenize(work, job, parallelism)
    refuse_empty(records, files, config.source)
    lowest = min(record["lowest"] for record in records if record["lowest"] is not None)
    highest = max(record["highest"] for record in records if record["highest"] is not None)
    forced = forced_threshold(job.threshold, lowest, highest)
    if forced != job.threshold:
        # Chance left one side without a document, so the corpus is small: dividing it again is cheap.
        job = made.job(forced)
        records = _tokenize(work, job, parallelism)
    if not folder.cleared(made.storage):
        return None
    streams, mixed = _streams(config, work, records)
    splits = write_splits(records, streams, job, parallelism)
    manifest = made.manifest() | {
        "sources": describe_sources(config.source, config.parts, files, work, records),
        "splits": splits,
        "quarantine": write_quarantine(work, records, made.storage, job),
    }
    if mixed:
        manifest["mixture"] = mixed
    if config.max_document_tokens is not None:
        manifest["documents_split"] = sum(record["documents_split"] for record in records)
    return manifest


def _build_live(made: _Making, listing: on_the_fly.Listing, parallelism: int | None) -> dict[str, Any] | None:
    """`_build` for a corpus that is tokenised while training: only the held-out units are tokenised now."""
    work = listing.held_out_work()
    job = made.job(HASH_SPACE)  # every document of a held-out unit
    records = _tokenize(work, job, parallelism)
    if work and not any(sum(record["documents"].values()) for record in records):
        reasons = sorted(set().union(*(record["reasons"] for record in records)))
        found = f" ({', '.join(reasons)})" if reasons else ""
        raise ConfigError(
            f"no usable document in the units held out{found}; check the source, or set another prepare.seed"
        )
    if not folder.cleared(made.storage):
        return None
    splits = write_splits(records, {"validation": mixture.whole(records, "validation")}, job, parallelism)
    unknown = {"files": [], "sequences": None, "tokens": None, "dropped_tokens": 0, "documents": None}
    splits["train"] = unknown | {"unigram_entropy": splits["validation"]["unigram_entropy"]}
    return made.manifest() | {
        "sources": [sources.describe(file, None) for file in listing.files],
        "splits": splits,
        "quarantine": write_quarantine(work, records, made.storage, job, complete=False),
        on_the_fly.KEY: listing.record(),
    }


def chat_templates(config: PrepareConfig) -> dict[str, list[str]]:
    """{"chat_templates": by which templates the data's conversations are written}, empty if there are none."""
    templates = sorted({part.template for part in config.parts if isinstance(part, OpenThoughtsConfig)})
    return {"chat_templates": templates} if templates else {}


def _streams(
    config: PrepareConfig, work: Sequence[Unit], records: Sequence[dict[str, Any]]
) -> tuple[dict[str, list[mixture.Segment]], list[dict[str, Any]]]:
    """What each split is the concatenation of, and the manifest's account of a mixture (empty without one)."""
    streams = {split: mixture.whole(records, split) for split in SPLITS}
    if not isinstance(config.source, MixtureConfig):
        return streams, []
    owners = [unit.parts[0][0].source for unit in work]

    def by_source(split: str) -> list[list[mixture.Segment]]:
        return [[each for each in streams[split] if owners[each.unit] == part] for part in range(len(config.parts))]

    mixed, account = mixture.mix(config.source, by_source("train"))
    for part, segments in zip(account, by_source("validation"), strict=True):
        part["held_out"] = sum(segment.tokens for segment in segments)
    return {**streams, "train": mixed}, account


def _tokenize(work: Sequence[Unit], job: Job, parallelism: int | None) -> list[dict[str, Any]]:
    records, tokens = [], 0
    for record in spread(tokenize_unit, work, job, parallelism):
        if "error" in record:
            raise ConfigError(record["error"])
        records.append(record)
        tokens += sum(record["tokens"].values())
        logger.info("tokenised %d of %d units, %s tokens", len(records), len(work), f"{tokens:,}")
    return sorted(records, key=lambda record: record["unit"])


def _fingerprint(
    config: PrepareConfig, tokenizer: Tokenizer, files: Sequence[sources.SourceFile], evaluated: Overlap | None
) -> str:
    """Names everything the output depends on, and nothing else."""
    settings = {key: value for key, value in _settings(config).items() if key not in ("source", "tokenizer")}
    if evaluated is not None:  # whatever the pack is called
        settings["decontaminate"] = evaluated.sha256
    versions: list[list[Any]] = [[file.name, file.format, file.compression, file.bytes, file.version] for file in files]
    if isinstance(config.source, SourceConfig):
        settings["source"] = identity(config.source)
        versions = [[*version, file.source] for version, file in zip(versions, files, strict=True)]
    made_of = [SCHEMA_VERSION, sources.PIECE_BYTES, settings, tokenizer.sha256, versions]
    if tokenizer.bos_id != tokenizer.prefix_id:  # older LT2 began every text with BOS, from the same file
        made_of.append({"bos_id": tokenizer.bos_id})
    return sha256_of(made_of)


def _settings(config: PrepareConfig) -> dict[str, Any]:
    """The config as JSON; options younger than the first datasets are absent at their default, so those stay valid."""
    settings = config.model_dump(mode="json")
    for name in ("max_document_tokens", "tokenize", "decontaminate"):
        if getattr(config, name) == PrepareConfig.model_fields[name].default:
            del settings[name]
    return settings


def _copy_tokenizer(spec: str, storage: Storage) -> str | None:
    """Keep the tokenizer's files in the dataset, where every worker and every later step can read them."""
    files = tokenizer_files(spec)
    for path, content in files.items():
        storage.write_bytes(path, content)
    return next(iter(files), None)
