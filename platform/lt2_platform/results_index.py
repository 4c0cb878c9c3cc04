"""How the results store knows its runs without listing them: a manifest, a journal, and the compactor between them.

    results/manifest/<n>.json      names the tables of generation n (created exclusively, never changed)
    results/tables/*.parquet       runs: one row per run; evals: one row per evaluation result
    results/journal/<run>.json     the latest word of each run that is not folded in yet; its writer replaces it
    results/journal/<run>~*.json   evaluation rows that are not folded in yet
    runs/<run>/curves.parquet      downsampled metrics of that run, and which parts they cover

A reader takes the newest manifest and lays the journal over it.
"""

from __future__ import annotations

import hashlib
import json
import time
import uuid
from dataclasses import asdict, dataclass, field
from typing import Any

import pyarrow as pa

from lt2_platform.results_curves import decode, encode
from lt2_platform.results_parts import read_many, skip
from lt2_platform.storage import Storage

MANIFESTS, TABLES, JOURNAL = "results/manifest", "results/tables", "results/journal"
RUN_TABLE = pa.schema([("run", pa.string()), ("entry", pa.string())])
EVAL_TABLE = pa.schema([("run", pa.string()), ("name", pa.string()), ("row", pa.string())])
KEPT_GENERATIONS = 4  # readers may still be opening the tables of the previous manifests
STALE_SECONDS = 300.0  # a live writer speaks at least every minute


@dataclass(frozen=True)
class RunInfo:
    """What the store knows about one run without opening its metrics.

    `state` is the writer's last word (running, finished, failed); `status` also tells a run that went silent.
    `last` maps each metric to (step, value) of its last row. Times are unix seconds.
    """

    run_id: str
    created: float
    updated: float
    state: str = "running"
    step: int = 0
    config: dict[str, Any] = field(default_factory=dict)
    info: dict[str, Any] = field(default_factory=dict)
    last: dict[str, tuple[int, float]] = field(default_factory=dict)
    summary: dict[str, Any] | None = None

    def status(self, now: float) -> str:
        """running, stalled (a writer that has been silent for five minutes), finished or failed."""
        silent = self.state == "running" and now - self.updated > STALE_SECONDS
        return "stalled" if silent else self.state

    @classmethod
    def from_json(cls, value: dict[str, Any]) -> RunInfo:
        return cls(**{**value, "last": {k: (int(s), float(v)) for k, (s, v) in value.get("last", {}).items()}})


@dataclass(frozen=True)
class Index:
    """A consistent picture: runs by id, (run, name, row) of every evaluation, names of unreadable files."""

    runs: dict[str, RunInfo]
    evals: list[tuple[str, str, dict[str, Any]]]
    skipped: tuple[str, ...] = ()


def write_journal(storage: Storage, run: RunInfo) -> None:
    storage.write_bytes(f"{JOURNAL}/{run.run_id}.json", json.dumps(asdict(run)).encode())


def write_eval_journal(storage: Storage, run_id: str, name: str, rows: list[dict[str, Any]]) -> None:
    body = {"run": run_id, "name": name, "rows": rows}
    storage.write_bytes(f"{JOURNAL}/{run_id}~{name}~{time.time_ns():020d}-{uuid.uuid4().hex[:6]}.json", json.dumps(body).encode())


def version(storage: Storage) -> str:
    """Changes whenever `read_index` would answer differently. Two listings, no reads."""
    newest = storage.list(MANIFESTS)[-1:]
    try:
        found = storage.fs.ls(storage.join(JOURNAL), detail=True)
    except FileNotFoundError:
        found = []
    marks = sorted(
        (str(f["name"]), f.get("size"), str(f.get("ETag") or f.get("mtime"))) for f in found if ".tmp-" not in f["name"]
    )
    return hashlib.sha256(repr((newest, marks)).encode()).hexdigest()[:16]


def read_index(storage: Storage) -> Index:
    """Every run and evaluation, from the newest manifest and the journal."""
    for _ in range(5):
        # Journal first: what is folded and deleted after this listing shows up as a missing file, and we look again.
        entries = storage.list(JOURNAL)
        index = _read_index(storage, entries)
        if index is not None:
            return index
    raise OSError(f"{storage.root}: the results index keeps changing while it is read; is a compactor looping?")


