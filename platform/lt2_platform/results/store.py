"""The results store: what every run logged, kept as files that need no server and no lock.

    runs/<run>/run.json            config and provenance, written once
    runs/<run>/metrics/part-*      numbers per step, flushed every minute at most
    runs/<run>/summary.json        the last words of a run that ended
    runs/<run>/evals/*.parquet     evaluation rows
    runs/<run>/events/*.json       what happened to it: rollbacks, preemptions
    results/…                      manifest, journal and tables (index)

Only one process writes a run (rank 0); any number may read while it does.
"""

from __future__ import annotations

import json
import logging
import re
import secrets
import time
from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass, replace
from typing import Any

import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.parquet as pq
from botocore.exceptions import BotoCoreError

from lt2.config import ConfigError
from lt2_platform.results import index as index_files
from lt2_platform.results.curves import encode, last_written, rows_table
from lt2_platform.results.index import Index
from lt2_platform.results.parts import list_parts, part_name, read_curves, read_parts, write_curves
from lt2_platform.results.rows import result_rows
from lt2_platform.results.tables import RunInfo, as_text, flatten
from lt2_platform.step_records import NUMBER, parse
from lt2_platform.storage import Storage

__all__ = ["NOTE", "Curves", "ResultsStore", "RunInfo", "RunWriter", "differences", "flatten"]

log = logging.getLogger(__name__)

NOTE = "note"
FIRST_FLUSH_SECONDS, FLUSH_SECONDS = 2.0, 60.0  # a new run shows up at once, a long one writes few files
FLUSH_ROWS = 50_000
PARTS_PER_CURVE = 16  # readers of a live run open at most this many small files

_NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]{0,127}")
_SECRET = re.compile(r"(^|[._-])(password|secret|api_?key|(secret_)?access_key|(auth|hf|bearer)_token)$", re.IGNORECASE)


@dataclass(frozen=True)
class Curves:
    """Downsampled metrics of one run (`curves.CURVES`) and the files that had to be left out."""

    table: pa.Table
    skipped: tuple[str, ...] = ()


