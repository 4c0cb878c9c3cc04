"""What the pages of one run and of several runs beside each other show."""

from __future__ import annotations

import statistics
from typing import Any

import pyarrow as pa
import pyarrow.compute as pc

from lt2.config import ConfigError
from lt2.layout import loops_text
from lt2_dashboards.figures.parts.store import attention_in
from lt2_dashboards.queries import Snapshot, Source
from lt2_dashboards.runs.silent import Moment, moment
from lt2_dashboards.workflows.records import NotThereError, Records
from lt2_dashboards.workflows.steps import spec_path, step_states
from lt2_platform.evaluate.repeats import counting, is_reading
from lt2_platform.evaluate.spans import readable
from lt2_platform.results.rows import result_name
from lt2_platform.results.store import RunInfo, differences, flatten
from lt2_platform.results.tables import as_text, total_steps, unit_of

MAX_COMPARED = 20
MAX_EVENTS = 50  # newest first on a run's page
PACE = 20  # of the curve's buckets: what the time that remains is reckoned from


def run_page(source: Source, run_id: str) -> dict[str, Any]:
    """One run: its place, settings, last values, metric names, evaluations, what happened to it, notes on it, its
    step's newest attempt (None for a run of no workflow), and files that could not be read. What it was evaluated to
    at several depths is in "depths".
    """
    snapshot = source.snapshot()
    (run,) = known(source, snapshot, [run_id])
    curves = source.curves(run)
    records, has_step = Records(source.storage), source.storage.exists(spec_path(run_id))
    step = step_states(records, [run_id], source.clock())[run_id] if has_step else None
    evals = [{"name": name, **readable(row)} for _, name, row in snapshot.evals([run_id])]
    split: dict[bool, list[dict[str, Any]]] = {False: [], True: []}
    for row in evals:
        split[row["name"] == "depth" and "n_loops" in row].append(row)
    return _head(run, moment(source)) | {
        "workflow": run.info.get("workflow"),
        "config": {key: as_text(value) for key, value in sorted(flatten(run.config).items())},
        "info": {key: as_text(value) for key, value in sorted(flatten(run.info).items())},
        "attention_in": attention_in(run.config),
        "loss_unit": unit_of("loss", run.config),
        "summary": {key: as_text(value) for key, value in sorted(flatten(run.summary or {}).items())},
        "metrics": sorted(set(curves.table["metric"].to_pylist())),
        "evals": split[False],
        "depths": _by_depth(split[True]),
        "events": _events(records, run_id),
        "notes": snapshot.notes(run_id),
        "attempt": step,
        "seconds_per_step": _pace(curves.table),
        "skipped": [*curves.skipped, *records.lines()],
    }


def _by_depth(rows: list[dict[str, Any]]) -> dict[str, Any]:
    """{"depths", "rows"}: by task and metric the rows that count at each of "depths", None where there is none."""
    found = counting(((_depth(row), (row.get("task"), row.get("metric"))), row) for row in rows)
    depths = sorted({depth for depth, _ in found}, key=lambda depth: (depth[1], depth[0], depth[2] or 1.0))
    results = dict.fromkeys(result for _, result in found)
    table = [
        {"task": task, "metric": metric, "at": [found.get((depth, (task, metric))) for depth in depths]}
        for task, metric in results
    ]
    return {"depths": [loops_text(*depth) for depth in depths], "rows": table}


def _depth(row: dict[str, Any]) -> tuple[int, bool, float | None]:
    return row["n_loops"], bool(row.get("early_exit")), row.get("exit_threshold")


def _events(records: Records, run_id: str) -> list[dict[str, Any]]:
    """What happened to a run while it trained (rollbacks, preemptions, evaluations that failed), newest first."""
    folder = f"runs/{run_id}/events"
    names = sorted(records.storage.list(folder))[-MAX_EVENTS:]
    return [event for event in records.read_all([f"{folder}/{name}" for name in reversed(names)]) if event is not None]


