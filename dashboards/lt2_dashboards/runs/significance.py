"""Whether runs that are compared differ by more than chance: their evaluations item by item."""

from __future__ import annotations

from typing import Any

from lt2.config import ConfigError
from lt2_dashboards.queries import Source
from lt2_dashboards.runs.page import compared
from lt2_platform.evaluate.compare import Answers, NoItemsError, own_depth, paired, scores
from lt2_platform.results.store import RunInfo

Scores = dict[tuple[str, str], Answers]


def significance(source: Source, run_ids: list[str]) -> dict[str, Any]:
    """{"pairs": {run: {"task/metric": {difference, stderr, p_value, n, note}}}, "skipped"}: each against the first one.

    What `lt2 compare` prints of them, at the depths that they were trained at. Runs without stored items are left out.
    Reads every item of every run: pages ask once, not at every look.
    """
    runs = compared(source, source.snapshot(), run_ids)
    found: dict[str, Scores] = {}
    skipped = []
    for run in runs:
        try:
            found[run.run_id] = _scores(source, run)
        except ConfigError as error:  # a file is damaged
            skipped.append(f"the items of {run.run_id} cannot be read ({str(error)[:80]})")
    first = found.get(runs[0].run_id, {}) if runs else {}
    pairs = {run.run_id: _against(first, found.get(run.run_id, {})) for run in runs[1:]}
    return {"pairs": {run: rows for run, rows in pairs.items() if rows}, "skipped": skipped}


def _scores(source: Source, run: RunInfo) -> Scores:
    folder = f"evals/{run.run_id}"
    if not source.storage.glob(f"{folder}/**/samples/*.jsonl"):
        return {}
    try:
        return scores(source.storage.join(folder), own_depth(run.config))
    except NoItemsError:  # evaluated at other depths only
        return {}


def _against(first: Scores, other: Scores) -> dict[str, dict[str, Any]]:
    rows = {"/".join(key): paired(first[key], other[key]) for key in sorted(first.keys() & other.keys())}
    return {key: row for key, row in rows.items() if row["n"]}
