"""The numbers of all runs as flat rows: last values, summaries and evaluations, and which of repeated ones counts."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

from lt2.layout import loops_text
from lt2_platform.evaluate.repeats import counting, is_reading
from lt2_platform.results.index import Index
from lt2_platform.results.tables import as_number, flatten, unit_of

PLACE = ("step", "position")  # where a training's summary says that it ended in its data: the rows' step says as much


def result_rows(index: Index) -> Iterator[tuple[str, dict[str, Any]]]:
    """(run, {step, metric, value, unit, counts, maybe n, data}), see ResultsStore.results."""
    for run_id, run in sorted(index.runs.items()):
        for metric, (step, value) in sorted(run.last.items()):
            yield run_id, _row(step, metric, value, unit_of(metric, run.config))
        for metric, value in sorted(flatten(run.summary or {}).items()):
            if as_number(value) is not None and metric not in (*run.last, *PLACE):
                yield run_id, _row(run.step, f"summary.{metric}", value, "")
    evaluations = [
        (run_id, result_name(name, row), row)
        for run_id, name, row in index.evals
        if as_number(row.get("value")) is not None and not is_reading(row)
    ]
    chosen = counting(((run_id, name), row) for run_id, name, row in evaluations)
    for run_id, name, row in evaluations:
        counts = chosen[run_id, name] is row
        told = {key: row[key] for key in ("n", "data") if row.get(key) is not None}
        yield run_id, _row(row.get("step"), name, row["value"], row.get("unit") or "", counts=counts) | told


def _row(step: int | None, metric: str, value: float, unit: str, *, counts: bool = True) -> dict[str, Any]:
    return {"step": step, "metric": metric, "value": float(value), "unit": unit, "counts": counts}


def result_name(evaluation: str, row: Mapping[str, Any]) -> str:
    """What a result is called, e.g. "validation/arc_easy/acc" or "depth/arc_easy/acc/8 loops"."""
    parts = [evaluation, *(str(row[key]) for key in ("task", "metric") if row.get(key) is not None)]
    if evaluation == "depth" and "n_loops" in row:  # a table over depths: its rows differ in nothing else
        parts.append(loops_text(row["n_loops"], row.get("early_exit"), row.get("exit_threshold")))
    return "/".join(parts)
