"""The folder that `prepare` writes: whose it is, what a run that was cut off left in it, and when it is finished.

Only what lies beside MARK is ever replaced or removed: it is written first and goes last.
"""

from __future__ import annotations

import os
from contextlib import suppress
from typing import Any

from lt2.config import ConfigError
from lt2_platform.data import overlap
from lt2_platform.data.manifest import MANIFEST
from lt2_platform.data.tokenizers.tokenize import Tokenizer, describe
from lt2_platform.data.units import SPLITS
from lt2_platform.storage import Storage

MARK, STAGING = ".preparing", ".staging"
_MADE = ("tokenizer", overlap.FOLDER, *SPLITS, "quarantine")


def claim(storage: Storage) -> None:
    """Mark the folder as ours. Raises ConfigError where it cannot be written, or holds what no `prepare` left there."""
    foreign = [] if storage.is_file(MARK) else [name for name in (*_MADE, STAGING) if storage.exists(name)]
    if foreign and not storage.exists(MANIFEST):  # another process may have finished since the caller looked
        raise ConfigError(
            f"{storage.root} has {', '.join(foreign)} already, which preparing would replace; choose another folder "
            "for the dataset, or move them away"
        )
    storage.check_writable()
    storage.write_bytes(MARK, b"A dataset is being prepared here; run the same again to finish it.\n")


def finish(storage: Storage, manifest: dict[str, Any]) -> None:
    storage.write_json(MANIFEST, manifest)
    _tidy(storage)


def finished(storage: Storage, fingerprint: str, tokenizer: Tokenizer) -> dict[str, Any]:
    """The manifest that is there. Raises ConfigError unless it is of this input and these settings."""
    try:
        manifest = storage.read_json(MANIFEST)
    except ValueError as error:
        raise ConfigError(
            f"{storage.join(MANIFEST)} is not a dataset manifest ({error}); choose another folder, or delete it"
        ) from error
    same = isinstance(manifest, dict) and manifest.get("fingerprint") == fingerprint
    if same and special_ids(manifest["tokenizer"]) == special_ids(tokenizer):
        _tidy(storage)
        return manifest
    raise ConfigError(f"{storage.root} holds a dataset of other input or settings; choose another folder or delete it")


def cleared(storage: Storage) -> bool:
    """Remove what an interrupted run left, half-written temporary files included; False if the dataset is finished.

    A process that was stopped for long may find that another one has taken its place and is done.
    """
    if storage.exists(MANIFEST):
        return False
    for made in (*SPLITS, "quarantine"):
        storage.delete(made)
    return True


def discard(storage: Storage) -> None:
    """Leave the folder as it was before `claim`."""
    for made in _MADE:
        storage.delete(made)
    _tidy(storage)
    with suppress(OSError):  # only an empty local folder goes; on S3 there are no folders
        os.rmdir(storage.root)


def _tidy(storage: Storage) -> None:
    for made in (STAGING, MARK):
        if storage.exists(made):  # of a finished dataset there is nothing to delete, and it may be read-only
            storage.delete(made)


def special_ids(tokenizer: Tokenizer | dict[str, Any]) -> list[int | None]:
    """What the fingerprint's sha256 of a tokenizer.json does not tell: the file beside it may name others."""
    record = tokenizer if isinstance(tokenizer, dict) else describe(tokenizer)
    return [record[name] for name in ("bos_id", "eos_id", "pad_id")]
