"""Reads the JSON records of `lt2_workflows.engine.records`; one that is damaged is named, with what to do about it."""

from __future__ import annotations

import json
from typing import TYPE_CHECKING, Any

from lt2.config import ConfigError

if TYPE_CHECKING:
    from lt2_platform.storage import Storage

Kinds = dict[str, type | tuple[type, ...]]
NUMBER = (int, float)

# By file name: what the readers rely on, and what to do when it is not there.
_RECORDS: dict[str, tuple[Kinds, str]] = {
    "done.json": (
        {"attempt": int, "ended": NUMBER, "result": dict, "provenance": dict},
        "delete it to run the step again",
    ),
    "lease.json": (
        {"released": bool, "beat": int, "time": NUMBER, "ttl_s": NUMBER, "host": str, "pid": int},
        "delete it when no process runs this step any more",
    ),
    "state.json": ({"state": str}, "delete it: only what that attempt says of itself is lost"),
    "spec.json": ({"needs": dict, "config": dict}, "delete it and run its recipe again, which writes it anew"),
    "dag.json": ({"workflow": str, "ids": dict}, "delete it and run its recipe again, which writes it anew"),
}


class UnreadableRecordError(ConfigError):
    """A record of the store that is no JSON, or not what the engine writes."""


def read_record(storage: Storage, path: str) -> dict[str, Any] | None:
    """The record at `path`; None if there is none. Raises UnreadableRecordError when it is damaged."""
    try:
        data = storage.read_bytes(path)
    except (FileNotFoundError, NotADirectoryError):
        return None
    kinds, remedy = _RECORDS[path.rsplit("/", 1)[-1]]
    try:
        return _parse(data, kinds)
    except ValueError as error:
        raise UnreadableRecordError(f"{storage.join(path)} is not readable ({error}); {remedy}") from error


def _parse(data: bytes, kinds: Kinds) -> dict[str, Any]:
    if not data.strip():
        raise ValueError("it is empty")
    try:
        record = json.loads(data)
    except ValueError:
        raise ValueError("it is no JSON") from None
    if not isinstance(record, dict):
        raise ValueError("it is no JSON object")
    for name, kind in kinds.items():
        if not isinstance(record.get(name), kind):
            raise ValueError(f"its {name!r} is missing or damaged")
    return record
