"""From what the user calls a source (a file, a folder, a glob, python-stdlib) to paths, and what format a name says."""

from __future__ import annotations

import os
import sys
import sysconfig
from collections.abc import Iterable, Iterator
from typing import Any

from fsspec.implementations.local import LocalFileSystem

from lt2.config import ConfigError
from lt2_platform.data.sources.configs import STDLIB
from lt2_platform.storage import S3, absolute, filesystem

MISSING = "source {} does not exist; give a file, a folder, a glob or python-stdlib"
HIDDEN = (".", "_")

_FORMATS = {
    ".txt": "text", ".text": "text", ".md": "text", ".py": "text",
    ".jsonl": "jsonl", ".ndjson": "jsonl", ".parquet": "parquet",
}  # fmt: skip
_COMPRESSIONS = {".zst": "zstd", ".zstd": "zstd", ".gz": "gzip"}
_NOT_LIBRARY = {"test", "tests", "idle_test", "site-packages", "dist-packages", "__pycache__"}


def look_for(source: str, format: str = "auto", *, by_extension: bool = False) -> None:
    """Raise ConfigError unless there is something to read in `source`; on S3 only whether anything is there."""
    location = absolute(source)
    if not location.startswith(S3):
        expand(source, format, by_extension)
        return
    fs = filesystem(location)
    if not fs.exists(location) and not (_is_glob(source) and fs.glob(location)):
        raise ConfigError(MISSING.format(source))


def _is_glob(source: str) -> bool:
    return any(character in source for character in "*?[")


def expand(source: str, format: str, by_extension: bool) -> Iterable[tuple[str, str]]:
    """(name, path) of every file of a path or glob. Raises ConfigError where there is none that can be used."""
    if not source.strip():  # as a path it would be the working directory, which nobody who left it out means
        raise ConfigError("an empty path is given as source; give a file, a folder, a glob or python-stdlib")
    location = absolute(source)
    fs = filesystem(location)
    if fs.isfile(location):
        format_of(location, format)
        return [(location, location)]
    if fs.isdir(location):
        found = _inside(fs, location)
    elif _is_glob(source):
        matches = [match for match in fs.glob(location) if not _is_hidden(match, location)]
        found = [inner for match in matches for inner in (_inside(fs, match) if fs.isdir(match) else [match])]
    else:
        raise ConfigError(MISSING.format(source))
    paths = sorted({(S3 if location.startswith(S3) else "") + path for path in found})
    if not paths:
        raise ConfigError(f"source {source} matches no file; check the path")
    if format == "auto":
        usable = [path for path in paths if _format_and_compression(path)[0]]
    else:
        usable = [path for path in paths if not by_extension or _format_and_compression(path)[0] == format]
    if not usable and by_extension and format != "auto":
        raise ConfigError(
            f"source {source} holds no {format} file (found {os.path.basename(paths[0])}); give another path or type"
        )
    if not usable:
        raise ConfigError(
            f"source {source} holds no text, jsonl or parquet file (found {os.path.basename(paths[0])}); "
            "set prepare.format to say what these files are"
        )
    return [(path, path) for path in usable]


def _inside(fs: Any, folder: str) -> list[str]:
    """Every file below a folder and the links in it, but hidden ones and the _SUCCESS kind that other tools leave, and
    the empty objects "…/" by which consoles of S3 show a folder."""
    folder = folder.removeprefix(S3).rstrip("/")
    found = _local_files(folder) if isinstance(fs, LocalFileSystem) else fs.find(folder)
    below = [str(path).removeprefix(folder).removeprefix("/") for path in found]
    files = [path for path in below if path and not path.endswith("/")]
    return [f"{folder}/{path}" for path in files if not any(part.startswith(HIDDEN) for part in path.split("/"))]


def _local_files(folder: str, above: tuple[str, ...] = ()) -> Iterator[str]:
    """Not `fs.find`, which passes over links to folders without a word. One that leads back up is not entered."""
    real = os.path.realpath(folder)
    if real in above:
        return
    try:
        entries = [entry for entry in os.scandir(folder) if not entry.name.startswith(HIDDEN)]
    except PermissionError as error:
        raise ConfigError(f"{folder} cannot be read ({error.strerror}); make it readable or remove it") from error
    for entry in entries:
        if os.path.isdir(entry.path):  # entry.is_dir() raises for a link that leads to itself
            yield from _local_files(entry.path, (*above, real))
        else:
            yield entry.path


def _is_hidden(match: str, pattern: str) -> bool:
    """Whether a wildcard stands for a name that a folder would hide; a pattern that spells such a one out means it."""
    asked, found = pattern.removeprefix(S3).split("/"), match.removeprefix(S3).split("/")
    first = next(index for index, part in enumerate(asked) if _is_glob(part))
    spelled = any(part.startswith(HIDDEN) for part in asked[first:])
    return not spelled and any(part.startswith(HIDDEN) for part in found[first:])


def stdlib() -> Iterable[tuple[str, str]]:
    """(name, path) of every Python file of this Python's standard library."""
    root = sysconfig.get_paths()["stdlib"]
    version = f"{sys.version_info.major}.{sys.version_info.minor}"
    found = []
    for folder, inner, files in os.walk(root):
        inner[:] = [name for name in inner if name not in _NOT_LIBRARY]
        found += [os.path.join(folder, name) for name in files if name.endswith(".py")]
    return sorted((f"{STDLIB}-{version}/{os.path.relpath(path, root)}", path) for path in found)


def _format_and_compression(path: str) -> tuple[str | None, str | None]:
    stem, extension = os.path.splitext(path.lower())
    compression = _COMPRESSIONS.get(extension)
    if compression:
        extension = os.path.splitext(stem)[1]
    return _FORMATS.get(extension), compression


def format_of(path: str, format: str) -> tuple[str, str | None]:
    """(format, compression) of a file, where `format` is "auto" or what the user says."""
    found, compression = _format_and_compression(path)
    chosen = found if format == "auto" else format
    if chosen is None:
        raise ConfigError(f"cannot tell the format of {path}; set prepare.format to text, jsonl or parquet")
    return chosen, None if chosen == "parquet" else compression
