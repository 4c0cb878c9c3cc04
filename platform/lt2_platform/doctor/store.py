"""Whether a storage root does what LT2 builds on: atomic writes seen at once, and one winner among many creators."""

from __future__ import annotations

import time
import uuid
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from statistics import median

from lt2_platform.doctor.finding import Finding
from lt2_platform.storage import Storage
from lt2_platform.storage_errors import CHOOSE, STORAGE_ERRORS, refusal

PART = "storage"
CREATORS = 8
SMALL_WRITES = 5
MEGABYTES = 32


def store(storage: Storage) -> Iterator[Finding]:
    """Writes below a folder of its own, and removes it. Ends early where nothing can be written."""
    folder = f".lt2-doctor-{uuid.uuid4().hex}"
    try:
        yield Finding(PART, "small files", "ok", _small_files(storage, folder))
        yield sees_writes(storage, folder)
        yield one_winner(storage, folder)
        yield Finding(PART, "large files", "ok", _large_file(storage, folder))
    except STORAGE_ERRORS as error:
        yield Finding(PART, "access", "PROBLEM", str(refusal(storage.root, "used", error)))
    finally:
        with suppress(*STORAGE_ERRORS):  # a store that deletes nothing has been told of
            storage.delete(folder)


def sees_writes(storage: Storage, folder: str) -> Finding:
    """Checks that whoever looks next sees what was written, replaced and deleted."""
    path, wrong = f"{folder}/seen", []
    storage.write_bytes(path, b"old")
    storage.write_bytes(path, b"new")
    if storage.read_bytes(path) != b"new":
        wrong.append("a replaced file still has its old content")
    if "seen" not in storage.list(folder):
        wrong.append("a written file is not listed")
    filesystem, place = storage.arrow_fs(path)
    with filesystem.open_input_file(place) as file:
        if file.read() != b"new":
            wrong.append("arrow reads something else")
    storage.delete(path)
    if storage.is_file(path):
        wrong.append("a deleted file is still there")
    if wrong:
        return Finding(PART, "consistency", "PROBLEM", f"{storage.root}: {'; '.join(wrong)}; {CHOOSE}")
    return Finding(PART, "consistency", "ok", "what is written, replaced or deleted is seen at once")


def one_winner(storage: Storage, folder: str) -> Finding:
    """Leases and done records are files that exactly one of many may create."""
    path = f"{folder}/created"

    def create(number: int) -> bool:
        return storage.create_exclusive(path, str(number).encode())

    with ThreadPoolExecutor(CREATORS) as pool:
        won = [number for number, made in enumerate(pool.map(create, range(CREATORS))) if made]
    if len(won) != 1 or storage.read_bytes(path) != str(won[0]).encode() or create(CREATORS):
        said = (
            f"{storage.root}: {len(won)} of {CREATORS} writers created one file, or it was overwritten; leases need "
            f"a store with conditional writes (S3's If-None-Match) or hard links; {CHOOSE}"
        )
        return Finding(PART, "exclusive creation", "PROBLEM", said)
    return Finding(PART, "exclusive creation", "ok", f"one of {CREATORS} writers wins")


def _small_files(storage: Storage, folder: str) -> str:
    path = f"{folder}/small"
    write = median(_seconds(lambda: storage.write_bytes(path, b"x")) for _ in range(SMALL_WRITES))
    read = median(_seconds(lambda: storage.read_bytes(path)) for _ in range(SMALL_WRITES))
    return f"written in {write * 1e3:.2g} ms, read in {read * 1e3:.2g} ms"


def _large_file(storage: Storage, folder: str) -> str:
    data = bytes(MEGABYTES * 10**6)
    write = _seconds(lambda: storage.write_bytes(f"{folder}/large", data))
    read = _seconds(lambda: storage.read_bytes(f"{folder}/large"))
    return (
        f"{MEGABYTES} MB in one stream: written at {MEGABYTES / write:,.0f} MB/s, read at {MEGABYTES / read:,.0f} MB/s"
    )


def _seconds(work: Callable[[], object]) -> float:
    started = time.perf_counter()
    work()
    return time.perf_counter() - started
