"""Copies files from one storage root to another."""

from __future__ import annotations

import shutil
from collections.abc import Iterable
from concurrent.futures import ThreadPoolExecutor

from lt2_platform.storage import Storage

THREADS, BLOCK_BYTES = 8, 2**24


def copy_files(source: Storage, target: Storage, paths: Iterable[str]) -> None:
    """Copy files to the same paths under the other root, some at a time."""

    def copy(path: str) -> None:
        with source.open(path) as read, target.writer(path) as write:
            shutil.copyfileobj(read, write, BLOCK_BYTES)

    with ThreadPoolExecutor(THREADS) as pool:
        list(pool.map(copy, paths))  # raises what one of them raised


def copy_missing(source: Storage, target: Storage, folder: str) -> None:
    """Copy the files of a folder that the other root does not have."""
    there = target.sizes(folder)
    copy_files(source, target, [path for path in source.sizes(folder) if path not in there])
