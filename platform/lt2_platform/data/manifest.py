"""What prepare records about its input: files and their documents, and rows set aside; and its error where it found
nothing usable."""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Sequence
from typing import Any

from lt2.config import ConfigError
from lt2_platform.data.sources.configs import FileSource, Paths, SourceConfig
from lt2_platform.data.sources.listing import SourceFile, describe
from lt2_platform.data.units import Job, Unit, staged
from lt2_platform.storage import Storage

MANIFEST = "manifest.json"
SCHEMA_VERSION = 1


def write_quarantine(
    work: Sequence[Unit], records: Sequence[dict[str, Any]], storage: Storage, job: Job, *, complete: bool = True
) -> dict[str, Any]:
    """quarantine/part-*.jsonl with rows numbered from the start of their file; returns the manifest's summary.

    complete: `work` is all that there is. Without what comes before in a file, rows are numbered from the start of
    their slice, which is named.
    """
    seen: Counter[SourceFile] = Counter()
    reasons: Counter[str] = Counter()
    parts = 0
    for unit, record in zip(work, records, strict=True):
        first_rows = []
        for (file, _), counts in zip(unit.parts, record["parts"], strict=False):
            first_rows.append(seen[file])
            seen[file] += counts["rows"]
        if not record["reasons"]:
            continue
        reasons.update(record["reasons"])
        with (
            storage.open(staged(job, unit.index, "quarantine")) as bad,
            storage.writer(f"quarantine/part-{parts:05d}.jsonl") as target,
        ):
            for line in bad:
                fault = json.loads(line)
                part = fault.pop("part")
                if complete:
                    fault["row"] += first_rows[part]
                else:
                    fault["start"] = unit.parts[part][1].start
                target.write(json.dumps(fault, ensure_ascii=False).encode() + b"\n")
        parts += 1
    return {"rows": sum(reasons.values()), "reasons": dict(sorted(reasons.items())), "files": parts}


def describe_sources(
    source: Paths | SourceConfig,
    parts: Sequence[FileSource],
    files: Sequence[SourceFile],
    work: Sequence[Unit],
    records: Sequence[dict[str, Any]],
) -> list[dict[str, Any]]:
    """The manifest's records of the files; those of typed sources also say which, its rows, and rows left out."""
    counted: dict[SourceFile, Counter[str]] = {file: Counter() for file in files}
    for unit, record in zip(work, records, strict=True):
        for (file, _), counts in zip(unit.parts, record["parts"], strict=False):
            counted[file].update(counts)
    described = [describe(file, counted[file]["documents"]) for file in files]
    if not isinstance(source, SourceConfig):
        return described
    kinds = [part.type for part in parts]
    return [
        {**record, "source": kinds[file.source], "rows": counted[file]["rows"], "left_out": counted[file]["left_out"]}
        for file, record in zip(files, described, strict=True)
    ]


def refuse_empty(records: Sequence[dict[str, Any]], files: Sequence[SourceFile], source: Paths | SourceConfig) -> None:
    """Raise ConfigError, with the reasons, when there is no document at all."""
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
        + (
            "check the source's type"
            if isinstance(source, SourceConfig)
            else "check prepare.format and prepare.text_column"
        )
    )
