"""The Python files that a record names: the `source` of an objective, a mixer, a task, … of the user's own."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any


def python_sources(record: Any) -> Iterator[str]:
    """The path of every `source` in a record that is an existing Python file, as it is written there."""
    if isinstance(record, dict):
        for key, item in record.items():
            yield from [item] if key == "source" and is_python_file(item) else python_sources(item)
    elif isinstance(record, list):
        for item in record:
            yield from python_sources(item)


def is_python_file(value: Any) -> bool:
    return isinstance(value, str) and value.endswith(".py") and Path(value).expanduser().is_file()


def is_inside(source: str) -> bool:
    """Whether the path leads from the working directory into it, so that a copy can have the same."""
    path = Path(source)
    return not path.is_absolute() and ".." not in path.parts and not source.startswith("~")
