"""Copies runs from one results store to another: what they logged, and their entries in the index."""

from __future__ import annotations

import json
from collections.abc import Collection
from itertools import groupby

from lt2_platform.copying import copy_missing
from lt2_platform.results.index import compact_when_long, read_index, write_eval_journal, write_journal
from lt2_platform.storage import Storage


def copy_runs(source: Storage, target: Storage, run_ids: Collection[str]) -> None:
    """Copy what `source` knows of these runs; what `target` has already, of a newer date too, stays as it is there.

    May be called again after a part of it is done: nothing is there twice.
    """
    ours, theirs = read_index(source), read_index(target)
    for run_id in sorted(run_ids):
        copy_missing(source, target, f"runs/{run_id}")
        run, known = ours.runs.get(run_id), theirs.runs.get(run_id)
        if run is not None and (known is None or known.updated < run.updated):
            write_journal(target, run)
        there = {_key(name, row) for each, name, row in theirs.evals if each == run_id}
        missing = [(name, row) for each, name, row in ours.evals if each == run_id and _key(name, row) not in there]
        for name, rows in groupby(missing, key=lambda found: found[0]):  # in the order of writing, which counts
            write_eval_journal(target, run_id, name, [row for _, row in rows])
    compact_when_long(target)


def _key(name: str, row: dict[str, object]) -> str:
    return json.dumps([name, row], sort_keys=True)
