"""The metric parts and the curves of one run in storage: read, write, and name what cannot be read.

runs/<run>/metrics/part-<writer>-<sequence>.parquet    rows in the order they were logged
runs/<run>/curves.parquet                              the same downsampled, and which parts it covers
"""

from __future__ import annotations

import logging
from concurrent.futures import ThreadPoolExecutor

import pyarrow as pa

from lt2_platform.results.curves import CURVES, ROWS, decode, downsample, encode, extend
from lt2_platform.storage import Storage
from lt2_platform.wording import one_line

log = logging.getLogger(__name__)


def part_name(writer: str, sequence: int) -> str:
    """Sorting part names gives the order of writing: `writer` starts with the number of the attempt."""
    return f"part-{writer}-{sequence:06d}.parquet"


def read_parts(storage: Storage, run_id: str, names: list[str]) -> tuple[pa.Table, list[str]]:
    """(ROWS of the named parts in order of writing, problems). A damaged part is named and left out."""
    tables, problems = [ROWS.empty_table()], []
    folder = f"runs/{run_id}/metrics"
    names = sorted(names)
    for name, data in zip(names, read_many(storage, [f"{folder}/{name}" for name in names])):
        try:
            if data is not None:
                tables.append(decode(data, ROWS)[0])
        except ValueError as error:
            problems.append(skip(f"{folder}/{name}", error))
    return pa.concat_tables(tables), problems


def list_parts(storage: Storage, run_id: str) -> list[str]:
    names = storage.list(f"runs/{run_id}/metrics")
    return [name for name in names if name.startswith("part-") and name.endswith(".parquet")]


def read_curves(storage: Storage, run_id: str) -> tuple[pa.Table, dict[str, int], list[str]]:
    """(CURVES of one run up to its newest part, parts covered by them, problems). Writes nothing."""
    curves, covered, problems = CURVES.empty_table(), {}, []
    path = f"runs/{run_id}/curves.parquet"
    try:
        curves, metadata = decode(storage.read_bytes(path), CURVES)
        covered, problems = metadata["covered"], list(metadata["problems"])
    except FileNotFoundError:
        pass
    except (ValueError, KeyError) as error:
        curves, covered, problems = CURVES.empty_table(), {}, [skip(path, error)]
    names = list_parts(storage, run_id)
    tail = [name for name in names if _sequence(name) > covered.get(_writer(name), -1)]
    if not tail:
        return curves, covered, problems
    rows, new_problems = read_parts(storage, run_id, tail)
    extended = extend(curves, rows) if covered else None
    if extended is None:  # first reading, or a resumed run replays merged steps
        rows, problems = read_parts(storage, run_id, names)
        return downsample(rows), _covered(names), problems
    return extended, {**covered, **_covered(tail)}, problems + new_problems


def write_curves(storage: Storage, run_id: str) -> None:
    """Bring `curves.parquet` up to the newest part."""
    curves, covered, problems = read_curves(storage, run_id)
    data = encode(curves, {"covered": covered, "problems": problems})
    storage.write_bytes(f"runs/{run_id}/curves.parquet", data)


def _writer(name: str) -> str:
    return name.removeprefix("part-").rsplit("-", 1)[0]


def _sequence(name: str) -> int:
    number = name.removesuffix(".parquet").rsplit("-", 1)[-1]
    return int(number) if number.isdigit() else -1


def _covered(names: list[str]) -> dict[str, int]:
    covered: dict[str, int] = {}
    for name in names:
        covered[_writer(name)] = max(covered.get(_writer(name), -1), _sequence(name))
    return covered


def unreadable(path: str, error: Exception) -> str:
    """The line by which readers say that `path` is left out and why."""
    return f"{path}: skipped, unreadable ({one_line(error)[:200]})"


def skip(path: str, error: Exception) -> str:
    """Log that `path` is left out and why; returns the line, for readers that show it."""
    problem = unreadable(path, error)
    log.warning("%s", problem)
    return problem


def read_many(storage: Storage, paths: list[str]) -> list[bytes | None]:
    """The bytes of each path, None where there is no such file; in parallel, because S3 answers in tens of ms."""

    def read(path: str) -> bytes | None:
        try:
            return storage.read_bytes(path)
        except (FileNotFoundError, NotADirectoryError):  # the latter: a stray file where a folder would be
            return None

    if len(paths) < 2:
        return [read(path) for path in paths]
    with ThreadPoolExecutor(min(16, len(paths))) as pool:
        return list(pool.map(read, paths))
