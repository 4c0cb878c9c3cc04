"""What a local file system does with single files, as s3_keys.py for S3. `full` is an absolute path."""

from __future__ import annotations

import os
import shutil
import uuid
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from typing import IO, Any


@contextmanager
def temporary_beside(full: str) -> Iterator[str]:
    """A new name in the folder of `full`, which is made; nothing is left under it when the block ends."""
    folder = os.path.dirname(full)
    os.makedirs(folder, exist_ok=True)
    temporary = os.path.join(folder, f".tmp-{uuid.uuid4().hex}")
    try:
        yield temporary
    finally:
        with suppress(FileNotFoundError):
            os.unlink(temporary)


@contextmanager
def on_disk(full: str) -> Iterator[IO[bytes]]:
    """A new binary file, whose content has reached the disk when the block ends."""
    with open(full, "wb") as file:
        yield file
        file.flush()
        os.fsync(file.fileno())


def remove(full: str) -> None:
    """A file, a link or a whole folder; a missing one is fine."""
    with suppress(FileNotFoundError):
        if os.path.isdir(full) and not os.path.islink(full):
            shutil.rmtree(full, onerror=_unless_gone)
        else:
            os.unlink(full)


def _unless_gone(function: object, path: str, raised: tuple[Any, BaseException, Any]) -> None:
    """Another process may remove some of the same files meanwhile; the rest has to go all the same."""
    if not isinstance(raised[1], FileNotFoundError):
        raise raised[1]


def sizes(folder: str) -> dict[str, int]:
    """Bytes of every file below, by its path. Links are followed (a dataset may lie on another disk), but to no folder
    that was seen already; links to nothing, and what is deleted meanwhile, are left out."""
    found: dict[str, int] = {}
    seen: set[str] = set()
    tops = [folder]
    for top in tops:  # grows
        if os.path.realpath(top) in seen:
            continue
        for here, folders, names in os.walk(top):
            seen.add(os.path.realpath(here))
            tops += [path for path in (os.path.join(here, name) for name in folders) if os.path.islink(path)]
            for path in (os.path.join(here, name) for name in names):
                with suppress(FileNotFoundError):
                    found[path] = os.stat(path).st_size
    return found