class ResultsStore:
    """Reads every run under a storage root and opens writers. Holds no state but the storage."""

    def __init__(self, storage: Storage):
        self.storage = storage

    def create_run(self, run_id: str, info: Mapping[str, Any], *, clock: Callable[[], float] = time.time) -> RunWriter:
        """Start a run, or carry on with one that has the same `info["config"]`.

        `info` is JSON-like; the rest of it (git sha, package versions, …) is provenance and may differ. Raises
        ConfigError for an unusable id or for a run that exists with another config.
        """
        check_name(run_id, "run id")
        now, last = clock(), {}
        record = json.loads(json.dumps(redacted(dict(info))))
        record |= {"schema_version": 1, "run": run_id, "created": now, "config": record.get("config") or {}}
        path = f"runs/{run_id}/run.json"
        if not self.storage.create_exclusive(path, json.dumps(record, indent=2).encode()):
            existing = self._record(path)
            _check_same_config(run_id, existing["config"], record["config"])
            record = {**record, "created": existing["created"]}
            last = self._last_values(run_id)
        attempts = [int(n.split("-")[1]) for n in list_parts(self.storage, run_id) if n.split("-")[1].isdigit()]
        writer = f"{max(attempts, default=0) + 1:04d}-{secrets.token_hex(3)}"
        provenance = {k: v for k, v in record.items() if k not in ("config", "run", "created", "schema_version")}
        step = max((step for step, _ in last.values()), default=0)
        run = RunInfo(run_id, record["created"], now, step=step, config=record["config"], info=provenance, last=last)
        return RunWriter(self.storage, run, writer, clock)

    def _record(self, path: str) -> dict[str, Any]:
        try:
            return parse(self.storage.read_bytes(path), {"config": dict, "created": NUMBER})
        except ValueError as error:
            raise ConfigError(
                f"{self.storage.join(path)} is not readable ({error}); delete it, and it is written anew"
            ) from error

    def _last_values(self, run_id: str) -> dict[str, tuple[int, float]]:
        table = read_curves(self.storage, run_id)[0]
        rows = zip(*(table[name].to_pylist() for name in ("metric", "step", "last")))
        return {metric: (step, value) for metric, step, value in rows}  # sorted by step, so the last one stays

    def log_eval(self, run_id: str, name: str, rows: list[dict[str, Any]]) -> None:
        """Add the rows of one evaluation to a run, finished or not. Each row is flat: str, int, float, bool or None.

        A row with a numeric "value" is a result; "task" and "metric" name it. Evaluations with the same name add up;
        readers prefer the later of two rows that agree in everything but their numbers.
        """
        check_name(run_id, "run id")
        check_name(name, "evaluation name")
        if not rows:
            return
        path = f"runs/{run_id}/evals/{name}-{time.time_ns():020d}-{secrets.token_hex(3)}.parquet"
        with self.storage.writer(path) as file:
            keys = dict.fromkeys(key for row in rows for key in row)
            pq.write_table(pa.table({key: _column([row.get(key) for row in rows]) for key in keys}), file)
        index_files.write_eval_journal(self.storage, run_id, name, rows)
        # A run that is evaluated often would grow the journal all its life, and every reader opens all of it.
        index_files.compact_when_long(self.storage, "~")

    def log_note(self, run_id: str, text: str, author: str) -> None:
        """Say something about a run. Readers show the newest note; one without text takes the ones before it away.

        Kept as a row of an evaluation `NOTE` without a value: notes follow the store as results do, and are none.
        """
        self.log_eval(run_id, NOTE, [{"note": text, "author": author, "time": time.time()}])

    def log_event(self, run_id: str, kind: str, record: Mapping[str, Any]) -> None:
        """Add something that happened to a run: JSON-like, under one file of its own."""
        check_name(run_id, "run id")
        check_name(kind, "event kind")
        path = f"runs/{run_id}/events/{time.time_ns():020d}-{kind}-{secrets.token_hex(3)}.json"
        self.storage.write_json(path, redacted({"kind": kind, "time": time.time(), **record}))

    def events(self, run_id: str) -> list[dict[str, Any]]:
        """What happened to a run, oldest first: {"kind", "time", …}."""
        check_name(run_id, "run id")
        folder = f"runs/{run_id}/events"
        return [self.storage.read_json(f"{folder}/{name}") for name in self.storage.list(folder)]

    def version(self) -> str:
        """A short string that changes whenever `index` would: an ETag."""
        return index_files.version(self.storage)

    def index(self) -> Index:
        """Runs and evaluations together, and what could not be read."""
        return index_files.read_index(self.storage)

    def runs(self) -> list[RunInfo]:
        """Every run, newest first."""
        return sorted(self.index().runs.values(), key=lambda run: (-run.created, run.run_id))

    def run(self, run_id: str) -> RunInfo:
        """One run. Raises ConfigError if there is none of that name."""
        runs = self.index().runs
        if run_id not in runs:
            raise ConfigError(f"no run {run_id!r} under {self.storage.root}; `lt2 status` lists the runs")
        return runs[run_id]

    def metrics(self, run_id: str, names: list[str] | None = None) -> pa.Table:
        """Every logged row at full resolution: (step, time, metric, value), one per metric and step.

        Unreadable part files are logged and left out; `curves` also returns their names.
        """
        check_name(run_id, "run id")
        rows, _ = read_parts(self.storage, run_id, list_parts(self.storage, run_id))
        if names is not None:
            rows = rows.filter(pc.field("metric").isin(names))
        return last_written(rows)

    def curves(self, run_id: str) -> Curves:
        """At most 2,000 points per metric, up to the newest flushed part."""
        check_name(run_id, "run id")
        table, _, problems = read_curves(self.storage, run_id)
        return Curves(table, tuple(problems))

    def results(self, runs: Collection[str] | None = None, *, index: Index | None = None) -> list[dict[str, Any]]:
        """Rows {run, step, metric, value, unit, counts, config}: the last value of every metric, summaries and
        evaluations.

        runs: only theirs. `config` holds only what differs between the runs; `unit` is "" where there is none;
        `counts` is False of an evaluation that another of the same name stands above (`repeats.standing`).
        index: as it was read before; None reads it.
        """
        index = index or self.index()
        chosen = [run for run in index.runs if runs is None or run in runs]
        differs = differences({run: index.runs[run].config for run in chosen})
        return [
            {"run": run, **row, "config": differs.get(run, {})}
            for run, row in result_rows(index)
            if runs is None or run in runs
        ]


