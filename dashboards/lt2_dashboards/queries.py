"""The dashboard's view of a results store: its tables in DuckDB, following the store, and curves of single runs."""

from __future__ import annotations

import json
import os
import threading
import time
from collections import OrderedDict
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import duckdb

from lt2_platform.evaluate.repeats import READINGS, STANDING_SQL
from lt2_platform.results.index import Layers, read_layers
from lt2_platform.results.store import NOTE, Curves, ResultsStore, RunInfo
from lt2_platform.results.tables import Eval, Tables
from lt2_platform.storage import S3, Storage

FRESH_SECONDS = 0.5  # one page asks several questions at once; the store is listed once for all of them
# SQL: which evaluation rows are a validation perplexity, of a finished run or measured while it trained; one with a
# name of its own is another task, as in `lt2 paper-table`
PERPLEXITY = (
    "(metric IN ('perplexity', 'ppl') AND (name = 'perplexity' OR "
    "name IN ('validation', 'training') AND coalesce(task, 'perplexity') = 'perplexity'))"
)
# SQL: of an evaluation row's JSON, the depth it was measured at; NULL where it says none
_LOOPS = "TRY_CAST(regexp_extract(e.row, '\"n_loops\": ([0-9]+)', 1) AS BIGINT)"
_EXITS = "(nullif(regexp_extract(e.row, '\"early_exit\": (true|false)', 1), '') = 'true')"
_AT = "coalesce(' at ' || nullif(regexp_extract(e.row, '\"exit_threshold\": ([0-9.e-]+)', 1), ''), '')"
_IN_WORDS = f"{_LOOPS} || if({_LOOPS} = 1, ' loop', ' loops') || if({_EXITS}, ', early exit' || {_AT}, '')"
_DEPTH = f"(CASE WHEN name = 'depth' THEN {_IN_WORDS} END)"
_CURVES = ", ".join(f"'{name}'" for name in READINGS.values())  # SQL: evaluations whose rows are no results
# SQL: of a run's entry, the id of the workflow that started it; NULL for a run of no workflow
_WORKFLOW = """nullif(regexp_extract(entry, '"info": \\{"workflow": "([^"]+)"', 1), '')"""
_OWN = f"""
CREATE VIEW own AS SELECT e.rowid AS place FROM evals e LEFT JOIN (
    SELECT run, max(number) FILTER (key IN ('model.n_loops', 'n_loops')) AS trained,
        bool_or((key LIKE 'model.halting%' OR key LIKE 'halting%') AND text <> 'null') AS halts
    FROM config GROUP BY run
) USING (run)
WHERE e.name NOT IN ('depth', {_CURVES})
    AND coalesce({_LOOPS} = trained, true) AND coalesce(trained IS NULL OR {_EXITS} = halts, true)
"""
# SQL: what the result of an evaluation row is called, as `results.rows.result_name`
RESULT = f"concat_ws('/', name, task, metric, {_DEPTH})"
CACHED_ANSWERS = 32
CACHED_CURVES = 64  # about 1 MB each


