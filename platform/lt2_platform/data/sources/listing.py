"""From sources to files and their versions, and from files to fixed units of work."""

from __future__ import annotations

import errno
import hashlib
import os
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, replace
from typing import Any

from lt2.config import ConfigError
from lt2_platform.data.sources.bad_files import refuse
from lt2_platform.data.sources.columns import parquet_metadata
from lt2_platform.data.sources.configs import STDLIB, FileSource
from lt2_platform.data.sources.paths import expand, format_of, stdlib
from lt2_platform.storage import S3, filesystem
from lt2_platform.wording import one_line, printable

PIECE_BYTES = 128 * 2**10  # a long text file is cut at the first blank line after each 128 KiB (about 32k tokens)
UNIT_BYTES = 2 * 2**20
MAX_UNITS = 10_000
SAMPLED = "sampled:"
_SAMPLES, _SAMPLE_BYTES = 16, 4096


@dataclass(frozen=True)
class SourceFile:
    """One input file. `name` is what messages and manifests say; `version` is its sha256, its S3 etag, or SAMPLED….

    `source` is the index of the source it belongs to.
    """

    name: str
    path: str
    format: str
    compression: str | None
    bytes: int
    version: str
    source: int = 0


@dataclass(frozen=True)
class Slice:
    """A part of a file: bytes [start, stop) of text or jsonl (stop None: to the end), row groups of parquet."""

    file: int
    start: int
    stop: int | None


def look_through(parts: Sequence[FileSource], *, sampled: bool = False) -> tuple[list[SourceFile], list[str]]:
    """The files of every source, source by source and each once in it; and what is wrong with those that are no use.

    sampled: tell versions of local files by a few of their blocks instead of reading all of them.
    Raises ConfigError for a source without a path.
    """
    files, bad = [], []
    for index, part in enumerate(parts):
        found, wrong = _find(part, sampled)
        files += [replace(file, source=index) for file in found]
        bad += wrong
    return files, bad


def _find(part: FileSource, sampled: bool) -> tuple[list[SourceFile], list[str]]:
    named, bad = _named(part)
    if not named and not bad:
        raise ConfigError("no source given; set prepare.source to a file, folder, glob or python-stdlib")

    def inspect(item: tuple[str, str]) -> SourceFile | str:
        path, name = item
        try:
            name.encode()
        except UnicodeEncodeError:
            return f"{printable(name)} has a name that is not UTF-8; rename it"
        if not path.startswith(S3) and os.path.exists(path) and not os.path.isfile(path):
            return (
                f"{name} is not a regular file (a pipe, a socket or a device); remove it"  # opening may wait for ever
            )
        try:
            format, compression = format_of(path, part.format)
            file = SourceFile(name, path, format, compression, *version_of(path, sampled=sampled))
        except OSError as error:
            # ELOOP: a link that leads to itself
            if not isinstance(error, PermissionError | FileNotFoundError) and error.errno != errno.ELOOP:
                raise
            return f"{name} cannot be read ({error.strerror or one_line(error)}); make it readable or remove it"
        if file.compression and not file.bytes:  # nothing compressed is something; readers take it for an empty file
            return f"{name} is cut to 0 bytes; replace or remove it"
        return file

    with ThreadPoolExecutor(16) as pool:
        found = list(pool.map(inspect, named.items()))
    return [each for each in found if isinstance(each, SourceFile)], bad + [x for x in found if isinstance(x, str)]


def _named(part: FileSource) -> tuple[dict[str, str], list[str]]:
    """path -> name, where the first mention wins; and what is wrong with the other paths."""
    named: dict[str, str] = {}
    bad = []
    for one in [part.path] if isinstance(part.path, str) else part.path:
        try:
            found = stdlib() if one == STDLIB else expand(one, part.format, part.by_extension)
        except ConfigError as error:
            bad.append(str(error))
            continue
        for name, path in found:
            named.setdefault(path, name)
    return named, bad