def _read_index(storage: Storage, entries: list[str]) -> Index | None:
    try:
        manifest = _newest_manifest(storage)
        runs, evals, skipped = _read_tables(storage, manifest)
    except FileNotFoundError:  # tables of an old generation were removed under us
        return None
    entries = [name for name in entries if name not in manifest["folded_evals"]]
    for name, data in zip(entries, read_many(storage, [f"{JOURNAL}/{name}" for name in entries])):
        if data is None:
            return None
        try:
            entry = json.loads(data)
            if "~" in name:
                evals += [(entry["run"], entry["name"], row) for row in entry["rows"]]
            else:
                runs[entry["run_id"]] = RunInfo.from_json(entry)
        except (ValueError, KeyError, TypeError, AttributeError) as error:
            skipped.append(skip(f"{JOURNAL}/{name}", error))
    return Index(runs, evals, tuple(skipped))


def _newest_manifest(storage: Storage) -> dict[str, Any]:
    names = [name for name in storage.list(MANIFESTS) if name.endswith(".json")]
    if not names:
        return {"generation": 0, "runs": None, "evals": None, "folded_evals": []}
    return storage.read_json(f"{MANIFESTS}/{names[-1]}")


def _read_tables(storage: Storage, manifest: dict[str, Any]) -> tuple[dict[str, RunInfo], list[Any], list[str]]:
    runs: dict[str, RunInfo] = {}
    evals: list[tuple[str, str, dict[str, Any]]] = []
    skipped: list[str] = []
    for path, schema in ((manifest["runs"], RUN_TABLE), (manifest["evals"], EVAL_TABLE)):
        if path is None:
            continue
        try:
            table, _ = decode(storage.read_bytes(path), schema)
        except ValueError as error:
            skipped.append(skip(path, error))
            continue
        if schema is RUN_TABLE:
            runs = {run: RunInfo.from_json(json.loads(entry)) for run, entry in zip(*_lists(table))}
        else:
            evals = [(run, name, json.loads(row)) for run, name, row in zip(*_lists(table))]
    return runs, evals, skipped


def compact(storage: Storage) -> int:
    """Fold the journal of finished runs and of evaluations into a new manifest; returns its generation number.

    Safe to run at any time from any number of processes: a manifest is created exclusively, so of two compactors one
    wins and the other starts over. Runs that are still being written stay in the journal.
    """
    while True:
        entries = storage.list(JOURNAL)
        manifest = _newest_manifest(storage)
        index = _read_index(storage, entries)
        if index is None:
            continue
        broken = {problem.split(":")[0].rsplit("/", 1)[-1] for problem in index.skipped}
        if lost := [problem for problem in index.skipped if problem.startswith(TABLES)]:
            raise OSError(f"not compacting, or its runs would be forgotten: {lost[0]}; restore that file")
        done = [f"{run_id}.json" for run_id, run in index.runs.items() if run.state != "running"]
        folded_runs = sorted((set(done) & set(entries)) - broken)
        folded_evals = sorted(name for name in entries if "~" in name and name not in broken)
        generation = manifest["generation"] + 1
        body = {
            "schema_version": 1,
            "generation": generation,
            "runs": _write_table(storage, generation, "runs", RUN_TABLE, _run_rows(index)),
            "evals": _write_table(storage, generation, "evals", EVAL_TABLE, _eval_rows(index)),
            "folded_evals": folded_evals,
        }
        if storage.create_exclusive(f"{MANIFESTS}/{generation:08d}.json", json.dumps(body).encode()):
            break
        for path in (body["runs"], body["evals"]):
            storage.delete(path)
    for name in folded_runs + folded_evals:
        storage.delete(f"{JOURNAL}/{name}")
    _remove_old_generations(storage, generation)
    return generation


def _run_rows(index: Index) -> list[tuple[str, ...]]:
    return [(run_id, json.dumps(asdict(run))) for run_id, run in sorted(index.runs.items())]


def _eval_rows(index: Index) -> list[tuple[str, ...]]:
    return [(run, name, json.dumps(row)) for run, name, row in index.evals]


def _write_table(storage: Storage, generation: int, kind: str, schema: pa.Schema, rows: list[tuple[str, ...]]) -> str:
    columns = list(zip(*rows)) or [[] for _ in schema]
    path = f"{TABLES}/{kind}-{generation:08d}-{uuid.uuid4().hex[:8]}.parquet"
    storage.write_bytes(path, encode(pa.table([pa.array(c, pa.string()) for c in columns], schema=schema)))
    return path


def _remove_old_generations(storage: Storage, newest: int) -> None:
    oldest_kept = newest - KEPT_GENERATIONS + 1
    for folder, number in ((TABLES, lambda name: name.split("-")[1]), (MANIFESTS, lambda name: name.split(".")[0])):
        for name in storage.list(folder):
            if int(number(name)) < oldest_kept:
                storage.delete(f"{folder}/{name}")


def _lists(table: pa.Table) -> list[list[str]]:
    return [column.to_pylist() for column in table.columns]
