"""Downstream accuracy of our runs beside the paper's table."""

from __future__ import annotations

import math
from typing import Any, Literal

from lt2.config import ConfigError
from lt2_dashboards.figures.figure import Figure
from lt2_dashboards.figures.paper import DOWNSTREAM, TASK_LABELS, TASKS
from lt2_dashboards.queries import PERPLEXITY, Snapshot, Source

MAX_RUNS = 40  # newest first
NORMALISED = {"arc_challenge", "hellaswag", "openbookqa"}  # where acc_norm is the customary number


def downstream(source: Source, *, size: Literal["0.6B", "1.3B"] = "1.3B", runs: list[str] | None = None) -> Figure:
    """Zero-shot accuracy per task: our runs in colour, the models of the paper's Table 2 of that size in grey.

    `runs` limits ours (default: the newest that have such results). A task counts with acc_norm for ARC-C, HellaSwag
    and OpenBookQA where a run has it, else with acc; a run's average is shown only when it has all eight tasks.
    """
    ours = _ours(source.snapshot(), runs)
    paper = DOWNSTREAM[size]
    columns = ["model", "source", "PPL", *TASK_LABELS, "average"]
    rows = [[run, "this store", *numbers] for run, numbers in ours.items()]
    rows += [[model, "paper", *(values or (None,) * 10)] for model, values in paper.items()]
    notes = [f"Paper: Table 2, {size}, 100B tokens of FineWeb-Edu, T = 4, averages as printed."]
    notes += [f"{model}: training diverged in the paper." for model, values in paper.items() if values is None]
    if not ours:
        notes.insert(0, "No run in this store has results on these tasks yet; the paper's are shown.")
    return Figure(f"Zero-shot accuracy (%), {size}", _option(ours, paper), columns, lambda: rows, notes)


def _ours(snapshot: Snapshot, runs: list[str] | None) -> dict[str, list[float | None]]:
    """Run -> [perplexity, eight accuracies in percent, average], newest run first."""
    if runs is not None and (unknown := [run for run in runs if run not in snapshot.runs(runs)]):
        raise ConfigError(f"no run {unknown[0][:60]!r}; it may have been deleted")
    found = snapshot.query(
        "SELECT e.run, task, metric, value FROM evals e JOIN runs USING (run) WHERE value IS NOT NULL "
        f"AND (list_contains(?, task) OR {PERPLEXITY}) ORDER BY created DESC, e.run, e.rowid",
        [list(TASKS)],
    )
    numbers: dict[str, dict[str, float]] = {}
    for run, task, metric, value in found:
        kind = (metric or "acc").split(",")[0]  # lm-eval writes "acc_norm,none"
        if task not in TASKS:
            name = "ppl" if kind in ("ppl", "perplexity") else None
        elif kind == "acc_norm":
            name = task if task in NORMALISED else None
        else:
            name = f"acc {task}" if task in NORMALISED else task
        if name is not None:
            numbers.setdefault(run, {})[name] = value if name == "ppl" or value > 1 else 100 * value
    for scores in numbers.values():
        for task in NORMALISED:
            if f"acc {task}" in scores:
                scores.setdefault(task, scores[f"acc {task}"])
    wanted = runs or list(numbers)
    rows = {run: [numbers.get(run, {}).get(name) for name in ("ppl", *TASKS)] for run in wanted[:MAX_RUNS]}
    kept = {run: row for run, row in rows.items() if runs or any(value is not None for value in row[1:])}
    return {run: [*row, _mean(row[1:])] for run, row in kept.items()}


def _mean(values: list[float | None]) -> float | None:
    known = [value for value in values if value is not None]
    return math.fsum(known) / len(known) if known and len(known) == len(values) else None


def _option(ours: dict[str, list[float | None]], paper: dict[str, tuple[float, ...] | None]) -> dict[str, Any]:
    labels = [*TASK_LABELS, "average"]
    grey = [_point(model, label, value) for model, row in paper.items() if row for label, value in zip(labels, row[1:])]
    series = [
        {"type": "scatter", "name": "paper", "paper": True, "symbol": "circle", "symbolSize": 8, "data": grey,
         "itemStyle": {"opacity": 0.45}},
    ]  # fmt: skip
    for position, (run, row) in enumerate(ours.items()):
        points = [_point(run, label, value) for label, value in zip(labels, row[1:]) if value is not None]
        series.append(
            {"type": "scatter", "name": run, "colorIndex": position, "symbol": "diamond", "symbolSize": 11,
             "data": points, "z": 4}
        )  # fmt: skip
    return {
        "xAxis": {"type": "value", "name": "accuracy (%)", "scale": True},
        "yAxis": {"type": "category", "data": labels, "inverse": True, "splitLine": {"show": True}},
        "series": series,
        "tooltip": {"trigger": "item"},
        "legend": {"show": True},
    }


def _point(model: str, label: str, value: float) -> dict[str, Any]:
    return {"name": f"{label}: {model}", "value": [value, label], "shown": value}
