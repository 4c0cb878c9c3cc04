"""Scores of many models on a list of tasks: one line per task, the paper's models in grey, ours in colour."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from itertools import zip_longest
from typing import Any

from lt2_dashboards.figures.figure import rounded
from lt2_dashboards.figures.parts.series import chart, points, whiskers

MAX_RUNS = 40  # newest first
APART, ROOM = 0.16, 0.8  # of a band: between two of our models, and for all of them
Scores = Mapping[str, Sequence[float | None]]  # model -> one value per label

# The two models of the paper that everything is compared with have marks of their own.
_MARKED = {"Looped Transformer": ("rect", 9), "Looped Hybrid (Full+GDN)": ("triangle", 10)}


def dots(
    labels: Sequence[str], paper: Scores, ours: Scores, *, unit: str, errors: Scores | None = None
) -> dict[str, Any]:
    """The option of such a chart: values across, `labels` down. `errors` are the standard errors of ours: whiskers.

    Ours stand below each other within the band of a label, so that equal values and long whiskers hide none. Only an
    axis of numbers has such places: labels are on the first vertical axis, everything drawn is on the second.
    """
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
        place = 0.5 + (position - (len(ours) - 1) / 2) * min(APART, ROOM / len(ours))
        data = _points(run, labels, values, spread, place)
        ends = [
            ([rounded(value - error), band + place], [rounded(value + error), band + place])
            for band, (value, error) in enumerate(zip(values, spread))
            if value is not None and error is not None
        ]
        series += whiskers(run, ends, position)
        series.append(points(run, data, position, symbol="diamond", symbolSize=11, z=4))
    bands = [
        {"type": "category", "data": list(labels), "inverse": True, "splitLine": {"show": True}},
        {"type": "value", "min": 0, "max": max(1, len(labels)), "inverse": True, "show": False},
    ]
    x = {"type": "value", "name": unit, "scale": True}
    return chart(x, bands, [{**each, "yAxisIndex": 1} for each in series])


def _points(
    model: str,
    labels: Sequence[str],
    values: Sequence[float | None],
    errors: Sequence[float | None] = (),
    place: float = 0.5,  # in the band of a label, from its top
) -> list[dict[str, Any]]:
    found = []
    for band, (label, value, error) in enumerate(zip_longest(labels, values, errors)):
        if value is not None:
            point = {"name": f"{label}: {model}", "value": [rounded(value), band + place], "shown": rounded(value)}
            found.append(point if error is None else point | {"detail": f"± {error:.3g}"})
    return found
