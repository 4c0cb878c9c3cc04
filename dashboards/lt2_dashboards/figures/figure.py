"""What a figure is, and how a query string becomes the arguments of its function."""

from __future__ import annotations

import csv
import inspect
import io
import typing
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any

from pydantic import TypeAdapter, ValidationError

from lt2.config import ConfigError
from lt2_dashboards.queries import Source

MAX_LIST = 50  # names in one list parameter
MAX_TEXT = 200  # characters in one name


@dataclass(frozen=True)
class Figure:
    """A chart as ECharts options (colours and fonts come from the page's theme) and the same numbers as a table.

    `columns` name the table's columns with their unit in brackets; `make_rows` returns its rows of str, int, float or
    None, and is called only when somebody looks at the table. Rows whose numbers come from the paper say so in a column
    called "source". `notes` are sentences shown under the chart; `links` has, by note, the arguments with which the
    figure shows what that note says is missing: pages link to it. `produce` is the command that makes the data, given
    when this store has none of its own in the figure.
    """

    title: str
    option: dict[str, Any]
    columns: list[str]
    make_rows: Callable[[], list[list[Any]]]
    notes: list[str] = field(default_factory=list)
    produce: str = ""
    links: dict[str, dict[str, str]] = field(default_factory=dict)

    @cached_property
    def rows(self) -> list[list[Any]]:
        return self.make_rows()

    def csv(self) -> str:
        """The table as CSV; a text that a spreadsheet would run as a formula is prefixed with an apostrophe."""
        buffer = io.StringIO()
        writer = csv.writer(buffer, lineterminator="\n")
        writer.writerow(map(_cell, self.columns))  # a metric or a setting may be called anything too
        writer.writerows([_cell(value) for value in row] for row in self.rows)
        return buffer.getvalue()


def _cell(value: Any) -> Any:
    return f"'{value}" if isinstance(value, str) and value[:1] in ("=", "+", "-", "@", "\t", "\r") else value


def draw(function: Callable[..., Figure], source: Source, query: Mapping[str, str]) -> Figure:
    """Call a figure function with the text values of a query string. Raises ConfigError for one that it cannot take."""
    hints = typing.get_type_hints(function)
    parameters = {n: p for n, p in inspect.signature(function).parameters.items() if p.kind is p.KEYWORD_ONLY}
    arguments = {}
    for name, text in query.items():
        if name not in parameters:
            raise ConfigError(f"{function.__name__}: no parameter {name[:40]!r}; it takes {', '.join(parameters)}")
        arguments[name] = _parse(function.__name__, name, hints[name], text)
    missing = [n for n, p in parameters.items() if p.default is p.empty and n not in arguments]
    if missing:
        name = missing[0]
        raise ConfigError(f"{function.__name__} needs {name}: choose them above, or add ?{name}=… to the address")
    return function(source, **arguments)


def _parse(figure: str, name: str, kind: Any, text: str) -> Any:
    value: Any = text
    if list in (typing.get_origin(kind), *map(typing.get_origin, typing.get_args(kind))):  # or list[…] | None
        value = [item for item in text.split(",") if item]
        if len(value) > MAX_LIST:
            raise ConfigError(f"{figure}: {len(value)} values for {name!r}; at most {MAX_LIST}")
    if any(len(item) > MAX_TEXT for item in (value if isinstance(value, list) else [value])):
        raise ConfigError(f"{figure}: a value of {name!r} is longer than {MAX_TEXT} characters")
    try:
        return TypeAdapter(kind).validate_python(value)
    except ValidationError as error:
        raise ConfigError(f"{figure}: {name}={text[:40]!r}: {error.errors()[0]['msg']}") from error


def describe(function: Callable[..., Figure]) -> dict[str, Any]:
    """Name, first paragraph of the docstring and parameters, for the list of figures."""
    hints = typing.get_type_hints(function)
    parameters = [p for p in inspect.signature(function).parameters.values() if p.kind is p.KEYWORD_ONLY]
    return {
        "name": function.__name__,
        "about": " ".join((inspect.getdoc(function) or "").partition("\n\n")[0].split()),
        "parameters": [
            {"name": p.name, "required": p.default is p.empty, **_control(hints[p.name], p.default)} for p in parameters
        ],
    }


def _control(kind: Any, default: Any) -> dict[str, Any]:
    """How a page lets a parameter be set: one of "choices", an on/off switch, or text."""
    if typing.get_origin(kind) is typing.Literal:
        return {"kind": "choice", "choices": list(typing.get_args(kind)), "default": default}
    shown = default if isinstance(default, str | int) else ""
    return {"kind": "switch" if kind is bool else "text", "default": shown}


def rounded(value: float | None) -> float | None:
    """Six significant digits, enough for any screen and a third of the bytes; None for what cannot be drawn."""
    if value is None or value != value or value in (float("inf"), float("-inf")):
        return None
    return float(f"{value:.6g}")
