"""Which checkpoints of a folder are complete, and whether their files are what was written."""

from __future__ import annotations

import hashlib
import logging
import re

from lt2.config import ConfigError
from lt2_platform.storage import Storage
from lt2_platform.train.ranks import from_rank_zero, gather, rank, world_size

log = logging.getLogger(__name__)

COMPLETE, INFO = "COMPLETE", "checkpoint.json"
_NAME = re.compile(r"step-\d{8,}")


class CheckpointError(ConfigError):
    """A checkpoint that cannot be used: missing, damaged, or of another model or tokenizer."""


def step_of(name: str) -> int:
    return int(name.removeprefix("step-"))


def all_names(folder: str) -> list[str]:
    """Names of the checkpoints in `folder`, complete or not, oldest first."""
    return sorted((name for name in Storage(folder).list() if _NAME.fullmatch(name)), key=step_of)


def complete(folder: str) -> list[str]:
    """Names of the complete checkpoints in `folder`, oldest first."""
    storage = Storage(folder)
    return [name for name in all_names(folder) if storage.exists(f"{name}/{COMPLETE}")]


def latest(folder: str) -> str | None:
    """URI of the newest complete checkpoint whose files are intact, None when there is none at all. Collective.

    Damaged ones are named in the log and passed over. Raises CheckpointError when every one of them is damaged:
    training again from the start must be somebody's decision.
    """
    storage = Storage(folder)
    names = from_rank_zero(complete(folder))  # every rank must walk the same listing
    for name in reversed(names):
        if not (problems := damage_over_ranks(storage.join(name))):
            return storage.join(name)
        log.error("checkpoint %s is damaged and skipped: %s", storage.join(name), "; ".join(problems))
    if names:
        raise CheckpointError(f"{folder}: all checkpoints are damaged ({', '.join(names)}); delete them to start over")
    return None


def damage_over_ranks(uri: str) -> list[str]:
    """`damage`, each rank reading its share. Collective."""
    return [problem for part in gather(damage(uri, rank(), world_size())) for problem in part]


def damage(uri: str, part: int = 0, parts: int = 1) -> list[str]:
    """What is wrong with the checkpoint's files ([] if nothing); `part` of `parts` reads its share of them."""
    storage = Storage(uri)
    try:
        files = {name: (it["bytes"], it["sha256"]) for name, it in storage.read_json(COMPLETE)["files"].items()}
    except (FileNotFoundError, ValueError, KeyError, TypeError, AttributeError) as error:
        return [f"{COMPLETE}: {type(error).__name__}"] if part == 0 else []
    found = ((name, _file_problem(storage, name, *files[name])) for name in sorted(files)[part::parts])
    return [f"{name}: {problem}" for name, problem in found if problem]


def _file_problem(storage: Storage, name: str, expected_size: int, expected_digest: str) -> str | None:
    digest, size = hashlib.sha256(), 0
    try:
        with storage.open(name) as file:
            while block := file.read(2**22):
                digest.update(block)
                size += len(block)
    except FileNotFoundError:
        return "missing"
    if size != expected_size:
        return f"{size} bytes instead of {expected_size}"
    return None if digest.hexdigest() == expected_digest else "content changed (sha256)"


def delete(folder: str, name: str) -> None:
    """Remove one checkpoint, whatever is left of it."""
    storage = Storage(folder)
    # COMPLETE goes first: a kill in between leaves an orphan, never a checkpoint with missing files.
    storage.delete(f"{name}/{COMPLETE}")
    storage.delete(name)
