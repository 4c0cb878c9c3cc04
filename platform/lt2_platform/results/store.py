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
import re
import secrets
import time
from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass
from typing import Any

import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.parquet as pq

from lt2.config import ConfigError
from lt2_platform.json_values import redacted
from lt2_platform.results import index as index_files
from lt2_platform.results.curves import last_written
from lt2_platform.results.index import Index
from lt2_platform.results.parts import list_parts, read_curves, read_parts
from lt2_platform.results.rows import result_rows
from lt2_platform.results.tables import RunInfo, as_text, flatten
from lt2_platform.results.writer import RunWriter
from lt2_platform.step_records import NUMBER, parse
from lt2_platform.storage import Storage

__all__ = ["NAME", "NOTE", "Curves", "ResultsStore", "RunInfo", "RunWriter", "differences", "flatten"]

NOTE = "note"

NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]{0,127}")
"""What may name a run, an evaluation, a workflow or a step: a file name everywhere."""


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
                f"{self.storage.join(path)} is not readable ({error}); delete it, and it is rewritten"
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
        evaluations; these also with `n` items or tokens, and the `data` of a perplexity, where they say so.

        runs: only theirs. `config` holds only what differs between the runs that were trained here, and of models from
        elsewhere where they are; `unit` is "" where there is none;
        `counts` is False of an evaluation that another of the same name stands above (`repeats.standing`).
        index: as it was read before; None reads it.
        """
        index = index or self.index()
        chosen = [run for run in index.runs if runs is None or run in runs]
        others = {run: index.runs[run].config for run in chosen if index.runs[run].elsewhere}
        elsewhere = {run: flatten({k: v for k, v in config.items() if k != "model"}) for run, config in others.items()}
        differs = differences({run: index.runs[run].config for run in chosen if run not in elsewhere}) | elsewhere
        return [
            {"run": run, **row, "config": differs.get(run, {})}
            for run, row in result_rows(index)
            if runs is None or run in runs
        ]


def _column(values: list[Any]) -> pa.Array:
    """An array of the values; as text where they are of different kinds, or a number does not fit a column."""
    try:
        return pa.array(values)
    except (pa.ArrowException, OverflowError):
        return pa.array([None if value is None else as_text(value) for value in values])


def check_name(name: str, what: str) -> None:
    """Raise ConfigError unless `name` can be a file name everywhere: letters, digits, '.', '_' and '-', 1 to 128."""
    if not NAME.fullmatch(name):
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
