"""How the results store knows its runs without listing them: a manifest, a journal, and the compactor between them.

    results/manifest/<n>.json      names the tables of generation n (created exclusively, never changed)
    results/tables/*.parquet       the tables of results/tables.py
    results/journal/<run>.json     the latest word of each run that is not folded in yet; its writer replaces it
    results/journal/<run>~*.json   evaluation rows that are not folded in yet

A reader takes the newest manifest and lays the journal over it.
"""

from __future__ import annotations

import hashlib
import json
import logging
import re
import time
import uuid
from dataclasses import dataclass
from typing import Any

from lt2_platform.results import tables as results_tables
from lt2_platform.results.curves import decode, encode
from lt2_platform.results.parts import read_many, skip
from lt2_platform.results.tables import SCHEMAS, Eval, RunInfo, Tables, empty_tables, overlay
from lt2_platform.storage import Storage
from lt2_platform.storage_errors import STORAGE_ERRORS

log = logging.getLogger(__name__)

MANIFESTS, TABLES, JOURNAL = "results/manifest", "results/tables", "results/journal"
COMPACT_AFTER = 64  # entries of the journal
KEPT_GENERATIONS = 4  # readers may still be opening the tables of the previous manifests
_GENERATION = re.compile(r"(?:[a-z]+-)?(\d{8,})[-.]")  # in the names of tables and manifests


@dataclass(frozen=True)
class Index:
    """A consistent picture: runs by id, (run, name, row) of every evaluation, names of unreadable files."""

    runs: dict[str, RunInfo]
    evals: list[Eval]
    skipped: tuple[str, ...] = ()


@dataclass(frozen=True)
class Layers:
    """The same picture as it is stored: the tables of manifest `generation`, and what the journal adds to them.

    `entries` are the names of the journal files that were read, `folded` of those that the manifest has already.
    """

    generation: int
    base: Tables
    journal: Index
    entries: tuple[str, ...]
    folded: tuple[str, ...]
    skipped: tuple[str, ...]  # unreadable tables

    def tables(self) -> Tables:
        """The tables of the manifest with the journal laid over them."""
        newer = results_tables.tables(self.journal.runs.values(), self.journal.evals)
        return overlay(self.base, newer)


def write_journal(storage: Storage, run: RunInfo) -> None:
    """Replace the run's entry in the journal."""
    storage.write_bytes(f"{JOURNAL}/{run.run_id}.json", run.to_json().encode())


def write_eval_journal(storage: Storage, run_id: str, name: str, rows: list[dict[str, Any]]) -> None:
    """Add evaluation rows; the file's name keeps those of a run in the order of writing."""
    body = {"run": run_id, "name": name, "rows": rows}
    unique = f"{time.time_ns():020d}-{uuid.uuid4().hex[:6]}"
    # Without the evaluation's name: both may be as long as half of a file's name.
    storage.write_bytes(f"{JOURNAL}/{run_id}~{unique}.json", json.dumps(body).encode())


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
    layers = read_layers(storage)
    runs = results_tables.read_runs(layers.base["runs"]) | layers.journal.runs
    evals = results_tables.read_evals(layers.base["evals"]) + layers.journal.evals
    return Index(runs, evals, layers.skipped + layers.journal.skipped)


def read_layers(storage: Storage, known: Layers | None = None) -> Layers:
    """The stored layers; the tables of `known` are used again if no newer manifest has appeared."""
    for _ in range(5):
        # Journal first: what is folded and deleted after this listing shows up as a missing file, and we look again.
        entries = storage.list(JOURNAL)
        layers = _read_layers(storage, entries, known)
        if layers is not None:
            return layers
    raise OSError(f"{storage.root}: the results index keeps changing while it is read; is a compactor looping?")


def _read_layers(storage: Storage, entries: list[str], known: Layers | None) -> Layers | None:
    manifest = _newest_manifest(storage)
    base, skipped = empty_tables(), []
    if known is not None and known.generation == manifest["generation"]:
        base, skipped = known.base, list(known.skipped)
    else:
        try:
            for name, path in manifest["tables"].items():
                try:
                    base[name], _ = decode(storage.read_bytes(path), SCHEMAS[name])
                except ValueError as error:
                    skipped.append(skip(path, error))
        except FileNotFoundError:  # an old generation was removed under us
            return None
    folded = set(manifest["folded_evals"])
    new, old = ([name for name in entries if (name in folded) == is_old] for is_old in (False, True))
    journal = _read_journal(storage, new)
    if journal is None:
        return None
    return Layers(manifest["generation"], base, journal, tuple(new), tuple(old), tuple(skipped))


