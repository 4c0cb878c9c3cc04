"""The runs table: filter, sort and page over the index, and which settings differ among the runs shown."""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass, field
from datetime import UTC, datetime
from typing import Any

from lt2.config import ConfigError
from lt2_dashboards.queries import Snapshot
from lt2_dashboards.runs.silent import STATUS, Moment

PAGE_SIZE = 100
MAX_QUERY = 500  # characters
STATUSES = ("running", "stalled", "finished", "failed")
TEXTS = ("run", "workflow", "status", "note")
BUILT_IN = (*TEXTS, "created", "updated", "step")
SHOWN_AS = {"live": "running"}  # what pages call a status
MAX_VARYING = 40  # settings offered as columns

_TERM = re.compile(r"(?P<key>[^\s=<>!~]+)(?P<op>>=|<=|!=|=|<|>|~)(?P<value>\S*)")
_ORDER = ("<", ">", "<=", ">=")


@dataclass
class _Picked:
    """The runs that a query selects: a SQL condition on `r` (runs with their status) and its bound parameters."""

    snapshot: Snapshot
    at: Moment
    conditions: list[str] = field(default_factory=list)
    parameters: list[Any] = field(default_factory=list)

    def add(self, condition: str, *parameters: Any) -> None:
        self.conditions.append(condition)
        self.parameters += parameters

    def query(self, sql: str, *parameters: Any) -> list[tuple[Any, ...]]:
        """Run `sql`, in which `picked` is the table of selected runs."""
        where = " AND ".join(self.conditions) or "true"
        head = f"WITH r AS (SELECT *, {STATUS} AS status FROM runs), picked AS (SELECT * FROM r WHERE {where}) "
        return self.snapshot.query(head + sql, [*self.at.bound, *self.parameters, *parameters])