def changed_since(parts: Sequence[FileSource], recorded: Sequence[dict[str, Any]], time: float) -> list[str]:
    """What is different about a corpus from `describe`'s records of it, made at `time`; one phrase per file.

    Local files are read only if they are younger than that, S3's are asked for their etags.
    Raises ConfigError for paths that cannot be used.
    """
    now: dict[str, str] = {}
    for part in parts:
        named, bad = _named(part)
        refuse(bad)
        now |= {name: path for path, name in named.items()}
    then = {record["path"]: record for record in recorded}

    def change(name: str) -> str | None:
        if name not in then or name not in now:
            return f"{name} is {'new' if name in now else 'gone'}"
        record, path = then[name], now[name]
        if not path.startswith(S3) and os.path.getsize(path) == record["bytes"] and os.path.getmtime(path) <= time:
            return None
        found = version_of(path, sampled="sampled" in record)
        known = record.get("etag") or record.get("sha256") or SAMPLED + record["sampled"]
        return None if found == (record["bytes"], known) else f"{name} has other content"

    with ThreadPoolExecutor(16) as pool:
        return [found for found in pool.map(change, sorted({*now, *then})) if found]


def version_of(path: str, *, sampled: bool) -> tuple[int, str]:
    """(bytes, version) of a file: S3's etag, or the sha256 of a local file, or of blocks of it."""
    if path.startswith(S3):
        info = filesystem(path).info(path)
        return int(info["size"]), str(info.get("ETag", "")).strip('"')
    size = os.path.getsize(path)
    with open(path, "rb") as file:
        if not sampled:
            return size, hashlib.file_digest(file, "sha256").hexdigest()
        digest = hashlib.sha256()
        for index in range(_SAMPLES):
            file.seek(max(0, size - _SAMPLE_BYTES) * index // (_SAMPLES - 1))
            digest.update(file.read(_SAMPLE_BYTES))
    return size, SAMPLED + digest.hexdigest()


def describe(file: SourceFile, documents: int | None) -> dict[str, Any]:
    """The manifest's record of a source file."""
    kind = "etag" if file.path.startswith(S3) else "sampled" if file.version.startswith(SAMPLED) else "sha256"
    version = {kind: file.version.removeprefix(SAMPLED)}
    return {"type": file.format, "path": file.name, "bytes": file.bytes, "documents": documents, **version}


def plan_units(
    files: Sequence[SourceFile], parts: Sequence[FileSource], unit_bytes: int | None = None, bad: Sequence[str] = ()
) -> list[list[Slice]]:
    """Units of about 2 MiB (more for corpora beyond 20 GB), in source order; a function of the files and `unit_bytes`.

    A unit is of one source. Raises ConfigError for parquet files that are damaged or lack a column, and for what is
    known to be `bad` already.
    """
    size = max(unit_bytes or UNIT_BYTES, sum(file.bytes for file in files) // MAX_UNITS)
    size = -(-size // PIECE_BYTES) * PIECE_BYTES

    wrong: dict[int, str] = {}

    def slices(item: tuple[int, SourceFile]) -> list[tuple[Slice, int]]:
        index, file = item
        try:
            return _slices(index, file, size, parts[file.source])
        except ConfigError as error:
            wrong[index] = str(error)
            return []

    with ThreadPoolExecutor(16) as pool:
        sliced = list(pool.map(slices, enumerate(files)))
    refuse([*bad, *(wrong[index] for index in sorted(wrong))])
    units: list[list[Slice]] = [[]]
    filled = 0
    for file, found in zip(files, sliced, strict=True):
        changed = units[-1] and files[units[-1][-1].file].source != file.source
        for part, weight in found:
            if changed or (filled + weight > size and units[-1]):
                units.append([])
                filled, changed = 0, False
            units[-1].append(part)
            filled += weight
    return [unit for unit in units if unit]


def _slices(index: int, file: SourceFile, size: int, source: FileSource) -> list[tuple[Slice, int]]:
    if file.format == "parquet":
        return _row_groups(index, file, source)
    if file.compression or file.bytes <= size:
        return [(Slice(index, 0, None), file.bytes)]  # a compressed stream has no way in but its beginning
    cuts = range(0, file.bytes, size)
    return [(Slice(index, cut, min(cut + size, file.bytes)), min(size, file.bytes - cut)) for cut in cuts]


def _row_groups(index: int, file: SourceFile, source: FileSource) -> list[tuple[Slice, int]]:
    metadata = parquet_metadata(file, source)
    return [
        (Slice(index, group, group + 1), metadata.row_group(group).total_byte_size)
        for group in range(metadata.num_row_groups)
    ]