def _read_journal(storage: Storage, entries: list[str]) -> Index | None:
    runs: dict[str, RunInfo] = {}
    evals: list[Eval] = []
    skipped: list[str] = []
    for name, data in zip(entries, read_many(storage, [f"{JOURNAL}/{name}" for name in entries])):
        if data is None:
            return None
        try:
            entry = json.loads(data)
            if "~" in name:
                evals += [(entry["run"], entry["name"], dict(row)) for row in entry["rows"]]
            else:
                run = RunInfo.from_json(entry)
                runs[run.run_id] = run
        except (ValueError, KeyError, TypeError, AttributeError) as error:
            skipped.append(skip(f"{JOURNAL}/{name}", error))
    return Index(runs, evals, tuple(skipped))


def _newest_manifest(storage: Storage) -> dict[str, Any]:
    names = [name for name in storage.list(MANIFESTS) if name.endswith(".json")]
    if not names:
        return {"generation": 0, "tables": {}, "folded_evals": []}
    return storage.read_json(f"{MANIFESTS}/{names[-1]}")


def compact(storage: Storage) -> int:
    """Fold the journal of ended runs and of evaluations into a new manifest; returns its generation number.

    Safe to run at any time from any number of processes: a manifest is created exclusively, so of two compactors one
    wins and the other starts over. Runs that are still being written also stay in the journal. Raises OSError rather
    than forget runs if a table of the present manifest is damaged.
    """
    while True:
        layers = read_layers(storage)
        if layers.skipped:
            raise OSError(f"not compacting, or its runs would be forgotten: {layers.skipped[0]}; restore that file")
        broken = {problem.split(":")[0].rsplit("/", 1)[-1] for problem in layers.journal.skipped}
        ended = {run.run_id: run for run in layers.journal.runs.values() if run.state != "running"}
        # Those that a compactor folded and has not deleted, or never will, must not count as new once its list is gone.
        evals = sorted({*layers.folded, *(name for name in layers.entries if "~" in name and name not in broken)})
        generation = layers.generation + 1
        if publish(storage, layers.tables(), generation, evals):
            break
    for run_id in sorted(ended):
        # A run that was resumed meanwhile has a newer word there, which may be its last.
        now = _read_journal(storage, [f"{run_id}.json"])
        if now is not None and run_id in now.runs and now.runs[run_id].to_json() == ended[run_id].to_json():
            storage.delete(f"{JOURNAL}/{run_id}.json")
    for name in evals:
        storage.delete(f"{JOURNAL}/{name}")
    _remove_old_generations(storage, generation)
    return generation


def compact_when_long(storage: Storage, counted: str = "") -> None:
    """Compact once COMPACT_AFTER entries wait in the journal, or so many with `counted` in their names. Whoever calls
    has written what it had to: what fails here is a warning, and the next one's to try again.
    """
    try:
        if sum(counted in name for name in storage.list(JOURNAL)) >= COMPACT_AFTER:
            compact(storage)
    except STORAGE_ERRORS as error:
        log.warning("the journal of results is not compacted (%s); what was to be written is", error)


def publish(storage: Storage, tables: Tables, generation: int, folded_evals: list[str]) -> bool:
    """Write `tables` as manifest number `generation`; False, and nothing left behind, if that number is taken."""
    unique = uuid.uuid4().hex[:8]
    paths = {name: f"{TABLES}/{name}-{generation:08d}-{unique}.parquet" for name in tables}
    for name, path in paths.items():
        storage.write_bytes(path, encode(tables[name]))
    body = {"schema_version": 1, "generation": generation, "tables": paths, "folded_evals": folded_evals}
    if storage.create_exclusive(f"{MANIFESTS}/{generation:08d}.json", json.dumps(body).encode()):
        return True
    for path in paths.values():
        storage.delete(path)
    return False


def _remove_old_generations(storage: Storage, newest: int) -> None:
    oldest_kept = newest - KEPT_GENERATIONS + 1
    for folder in (TABLES, MANIFESTS):
        for name in storage.list(folder):
            found = _GENERATION.match(name)
            if found and int(found[1]) < oldest_kept:
                storage.delete(f"{folder}/{name}")
