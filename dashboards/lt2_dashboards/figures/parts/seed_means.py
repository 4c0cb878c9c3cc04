"""Curves of runs that differ in their seeds only, drawn as one: their mean, and a band of one standard deviation."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from lt2_dashboards.figures.figure import rounded
from lt2_dashboards.figures.parts.repeats import settings
from lt2_dashboards.figures.parts.series import band, line

Points = tuple[np.ndarray, np.ndarray]  # places on the axis, ascending, and values there


def by_seed(configs: Mapping[str, Mapping[str, Any]]) -> list[list[str]]:
    """The runs of `configs` in groups that differ in their seeds only, in the order of their first ones."""
    groups: dict[str, list[str]] = {}
    for run, config in configs.items():
        groups.setdefault(json.dumps(settings(config), sort_keys=True), []).append(run)
    return list(groups.values())


def mean_and_deviation(curves: Sequence[Points]) -> tuple[np.ndarray, np.ndarray, np.ndarray] | None:
    """Places, mean and the sample's standard deviation of two or more curves, where all of them have values.

    They stand at the places of the first, between which the others are interpolated. Values that are not finite are
    left out. None if there is no place that two curves share.
    """
    known = [(at[ok], values[ok]) for at, values in curves if (ok := np.isfinite(values)).any()]
    if len(known) < 2:
        return None
    places = known[0][0]
    start, end = max(at[0] for at, _ in known), min(at[-1] for at, _ in known)
    places = places[(places >= start) & (places <= end)]
    if len(places) == 0:
        return None
    values = np.stack([np.interp(places, at, each) for at, each in known])
    mean, deviation = values.mean(axis=0), values.std(axis=0, ddof=1)
    # Of equal values only the sums' rounding would be left, and an axis would be drawn for that.
    return places, mean, np.where(deviation > 1e-9 * np.abs(mean), deviation, 0.0)


def mean_lines(
    runs: Sequence[str], name: str, position: int, curves: Sequence[Points], *, banded: bool
) -> list[dict[str, Any]]:
    """The series of such a group, called after its first run's `name`; none if its curves share no place.

    "members" has its runs, by which pages colour the names of all of them alike.
    """
    found = mean_and_deviation(curves)
    if found is None:
        return []
    name = f"{name} and {len(runs) - 1} more seed{'s' if len(runs) > 2 else ''}"
    places, mean, deviation = found
    at = places.tolist()
    data = [[place, rounded(value)] for place, value in zip(at, mean)]
    behind = band(name, at, mean - deviation, 2 * deviation, position) if banded else []
    return [*behind, line(name, data, position, members=list(runs), showSymbol=len(at) < 2)]
