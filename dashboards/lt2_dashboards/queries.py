"""The dashboard's view of a results store: an index in DuckDB that follows the store, and curves of single runs."""

from __future__ import annotations

import json
import threading
import time
from collections import OrderedDict
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import duckdb
import pyarrow as pa

from lt2_platform.results import Curves, ResultsStore, RunInfo, flatten
from lt2_platform.results_index import Index
from lt2_platform.storage import Storage

FRESH_SECONDS = 0.5  # one page asks several questions at once; the store is listed once for all of them
CACHED_CURVES = 64  # about 1 MB each


@dataclass(frozen=True)
class Snapshot:
    """The store at one moment. `tables` holds runs, config (one row per run and key), numbers (last values, results of
    evaluations) and evals; every text that came from a user reaches SQL as a bound parameter."""

    version: str
    index: Index
    tables: duckdb.DuckDBPyConnection

    def query(self, sql: str, parameters: list[Any] | None = None) -> list[tuple[Any, ...]]:
        # A cursor per call: DuckDB connections may not be shared by threads, cursors of one database may.
        return self.tables.cursor().execute(sql, parameters or []).fetchall()


class Source:
    """Follows one storage root. Safe to use from several threads; keeps nothing that it cannot read again."""

    def __init__(self, root: str | None, *, clock: Callable[[], float] = time.time):
        self.storage = Storage(root)
        self.store = ResultsStore(self.storage)
        self.clock = clock
        self._lock = threading.Lock()
        self._snapshot: Snapshot | None = None
        self._checked = float("-inf")
        self._curves: OrderedDict[str, tuple[tuple[str, float], Curves]] = OrderedDict()

    def snapshot(self) -> Snapshot:
        """The newest picture of the store, at most half a second old."""
        with self._lock:
            now = time.monotonic()
            if self._snapshot is not None and now - self._checked < FRESH_SECONDS:
                return self._snapshot
            version = self.store.version()
            if self._snapshot is None or self._snapshot.version != version:
                index = self.store.index()
                self._snapshot = Snapshot(version, index, load_tables(index))
            self._checked = now
            return self._snapshot

    def curves(self, run_id: str) -> Curves:
        """Downsampled metrics of a run that the index knows."""
        run = self.run(run_id)
        stamp = (run.state, run.updated)
        with self._lock:
            if run_id in self._curves and self._curves[run_id][0] == stamp:
                self._curves.move_to_end(run_id)
                return self._curves[run_id][1]
        curves = self.store.curves(run_id)
        with self._lock:
            self._curves[run_id] = (stamp, curves)
            while len(self._curves) > CACHED_CURVES:
                self._curves.popitem(last=False)
        return curves

    def run(self, run_id: str) -> RunInfo:
        """Raises KeyError for a run that is not in the store, whatever its name looks like."""
        return self.snapshot().index.runs[run_id]


def load_tables(index: Index) -> duckdb.DuckDBPyConnection:
    """The index as DuckDB tables, in memory."""
    runs: dict[str, list[Any]] = {name: [] for name in ("run", "state", "created", "updated", "step", "total")}
    config: dict[str, list[Any]] = {name: [] for name in ("run", "key", "text", "number")}
    numbers: dict[str, list[Any]] = {name: [] for name in ("run", "metric", "step", "value")}
    evals: dict[str, list[Any]] = {name: [] for name in ("run", "name", "task", "metric", "value", "row")}
    for run_id, run in index.runs.items():
        flat = flatten(run.config)
        _append(runs, run_id, run.state, run.created, run.updated, run.step, total_steps(flat))
        for key, value in flat.items():
            _append(config, run_id, key, as_text(value), float(value) if _is_number(value) else None)
        for metric, (step, value) in run.last.items():
            _append(numbers, run_id, metric, step, value)
    for run_id, name, row in index.evals:
        value = float(row["value"]) if _is_number(row.get("value")) else None
        task, metric = (str(row[key]) if row.get(key) is not None else None for key in ("task", "metric"))
        _append(evals, run_id, name, task, metric, value, json.dumps(row))
        if value is not None:
            _append(numbers, run_id, "/".join(p for p in (name, task, metric) if p), row.get("step"), value)
    connection = duckdb.connect(":memory:", config={"threads": 2, "memory_limit": "300MB"})
    types = {"created": pa.float64(), "updated": pa.float64(), "step": pa.int64(), "total": pa.int64()}
    types |= {"number": pa.float64(), "value": pa.float64()}
    for name, columns in {"runs": runs, "config": config, "numbers": numbers, "evals": evals}.items():
        table = pa.table({c: pa.array(values, types.get(c, pa.string())) for c, values in columns.items()})
        connection.register(f"{name}_arrow", table)
        connection.execute(f"CREATE TABLE {name} AS SELECT * FROM {name}_arrow")
        connection.unregister(f"{name}_arrow")
    return connection


def total_steps(config: dict[str, Any]) -> int | None:
    """How many steps a run was asked for, from the flattened config, or None if it does not say."""
    for key in ("train.steps", "steps", *(key for key in config if key.endswith(".steps"))):
        if isinstance(config.get(key), int):
            return config[key]
    return None


def as_text(value: Any) -> str:
    """A setting as shown and compared: text as it is, everything else as JSON."""
    return value if isinstance(value, str) else json.dumps(value, ensure_ascii=False)


def _append(columns: dict[str, list[Any]], *values: Any) -> None:
    for column, value in zip(columns.values(), values):
        column.append(value)


def _is_number(value: Any) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool)
