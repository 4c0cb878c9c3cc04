"""The second pass of `prepare`: every shard is cut out of the concatenation of the tokenised streams."""

from __future__ import annotations

import logging
from collections.abc import Iterator, Sequence
from typing import Any

import numpy as np

from lt2.config import ConfigError
from lt2_platform.data.mixture import Segment
from lt2_platform.data.pack import entropy, spans
from lt2_platform.data.spread import spread
from lt2_platform.data.units import Job, Shard, write_shard

logger = logging.getLogger(__name__)


def write_splits(
    records: Sequence[dict[str, Any]], streams: dict[str, list[Segment]], job: Job, parallelism: int | None
) -> dict[str, Any]:
    totals = {split: sum(segment.tokens for segment in stream) for split, stream in streams.items()}
    # The end of the training stream that fills no row is dropped; validation keeps it, padded.
    rows = {
        split: total // job.width if split == "train" else -(-total // job.width) for split, total in totals.items()
    }
    if rows.get("train") == 0:
        raise ConfigError(
            f"the corpus has {totals['train']:,} training tokens, fewer than one sequence of seq_len + 1 = "
            f"{job.width:,}; lower prepare.seq_len or add text"
        )
    shards = [shard for split in streams for shard in _shards(streams[split], job, split, rows[split], totals[split])]
    files: dict[str, list[dict[str, Any]]] = {split: [] for split in streams}
    counts = {split: np.zeros(1, dtype=np.int64) for split in streams}
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
        for split in streams
    }


def _shards(stream: Sequence[Segment], job: Job, split: str, rows: int, total: int) -> Iterator[Shard]:
    counts = [segment.tokens for segment in stream]
    for index, first in enumerate(range(0, rows, job.shard_sequences)):
        sequences = min(job.shard_sequences, rows - first)
        start, stop = first * job.width, min((first + sequences) * job.width, total)
        cuts = [(stream[part].unit, begin, end) for part, begin, end in spans(counts, start, stop)]
        yield Shard(split, index, first, sequences, tuple(cuts))