def _pace(curves: pa.Table) -> float | None:
    """Seconds a step took lately: the median of the last PACE buckets; None where no step time was logged."""
    times = curves.filter(pc.field("metric") == "step_time")["mean"].to_pylist()[-PACE:]
    known = [seconds for seconds in times if seconds == seconds]
    return statistics.median(known) if known else None


def compare_page(source: Source, run_ids: list[str]) -> dict[str, Any]:
    """Several runs: the settings that differ, those that do not, and their last values side by side."""
    snapshot = source.snapshot()
    runs = compared(source, snapshot, run_ids)
    # A model from elsewhere is not what makes the settings of the others differ.
    trained = [run for run in runs if not run.elsewhere] or runs
    at = moment(source)
    differs = differences({run.run_id: run.config for run in trained})
    flat = {run.run_id: flatten(run.config) for run in runs}
    keys = sorted({key for run in trained for key in flat[run.run_id]})
    varying = [key for key in keys if key in differs[trained[0].run_id]]
    metrics = sorted({metric for run in runs for metric in run.last})
    return {
        "runs": [_head(run, at) for run in runs],
        "elsewhere": sum(run.elsewhere for run in runs),
        "differs": [{"key": key, "values": [_shown(flat[run.run_id], key) for run in runs]} for key in varying],
        "same": {key: as_text(flat[trained[0].run_id].get(key)) for key in keys if key not in varying},
        "metrics": [{"key": metric, "values": [_value(run, metric) for run in runs]} for metric in metrics],
        "evals": _evals(snapshot, [run.run_id for run in runs]),
    }


def compared(source: Source, snapshot: Snapshot, run_ids: list[str]) -> list[RunInfo]:
    """`known`, each once. Raises ConfigError for more than can be looked at beside each other."""
    run_ids = list(dict.fromkeys(run_ids))
    if len(run_ids) > MAX_COMPARED:
        raise ConfigError(f"{len(run_ids)} runs to compare; at most {MAX_COMPARED}")
    return known(source, snapshot, run_ids)


def _head(run: RunInfo, at: Moment) -> dict[str, Any]:
    return {
        "run": run.run_id,
        "status": at.status(run),
        "created": run.created,
        "updated": run.updated,
        "step": run.step,
        "total": total_steps(flatten(run.config)),
        "last": {metric: value for metric, (_, value) in run.last.items()},
    }


def known(source: Source, snapshot: Snapshot, run_ids: list[str]) -> list[RunInfo]:
    """Runs by name, also models from elsewhere, of which the store has evaluations only ("evaluated", created at 0).

    Raises NotThereError for one that it does not have.
    """
    found = snapshot.runs(run_ids)
    if missing := [run_id for run_id in run_ids if run_id not in found]:
        evaluated = {run for run, *_ in snapshot.evals(missing)}
        found |= {run: RunInfo(run, 0.0, 0.0, state="evaluated") for run in evaluated}
        if unknown := [run_id for run_id in missing if run_id not in evaluated]:
            raise NotThereError(f"no run {unknown[0][:60]!r} in {source.storage.root}")
    return [found[run_id] for run_id in run_ids]


def _shown(config: dict[str, Any], key: str) -> str | None:
    return as_text(config[key]) if key in config else None


def _value(run: RunInfo, metric: str) -> float | None:
    return run.last[metric][1] if metric in run.last else None


def _evals(snapshot: Snapshot, run_ids: list[str]) -> list[dict[str, Any]]:
    """By result the values of the runs, their standard errors, how many items they are of, and of which data a
    perplexity is; None where unknown. What repeats a result comes last: at other depths, in a sweep's table."""
    found = counting(
        ((result_name(name, row), run), row)
        for run, name, row in snapshot.evals(run_ids)
        if row.get("value") is not None and not is_reading(row)
    )
    parts = {"values": "value", "errors": "stderr", "items": "n", "data": "data"}
    return [
        {"key": key} | {name: [found.get((key, run), {}).get(part) for run in run_ids] for name, part in parts.items()}
        for key in sorted({key for key, _ in found}, key=lambda key: (key.startswith(("depth/", "sweep/")), key))
    ]
