"""Reads the JSON records of `lt2_workflows.engine.records`; one that is damaged is named, with what to do about it."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from lt2.config import ConfigError
from lt2_platform.step_records import LEASE, NUMBER, Kinds, parse

if TYPE_CHECKING:
    from lt2_platform.storage import Storage

# By file name: what the readers rely on, and what to do when it is not there.
_RECORDS: dict[str, tuple[Kinds, str]] = {
    "done.json": (
        {"attempt": int, "ended": NUMBER, "result": dict, "provenance": dict},
        "delete it to run the step again",
    ),
    "lease.json": (LEASE, "delete it once no process runs this step"),
    "state.json": ({"state": str}, "delete it: only that attempt's own record is lost"),
    "spec.json": ({"needs": dict, "config": dict}, "delete it and run its recipe again, which rewrites it"),
    "dag.json": ({"workflow": str, "ids": dict}, "delete it and run its recipe again, which rewrites it"),
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
        return parse(data, kinds)
    except ValueError as error:
        raise UnreadableRecordError(f"{storage.join(path)} is not readable ({error}); {remedy}") from error