def runs_page(
    snapshot: Snapshot,
    *,
    at: Moment,
    q: str = "",
    status: str = "",
    sort: str = "-created",
    page: int = 1,
) -> dict[str, Any]:
    """One page of the runs that match `q` and `status` (a comma list), with the settings and metrics they differ in.

    `q` is words (parts of the name of the run or its workflow, or of its note) and conditions such as `lr>1e-3`,
    `ratio=1:4`, `loss<3`, `type~gdn`. `sort` is a column, with '-' in front for descending. Raises
    ConfigError for what cannot be understood.
    """
    picked = _pick(snapshot, at, q)
    counts = dict(picked.query("SELECT status, count(*) FROM picked GROUP BY status"))
    _only(picked, status)
    total = picked.query("SELECT count(*) FROM picked")[0][0]
    page = min(max(page, 1), max(1, -(-total // PAGE_SIZE)))  # a link to a page that has gone shows the last one
    rows = _rows(picked, sort, PAGE_SIZE, (page - 1) * PAGE_SIZE)
    varying = _varying(picked, total)
    names = [row["run"] for row in rows]
    for row, settings in zip(rows, _by_run(snapshot, "config", "key", "text", names, varying)):
        row["config"] = settings
    for row, numbers in zip(rows, _by_run(snapshot, "numbers", "metric", "value", names, None)):
        row["numbers"] = numbers
    metrics = picked.query(
        "SELECT metric, count(*) FROM numbers WHERE run IN (SELECT run FROM picked) GROUP BY metric "
        "ORDER BY starts_with(metric, 'depth/'), 2 DESC, 1"  # other depths of a model come after what it is
    )
    logged = picked.query(
        "SELECT metric, count(*) FROM metrics WHERE run IN (SELECT run FROM picked) GROUP BY metric ORDER BY 2 DESC, 1 "
        "LIMIT ?",
        MAX_VARYING,
    )
    return {
        "total": total,
        "all": snapshot.query("SELECT count(*) FROM runs")[0][0],
        "counts": counts,
        "page": page,
        "page_size": PAGE_SIZE,
        "rows": rows,
        "varying": varying,
        "metrics": [metric for metric, _ in metrics[:MAX_VARYING]],
        "logged": [metric for metric, _ in logged],
        "skipped": list(snapshot.skipped),
    }


def whole_table(snapshot: Snapshot, *, at: Moment, q: str, status: str, sort: str) -> tuple[list[str], list[list[Any]]]:
    """(columns, rows) of all runs that match, in the order of `runs_page`: every setting in which they differ, and
    every result."""
    picked = _pick(snapshot, at, q)
    _only(picked, status)
    runs = _rows(picked, sort, None, 0)
    names = [run["run"] for run in runs]
    keys = sorted(_varying(picked, len(runs), None))
    settings = _by_run(snapshot, "config", "key", "text", names, keys)
    numbers = _by_run(snapshot, "numbers", "metric", "value", names, None)
    metrics = sorted(set().union(*numbers))
    head = ("run", "workflow", "status", "note", "step", "total")
    rows = [
        [
            *map(run.get, head),
            *map(_utc, (run["created"], run["updated"])),
            *map(told.get, keys),
            *map(has.get, metrics),
        ]
        for run, told, has in zip(runs, settings, numbers)
    ]
    return [*head, "started (UTC)", "last update (UTC)", *keys, *metrics], rows


def matching(
    snapshot: Snapshot, *, at: Moment, q: str, metric: str, limit: int
) -> tuple[list[tuple[str, float]], list[str]]:
    """((run, last value of `metric`) of the runs that match `q` and have a finite one, the settings they differ in)."""
    picked = _pick(snapshot, at, q)
    picked.add("run IN (SELECT run FROM numbers WHERE metric = ? AND isfinite(value))", metric)
    runs = picked.query(
        "SELECT picked.run, any_value(value) FROM picked JOIN numbers ON numbers.run = picked.run AND metric = ? "
        "GROUP BY picked.run, created ORDER BY created DESC, picked.run LIMIT ?",
        metric,
        limit,
    )
    return runs, _varying(picked, picked.query("SELECT count(*) FROM picked")[0][0])


def how_many(snapshot: Snapshot, *, at: Moment, q: str, metrics: Sequence[str]) -> dict[str, int]:
    """By each of `metrics` how many of the runs that match `q` have a finite value of it."""
    found = _pick(snapshot, at, q).query(
        "SELECT metric, count(DISTINCT run) FROM picked JOIN numbers USING (run) "
        "WHERE list_contains(?, metric) AND isfinite(value) GROUP BY metric",
        list(metrics),
    )
    return dict.fromkeys(metrics, 0) | dict(found)


def unusable(snapshot: Snapshot, *, at: Moment, q: str, metric: str) -> list[str]:
    """The runs that match `q` and have a value of `metric` that is not finite."""
    picked = _pick(snapshot, at, q)
    picked.add("run IN (SELECT run FROM numbers WHERE metric = ? AND NOT isfinite(value))", metric)
    return [run for (run,) in picked.query("SELECT run FROM picked ORDER BY created DESC, run")]


def _pick(snapshot: Snapshot, at: Moment, q: str) -> _Picked:
    if len(q) > MAX_QUERY:
        raise ConfigError(f"the filter has {len(q)} characters; at most {MAX_QUERY}")
    picked = _Picked(snapshot, at)
    for term in q.split():
        match = _TERM.fullmatch(term)
        if match is None:
            picked.add("contains(lower(concat_ws(' ', run, workflow, note)), lower(?))", term)
        elif match["key"] in BUILT_IN:
            _built_in(picked, **match.groupdict())
        else:
            _setting_or_metric(picked, **match.groupdict())
    return picked


def _utc(seconds: float) -> str:
    return datetime.fromtimestamp(seconds, UTC).strftime("%Y-%m-%d %H:%M:%S")


def _only(picked: _Picked, status: str) -> None:
    if wanted := [name for name in status.split(",") if name in STATUSES]:
        picked.add(f"status IN ({', '.join('?' * len(wanted))})", *wanted)


def _built_in(picked: _Picked, key: str, op: str, value: str) -> None:
    if key in TEXTS:
        if op in _ORDER:
            raise ConfigError(f"{key}{op}{value}: {key} is text; use =, != or ~")
        text = f"coalesce({key}, '')"
        condition = {"=": f"{text} = ?", "!=": f"{text} <> ?", "~": f"contains(lower({text}), lower(?))"}[op]
        return picked.add(condition, SHOWN_AS.get(value, value) if key == "status" else value)
    if op == "~":
        raise ConfigError(f"{key}{op}{value}: {key} is a number; use =, !=, <, >, <= or >=")
    return picked.add(f"{key} {op} ?", _number(key, op, value))


def _setting_or_metric(picked: _Picked, key: str, op: str, value: str) -> None:
    """A condition holds if any setting called `key` (or ending in `.key`), or any metric so called, fulfils it."""
    suffix = f".{key}"
    known = picked.snapshot.query(
        "SELECT (SELECT count(*) FROM config WHERE key = ? OR ends_with(key, ?)) + "
        "(SELECT count(*) FROM numbers WHERE metric = ? OR ends_with(metric, ?))",
        [key, suffix, key, f"/{key}"],
    )
    if known[0][0] == 0:
        raise ConfigError(f"no setting or metric is called {key[:60]!r}; try a word of the run's name instead")
    if op == "~":
        setting, bound = "contains(lower(c.text), lower(?))", [value]
        metric, metric_bound = "false", []
    elif op in _ORDER:
        number = _number(key, op, value)
        setting, bound = f"c.number {op} ?", [number]
        metric, metric_bound = f"n.value {op} ?", [number]
    else:
        setting, bound = "(c.text = ? OR c.number = TRY_CAST(? AS DOUBLE))", [value, value]
        metric, metric_bound = "n.value = TRY_CAST(? AS DOUBLE)", [value]
    negate = "NOT " if op == "!=" else ""
    picked.add(
        f"{negate}(run IN (SELECT run FROM config c WHERE (c.key = ? OR ends_with(c.key, ?)) AND {setting}) "
        f"OR run IN (SELECT run FROM numbers n WHERE (n.metric = ? OR ends_with(n.metric, ?)) AND {metric}))",
        *(key, suffix, *bound),
        *(key, f"/{key}", *metric_bound),
    )


def _number(key: str, op: str, value: str) -> float:
    try:
        return float(value)
    except ValueError as error:
        raise ConfigError(f"{key}{op}{value[:40]}: {value[:40]!r} is not a number") from error


def _rows(picked: _Picked, sort: str, limit: int | None, offset: int) -> list[dict[str, Any]]:
    direction = "DESC" if sort.startswith("-") else "ASC"
    column = sort.removeprefix("-")
    if column in BUILT_IN:
        join, order, bound = "", f"{column} {direction}", []
    else:
        join = (
            "LEFT JOIN (SELECT run AS run_, any_value(number) AS number, any_value(text) AS text FROM "
            "(SELECT run, number, text FROM config WHERE key = ? "
            "UNION ALL SELECT run, value, NULL FROM numbers WHERE metric = ?) GROUP BY run) ON run_ = run "
        )
        order, bound = f"number {direction} NULLS LAST, text {direction} NULLS LAST", [column, column]
    columns = ("run", "workflow", "status", "note", "created", "updated", "step", "total")
    found = picked.query(
        f"SELECT {', '.join(columns)} FROM picked {join}ORDER BY {order}, run LIMIT ? OFFSET ?",
        *bound,
        limit,
        offset,
    )
    return [dict(zip(columns, row)) for row in found]


def _varying(picked: _Picked, total: int, limit: int | None = MAX_VARYING) -> list[str]:
    """Settings that are not the same in all picked runs: those with several values before those that some runs lack,
    kinds first (others belong to them), then those that most runs have, then those that all have, then those of few
    values.
    """
    found = picked.query(
        "SELECT key FROM config WHERE run IN (SELECT run FROM picked) GROUP BY key "
        "HAVING count(DISTINCT text) > 1 OR count(*) < ? "
        "ORDER BY count(DISTINCT text) < 2, NOT ends_with(key, '.type'), 2 * count(*) FILTER (text <> 'null') < ?, "
        "count(*) < ?, count(DISTINCT text), key LIMIT ?",
        total,
        total,
        total,
        limit,
    )
    return [key for (key,) in found]


def _by_run(
    snapshot: Snapshot, table: str, key: str, value: str, runs: list[str], keys: list[str] | None
) -> list[dict[str, Any]]:
    condition, bound = ("", []) if keys is None else (f"AND list_contains(?, {key})", [keys])
    found = snapshot.query(
        f"SELECT run, {key}, {value} FROM {table} WHERE list_contains(?, run) {condition}", [runs, *bound]
    )
    by_run: dict[str, dict[str, Any]] = {run: {} for run in runs}
    for run, name, content in found:
        by_run[run][name] = content
    return [by_run[run] for run in runs]
