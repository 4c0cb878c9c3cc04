"""The records of the workflow engine as one answer reads them: one that cannot be read is named, not passed over."""

from __future__ import annotations

from typing import Any

from lt2.config import ConfigError
from lt2_platform.results.parts import read_many, unreadable
from lt2_platform.results.store import NAME
from lt2_platform.step_records import LEASE, parse
from lt2_platform.storage import Storage

# What the readers rely on. Only here a field may not be missing; elsewhere it may: older versions wrote fewer.
_REQUIRED = {"lease.json": LEASE, "state.json": {"state": str}}
_FIELDS: dict[str, type | tuple[type, ...]] = {
    "ids": dict,
    "part_of": (str, type(None)),
    "shared": bool,
    "needs": dict,
    "config": dict,
    "attempt": int,
    "state": str,
    "error": (str, type(None)),
    "started": (int, float, type(None)),
    "ended": (int, float, type(None)),
    "time": (int, float),
    "ttl_s": (int, float),
}


class NotThereError(ConfigError):
    """What an address names is not in the storage; pages and scripts are answered 404."""


def is_name(name: Any) -> bool:
    """Whether `name` can be a folder of ours."""
    return isinstance(name, str) and NAME.fullmatch(name) is not None


def checked(name: str) -> str:
    """`name` if it can be a folder of ours. Raises ConfigError: nothing else is ever joined to a path."""
    if not is_name(name):
        raise ConfigError(f"{name[:60]!r} is not the name of a workflow or step")
    return name


class Records:
    """Reads the records of one storage for one answer; `skipped` has, by path, a line for each that is damaged.

    Nothing is kept between answers. Safe to use from several threads.
    """

    def __init__(self, storage: Storage):
        self.storage = storage
        self.skipped: dict[str, str] = {}

    def read(self, path: str) -> dict[str, Any] | None:
        """The record at `path`; None if there is none or, then with a line in `skipped`, if it is damaged."""
        return self.read_all([path])[0]

    def required(self, path: str, missing: str) -> dict[str, Any]:
        """`read`. Raises NotThereError, saying `missing`, where there is none, and ConfigError where it is damaged."""
        found = self.read(path)
        if found is None:
            raise ConfigError(self.skipped[path]) if path in self.skipped else NotThereError(missing)
        return found

    def read_all(self, paths: list[str]) -> list[dict[str, Any] | None]:
        """`read` of each path, in parallel."""
        return [self._parsed(path, data) for path, data in zip(paths, read_many(self.storage, paths))]

    def lines(self) -> list[str]:
        """The lines of `skipped` in the order of their paths, the same however the reading went."""
        return [line for _, line in sorted(self.skipped.items())]

    def _parsed(self, path: str, data: bytes | None) -> dict[str, Any] | None:
        try:
            return None if data is None else _checked(parse(data, _REQUIRED.get(path.rsplit("/", 1)[-1], {})))
        except ValueError as error:
            self.skipped[path] = unreadable(path, error)
            return None


def _checked(value: dict[str, Any]) -> dict[str, Any]:
    """The record `value`. Raises ValueError for what no version of the engine writes."""
    for key, kind in _FIELDS.items():
        if key in value and not isinstance(value[key], kind):
            raise ValueError(f"{key!r} is a {type(value[key]).__name__}")
    if not all(is_name(step_id) for step_id in value.get("ids", {}).values()):
        raise ValueError("'ids' has a value that is not a step's name")
    return value