@dataclass(frozen=True)
class Snapshot:
    """The store at one moment, as the tables of results/tables.py and two more; `runs` also says of which `workflow` a
    run is, and the newest `note` on it ('' for none).

    numbers  run, metric, value: last values and evaluations together
    own      place: rowid in `evals` of the results of a model as it was trained, at no other depth

    Every text that came from a user reaches SQL as a bound parameter.
    """

    version: str
    layers: Layers
    connection: duckdb.DuckDBPyConnection
    answers: dict[tuple[Any, ...], Any] = field(default_factory=dict)

    @property
    def skipped(self) -> tuple[str, ...]:
        """Files of the index that could not be read."""
        return self.layers.skipped + self.layers.journal.skipped

    def query(self, sql: str, parameters: list[Any] | None = None) -> list[tuple[Any, ...]]:
        # A cursor per call: DuckDB connections may not be shared by threads, cursors of one database may.
        return self.connection.cursor().execute(sql, parameters or []).fetchall()

    def runs(self, run_ids: list[str]) -> dict[str, RunInfo]:
        """The known ones among `run_ids`, in that order."""
        found = dict(self.query("SELECT run, entry FROM runs WHERE list_contains(?, run)", [run_ids]))
        return {run: RunInfo.from_json(json.loads(found[run])) for run in run_ids if run in found}

    def evals(self, run_ids: list[str]) -> list[Eval]:
        """Evaluation rows of some runs in the order of writing, without notes."""
        found = self.query(
            "SELECT run, name, row FROM evals WHERE list_contains(?, run) AND name <> ? ORDER BY rowid", [run_ids, NOTE]
        )
        return [(run, name, json.loads(row)) for run, name, row in found]

    def notes(self, run_id: str) -> list[dict[str, Any]]:
        """{"note", "author", "time"} of a run, newest first; none from before the last one that took them away."""
        found = self.query("SELECT row FROM evals WHERE run = ? AND name = ? ORDER BY rowid", [run_id, NOTE])
        return _standing_notes([json.loads(row) for (row,) in found])


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
        self._was_there = False

    def check_there(self) -> None:
        """Raise FileNotFoundError where a folder that was there has gone or is empty, as a mount's is without its disk.

        Those who read it would take it for a store of no runs.
        """
        if self.storage.root.startswith(S3):
            return
        try:
            with os.scandir(self.storage.root) as entries:
                there = next(entries, None) is not None
        except (FileNotFoundError, NotADirectoryError):
            there = False
        if self._was_there and not there:
            raise FileNotFoundError("it is gone or empty: unmounted, moved or removed; trying again")
        self._was_there = there

    def snapshot(self) -> Snapshot:
        """The newest picture of the store, looked at by this call or in the half second before it."""
        with self._lock:
            if self._snapshot is not None and time.monotonic() - self._checked < FRESH_SECONDS:
                return self._snapshot
            version = self.store.version()
            if self._snapshot is None or self._snapshot.version != version:
                layers = read_layers(self.storage, self._snapshot.layers if self._snapshot else None)
                self._snapshot = Snapshot(version, layers, load(layers.tables()))
            self._checked = time.monotonic()  # after the look: who waited for it shares it, however slow it was
            return self._snapshot

    def remembered(self, question: tuple[Any, ...], answer: Callable[[Snapshot], Any]) -> Any:
        """`answer` of the newest snapshot, computed once per question until the store changes: pages poll."""
        snapshot = self.snapshot()
        found = snapshot.answers.get(question)
        if found is None:
            if len(snapshot.answers) >= CACHED_ANSWERS:
                snapshot.answers.clear()
            found = snapshot.answers[question] = answer(snapshot)
        return found

    def curves(self, run: RunInfo) -> Curves:
        """Downsampled metrics of a run, read again only when its writer has spoken since."""
        stamp = (run.state, run.updated)
        with self._lock:
            if run.run_id in self._curves and self._curves[run.run_id][0] == stamp:
                self._curves.move_to_end(run.run_id)
                return self._curves[run.run_id][1]
        curves = self.store.curves(run.run_id)
        with self._lock:
            self._curves[run.run_id] = (stamp, curves)
            while len(self._curves) > CACHED_CURVES:
                self._curves.popitem(last=False)
        return curves


def load(tables: Tables) -> duckdb.DuckDBPyConnection:
    """The tables in a database in memory."""
    connection = duckdb.connect(":memory:", config={"threads": 2, "memory_limit": "300MB"})
    for name, table in tables.items():
        connection.register("arrow", table)
        more = f", {_WORKFLOW} AS workflow" if name == "runs" else ""
        connection.execute(f"CREATE TABLE {name} AS SELECT *{more} FROM arrow")
        connection.unregister("arrow")
    connection.execute(
        "CREATE TABLE numbers AS SELECT run, metric, value FROM metrics UNION ALL "
        f"SELECT run, {RESULT} AS metric, arg_max(value, ({STANDING_SQL}, rowid)) "
        f"FROM evals e WHERE value IS NOT NULL AND name NOT IN ({_CURVES}) GROUP BY ALL"
    )
    connection.execute(_OWN)
    _add_notes(connection)
    return connection


def _add_notes(connection: duckdb.DuckDBPyConnection) -> None:
    """The column `note` of `runs`. Texts are read here: JSON's escapes would stay in what SQL cuts out of a row."""
    rows: dict[str, list[dict[str, Any]]] = {}
    found = connection.execute("SELECT run, row FROM evals WHERE name = ? ORDER BY rowid", [NOTE]).fetchall()
    for run, row in found:
        rows.setdefault(run, []).append(json.loads(row))
    newest = [(run, notes[0]["note"]) for run, each in rows.items() if (notes := _standing_notes(each))]
    connection.execute("ALTER TABLE runs ADD COLUMN note VARCHAR DEFAULT ''")
    if newest:
        connection.executemany("UPDATE runs SET note = $2 WHERE run = $1", newest)


def _standing_notes(rows: list[dict[str, Any]]) -> list[dict[str, Any]]:
    ordered = sorted(rows, key=lambda row: row.get("time") or 0.0)
    empty = max((place for place, row in enumerate(ordered) if not row.get("note")), default=-1)
    return ordered[empty + 1 :][::-1]
