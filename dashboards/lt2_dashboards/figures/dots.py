"""Scores of many models on a list of tasks: one line per task, the paper's models in grey, ours in colour."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from itertools import zip_longest
from typing import Any

from lt2_dashboards.figures.figure import rounded
from lt2_dashboards.figures.series import points, whiskers

MAX_RUNS = 40  # newest first
Scores = Mapping[str, Sequence[float | None]]  # model -> one value per label

# The two models of the paper that everything is compared with have marks of their own.
_MARKED = {"Looped Transformer": ("rect", 9), "Looped Hybrid (Full+GDN)": ("triangle", 10)}


def dots(
    labels: Sequence[str], paper: Scores, ours: Scores, *, unit: str, errors: Scores | None = None
) -> dict[str, Any]:
    """The option of such a chart: values across, `labels` down. `errors` are the standard errors of ours: whiskers."""
    series: list[dict[str, Any]] = []
    rest = {model: values for model, values in paper.items() if model not in _MARKED}
    if rest:
        grey = [point for model, values in rest.items() for point in _points(model, labels, values)]
        series.append(points("paper, other models", grey, symbol="circle", symbolSize=7, itemStyle={"opacity": 0.4}))
    for model, (symbol, size) in _MARKED.items():
        if model in paper:
            data = _points(model, labels, paper[model])
            series.append(points(f"paper, {model}", data, symbol=symbol, symbolSize=size))
    for position, (run, values) in enumerate(ours.items()):
        spread = (errors or {}).get(run) or [None] * len(labels)
        data = _points(run, labels, values, spread)
        ends = [
            ([rounded(value - error), label], [rounded(value + error), label])
            for label, value, error in zip(labels, values, spread)
            if value is not None and error is not None
        ]
        series += whiskers(run, ends, position)
        series.append(points(run, data, position, symbol="diamond", symbolSize=11, z=4))
    return {
        "xAxis": {"type": "value", "name": unit, "scale": True},
        "yAxis": {"type": "category", "data": list(labels), "inverse": True, "splitLine": {"show": True}},
        "series": series,
        "tooltip": {"trigger": "item"},
        "legend": {"show": True},
    }


def _points(
    model: str, labels: Sequence[str], values: Sequence[float | None], errors: Sequence[float | None] = ()
) -> list[dict[str, Any]]:
    found = []
    for label, value, error in zip_longest(labels, values, errors):
        if value is not None:
            point = {"name": f"{label}: {model}", "value": [rounded(value), label], "shown": rounded(value)}
            found.append(point if error is None else point | {"detail": f"± {error:.3g}"})
    return found
