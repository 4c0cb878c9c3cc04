"""What the pages of one run and of several runs beside each other show."""

from __future__ import annotations

from typing import Any

from lt2.config import ConfigError
from lt2_dashboards.figures.store import attention_in
from lt2_dashboards.queries import Snapshot, Source
from lt2_platform.results.store import RunInfo, differences, flatten, result_name
from lt2_platform.results.tables import as_text, total_steps

MAX_COMPARED = 20


def run_page(source: Source, run_id: str) -> dict[str, Any]:
    """One run: its place, settings, last values, metric names, evaluations, and files that could not be read."""
    snapshot = source.snapshot()
    (run,) = _known(source, snapshot, [run_id])
    curves = source.curves(run)
    step_folder = f"steps/{run_id}"
    return _head(source, run) | {
        "config": {key: as_text(value) for key, value in sorted(flatten(run.config).items())},
        "info": {key: as_text(value) for key, value in sorted(flatten(run.info).items())},
        "attention_in": attention_in(run.config),
        "summary": {key: as_text(value) for key, value in sorted(flatten(run.summary or {}).items())},
        "metrics": sorted(set(curves.table["metric"].to_pylist())),
        "evals": [{"name": name, **row} for _, name, row in snapshot.evals([run_id])],
        "skipped": list(curves.skipped),
        "step_id": run_id if source.storage.exists(f"{step_folder}/spec.json") else None,
    }


def compare_page(source: Source, run_ids: list[str]) -> dict[str, Any]:
    """Several runs: the settings that differ, those that do not, and their last values side by side."""
    run_ids = list(dict.fromkeys(run_ids))
    if len(run_ids) > MAX_COMPARED:
        raise ConfigError(f"{len(run_ids)} runs to compare; at most {MAX_COMPARED}")
    snapshot = source.snapshot()
    runs = _known(source, snapshot, run_ids)
    differs = differences({run.run_id: run.config for run in runs})
    flat = {run.run_id: flatten(run.config) for run in runs}
    keys = sorted({key for config in flat.values() for key in config})
    varying = [key for key in keys if runs and key in differs[runs[0].run_id]]
    metrics = sorted({metric for run in runs for metric in run.last})
    return {
        "runs": [_head(source, run) for run in runs],
        "differs": [{"key": key, "values": [_shown(flat[run.run_id], key) for run in runs]} for key in varying],
        "same": {key: as_text(flat[runs[0].run_id][key]) for key in keys if key not in varying} if runs else {},
        "metrics": [{"key": metric, "values": [_value(run, metric) for run in runs]} for metric in metrics],
        "evals": _evals(snapshot, run_ids),
    }


def _head(source: Source, run: RunInfo) -> dict[str, Any]:
    return {
        "run": run.run_id,
        "status": run.status(source.clock()),
        "created": run.created,
        "updated": run.updated,
        "step": run.step,
        "total": total_steps(flatten(run.config)),
        "last": {metric: value for metric, (_, value) in run.last.items()},
    }


def _known(source: Source, snapshot: Snapshot, run_ids: list[str]) -> list[RunInfo]:
    found = snapshot.runs(run_ids)
    if missing := [run_id for run_id in run_ids if run_id not in found]:
        raise ConfigError(f"no run {missing[0][:60]!r} in {source.storage.root}")
    return list(found.values())


def _shown(config: dict[str, Any], key: str) -> str | None:
    return as_text(config[key]) if key in config else None


def _value(run: RunInfo, metric: str) -> float | None:
    return run.last[metric][1] if metric in run.last else None


def _evals(snapshot: Snapshot, run_ids: list[str]) -> list[dict[str, Any]]:
    found: dict[str, dict[str, Any]] = {}
    for run, name, row in snapshot.evals(run_ids):
        if row.get("value") is not None and "layer" not in row:  # readings inside a model are no results of it
            found.setdefault(result_name(name, row), {})[run] = row["value"]
    return [{"key": key, "values": [values.get(run) for run in run_ids]} for key, values in sorted(found.items())]