class RunWriter:
    """Buffers the numbers of one run and writes them as parts. Use as a context manager: an exception marks it failed,
    or what its `run_state` says.

    A flush that fails while training is kept and tried again with the next one; `close` raises instead.
    """

    def __init__(self, storage: Storage, run: RunInfo, writer: str, clock: Callable[[], float]):
        self.storage, self.run, self.writer, self.clock = storage, run, writer, clock
        self.rows: list[tuple[int, float, str, float]] = []
        self.sequence = 0
        self.interval = FIRST_FLUSH_SECONDS
        self.next_flush = clock() + self.interval
        index_files.write_journal(storage, run)

    def log(self, step: int, metrics: Mapping[str, float]) -> None:
        """Record numbers at a step (NaN and infinities are kept); flushes when a minute has passed or rows pile up."""
        now = self.clock()
        values = {name: float(value) for name, value in metrics.items()}
        self.rows += [(int(step), now, name, value) for name, value in values.items()]
        last = {**self.run.last, **{name: (int(step), value) for name, value in values.items()}}
        self.run = replace(self.run, step=int(step), updated=now, last=last)
        set_back = now < self.next_flush - self.interval  # the clock: without this, silence until it has caught up
        if now >= self.next_flush or set_back or len(self.rows) >= FLUSH_ROWS:
            try:
                self.flush()
            except (OSError, BotoCoreError) as error:
                log.warning("%s: metrics not written, kept for the next try (%s)", self.run.run_id, error)
            self.interval = min(2 * self.interval, FLUSH_SECONDS)
            self.next_flush = self.clock() + self.interval

    def flush(self) -> None:
        """Write what is buffered. The part's name is new for every writer, so nothing is ever overwritten."""
        if self.rows:
            path = f"runs/{self.run.run_id}/metrics/{part_name(self.writer, self.sequence)}"
            self.storage.write_bytes(path, encode(rows_table(self.rows)))
            self.rows, self.sequence = [], self.sequence + 1
            if self.sequence % PARTS_PER_CURVE == 0:
                write_curves(self.storage, self.run.run_id)
        self.run = replace(self.run, updated=self.clock())
        index_files.write_journal(self.storage, self.run)

    def log_eval(self, name: str, rows: list[dict[str, Any]]) -> None:
        ResultsStore(self.storage).log_eval(self.run.run_id, name, rows)

    def close(self, summary: Mapping[str, Any] | None = None, *, state: str = "finished") -> None:
        """Write the rest, the summary and the curves. `state`: finished, failed, or running (to be resumed)."""
        summary = json.loads(json.dumps(redacted(dict(summary)))) if summary is not None else None
        self.run = replace(self.run, state=state, summary=summary)
        if summary is not None:
            self.storage.write_json(f"runs/{self.run.run_id}/summary.json", summary)
        self.flush()
        write_curves(self.storage, self.run.run_id)
        index_files.compact_when_long(self.storage)

    def __enter__(self) -> RunWriter:
        return self

    def __exit__(self, kind: type[BaseException] | None, *_: object) -> None:
        if kind is not None:
            try:
                self.close(state=getattr(kind, "run_state", "failed"))
            except (OSError, BotoCoreError) as error:  # what ended the block is what whoever started it must hear of
                log.error("%s: its last metrics are not written (%s)", self.run.run_id, error)
        elif self.run.state == "running":
            self.close()


def _column(values: list[Any]) -> pa.Array:
    """As text where tasks mean different kinds of value by one name, or a number is larger than a column holds."""
    try:
        return pa.array(values)
    except (pa.ArrowException, OverflowError):
        return pa.array([None if value is None else as_text(value) for value in values])


def check_name(name: str, what: str) -> None:
    """Raise ConfigError unless `name` can be a file name everywhere: letters, digits, '.', '_' and '-', 1 to 128."""
    if not _NAME.fullmatch(name):
        shown = name if len(name) <= 40 else name[:40] + "…"
        raise ConfigError(
            f"{what} {shown!r}: use 1 to 128 letters, digits, '.', '_' or '-', starting with a letter or digit"
        )


def _check_same_config(run_id: str, old: dict[str, Any], new: dict[str, Any]) -> None:
    """Settings that the old record lacks do not count: a newer LT2 has more of them, at their defaults."""
    differs = differences({"old": old, "new": new})
    known = flatten(old)
    changed = [f"{k} {differs['old'].get(k)!r} → {differs['new'].get(k)!r}" for k in differs["old"] if k in known]
    if changed:
        raise ConfigError(f"run {run_id} exists with another config ({', '.join(changed[:4])}); use another run id")


def differences(configs: Mapping[str, Mapping[str, Any]]) -> dict[str, dict[str, Any]]:
    """For each name the flattened keys whose values are not the same in all configs (None where a key is missing)."""
    flat = {name: flatten(config) for name, config in configs.items()}
    keys = sorted({key for config in flat.values() for key in config})
    seen = {key: {json.dumps(config.get(key), sort_keys=True) for config in flat.values()} for key in keys}
    varying = [key for key in keys if len(seen[key]) > 1]
    return {name: {key: config.get(key) for key in varying} for name, config in flat.items()}


def redacted(value: Any, key: str = "") -> Any:
    """`value` with anything under a key that names a secret replaced, at any depth."""
    if _SECRET.search(key) and value is not None:
        return "[redacted]"
    if isinstance(value, Mapping):
        return {str(k): redacted(v, str(k)) for k, v in value.items()}
    if isinstance(value, list | tuple):
        return [redacted(item) for item in value]
    return value
