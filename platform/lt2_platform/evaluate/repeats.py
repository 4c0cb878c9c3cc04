"""Which rows of evaluations are results of a model, and which of several counts when there are several."""

from __future__ import annotations

import math
from collections.abc import Hashable, Iterable, Mapping, Sequence
from typing import Any, TypeVar

Key = TypeVar("Key", bound=Hashable)
Row = TypeVar("Row", bound=Mapping[str, Any])

READINGS = {"layer": "diagnostics", "position": "positions"}
"""By the key that a row has of them, the evaluations whose rows are points of a curve and no results by themselves."""


def is_reading(row: Mapping[str, Any]) -> bool:
    """Whether a row is a point of a curve over layers or positions: many to a metric, for figures, not for tables."""
    return not READINGS.keys().isdisjoint(row)


def at_own_depth(rows: Sequence[Row], n_loops: int) -> list[Row]:
    """The rows of one evaluation that are of the model as it was trained: at `n_loops` and, if it halts, with its own
    halting and threshold."""
    halts = any(row.get("early_exit") for row in rows)
    own = n_loops, halts, None
    return [row for row in rows if (row["n_loops"], bool(row.get("early_exit")), row.get("exit_threshold")) == own]


def standing(row: Mapping[str, Any]) -> tuple[int, bool, int]:
    """A rank: if a run has several rows on one task and metric, the highest counts, and among equals the latest.

    A later checkpoint's `step` stands higher. At one step, rows that say they had no `limit` stand above quick looks;
    those that say nothing (of tasks without limits, or stored before rows said so) compare with quick looks by `n`.
    """
    return _count(row.get("step")), "limit" in row and row["limit"] is None, _count(row.get("n"))


def counting(rows: Iterable[tuple[Key, Row]]) -> dict[Key, Row]:
    """For each key the row that counts (see `standing`). Rows are in the order of writing, keys as they first come."""
    found: dict[Key, Row] = {}
    for key, row in rows:
        if key not in found or standing(row) >= standing(found[key]):
            found[key] = row
    return found


def texts(rows: Iterable[Mapping[str, Any]]) -> int:
    """On how many texts perplexities of one name were measured: of other `data`, or of another part (`n` tokens) of it.

    Rows from before they said their data are told apart by `n` alone.
    """
    rows = list(rows)
    return max(len({row[key] for row in rows if row.get(key) is not None}) for key in ("data", "n"))


def few_of(limits: Iterable[int]) -> str:
    """The range of the limits under which tasks were asked: "60", "60 to 100", or "" if there were none."""
    known = sorted(limits)
    return " to ".join(str(limit) for limit in dict.fromkeys((*known[:1], *known[-1:])))


def quick_look(rows: Iterable[Mapping[str, Any]], tasks: Iterable[str]) -> str:
    """What to say of one run's evaluation rows if those of `tasks` that count are of a few items only, else ""."""
    wanted = set(tasks)
    kept = counting(((row.get("task"), row.get("metric")), row) for row in rows if row.get("task") in wanted)
    few = few_of({row["limit"] for row in kept.values() if row.get("limit") is not None})
    return f"a quick look, {few} items a task" if few else ""


def other_text(rows: Iterable[Mapping[str, Any]]) -> str:
    """What to say of one run's evaluation rows if its perplexities are of several texts, else ""."""
    mine = [row for row in rows if row.get("task") == row.get("metric") == "perplexity"]
    return f"PPL is on one of {count} texts" if (count := texts(mine)) > 1 else ""


def _count(value: Any) -> int:
    known = isinstance(value, int | float) and not isinstance(value, bool) and 0 <= value < math.inf
    return int(value) if known else -1


def _count_sql(key: str) -> str:
    return f"COALESCE(TRY_CAST(regexp_extract(row, '\"{key}\": ([0-9]+)', 1) AS BIGINT), -1)"


STANDING_SQL = f"({_count_sql('step')}, contains(row, '\"limit\": null'), {_count_sql('n')})"
"""`standing` as DuckDB's SQL, of rows as JSON in a column `row`; JSON functions would stop at a NaN."""
