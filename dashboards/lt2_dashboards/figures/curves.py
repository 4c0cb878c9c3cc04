"""Training curves of one or more runs."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

from lt2.train.config import SEEDS
from lt2_dashboards.figures.figure import Figure, rounded
from lt2_dashboards.figures.parts.across import NAMES, X, across
from lt2_dashboards.figures.parts.chosen import mixed_losses
from lt2_dashboards.figures.parts.names import titled, told_apart
from lt2_dashboards.figures.parts.seed_means import by_seed, mean_lines
from lt2_dashboards.figures.parts.series import band, line
from lt2_dashboards.figures.parts.store import known_runs
from lt2_dashboards.queries import Snapshot, Source
from lt2_platform.results.curves import refit
from lt2_platform.results.store import RunInfo
from lt2_platform.wording import first_of

NEWEST = 5
SPIKY = {"grad_norm"}
MIN_POINTS_TO_CUT = 100
START_CUT = "The start of training is above the axis."
DIVERGED = 4.0  # a loss that has been so many times its first does not set the axis for the others
SEED_MEANS = "Mean of seeds, as far as all go, ± standard deviation."
Line = tuple[pa.Table, np.ndarray]  # a curve as it is drawn, and where its points stand on the axis
POINTS_ON_SCREEN = 8_000  # over all lines of one chart


def curves(
    source: Source,
    *,
    runs: list[str] | None = None,
    metric: str = "loss",
    x: X = "step",
    log: bool = False,
    smooth: int = 0,
    full: bool = False,
    seeds: bool = False,
    points: int = 2_000,
) -> Figure:
    """A metric over training, one line per run: bucket means, with the range of each bucket behind a few lines.

    By default the newest runs that have logged it. The gradient norm of many runs is drawn as the largest in each
    bucket.

    `x` is the step, the tokens or FLOPs spent until then, or the hours since the run started, `log` a logarithmic value
    axis, `smooth` the half-life, in points, of an exponential moving average drawn instead of the raw mean. Unless
    `full`, the value axis of a loss leaves out its first 3 % of training, and what runs that diverged have above the
    others, so that later differences can be seen. With `seeds`, runs that differ in their seeds only are one line:
    their mean, and a band of one standard deviation. `points` is how many each line may have (a small chart needs
    fewer); the table has all that are stored.
    """
    snapshot, asked = source.snapshot(), runs
    runs = _newest(snapshot, metric) if runs is None else runs
    known = snapshot.runs(runs) or known_runs(snapshot, runs)
    series, found, lines, empty, unplaced = [], {}, {}, [], {}
    # A link that was kept still shows the other runs.
    notes = [f"There is no run {run[:60]!r}: it may have been deleted." for run in runs if run not in known]
    for run in known:
        loaded = source.curves(known[run])
        notes += [f"{problem}" for problem in loaded.skipped]
        curve = loaded.table.filter(pc.field("metric") == metric)
        if curve.num_rows == 0:
            empty.append(run)
            continue
        places = across(x, curve, known[run], loaded.table)
        if isinstance(places, str):
            unplaced[run] = places
            continue
        found[run] = (curve, known[run].created, places)
        drawn = refit(curve, max(100, min(points, POINTS_ON_SCREEN // len(runs))))
        ends = np.searchsorted(curve["step"].to_numpy(), drawn["step"].to_numpy())  # a wider bucket ends where one did
        lines[run] = (drawn, places[ends])
        if bad := int(np.sum(curve["nonfinite"].to_numpy())):
            values = "1 value is" if bad == 1 else f"{bad:,} values are"
            notes.append(f"{run}: {values} NaN or infinite and not drawn.")
    together = _groups(runs, known, lines, seeds=seeds)
    names = told_apart(snapshot, list(known), without=SEEDS if seeds else ())
    banded = len(runs) <= 3 and not log and not smooth
    for position, members in together:
        series += _of_group(members, names, position, lines, banded=banded, log=log, smooth=smooth)
    if any(len(members) > 1 for _, members in together):
        notes.append(SEED_MEANS)
    if empty and len(empty) < len(known):
        notes.append(f"Not logged by {', '.join(empty[:5])}{' and others' if len(empty) > 5 else ''}.")
    notes += [f"{run} is not on this axis: {why}." for run, why in list(unplaced.items())[:5]]
    top, cut = (None, []) if full or log or "loss" not in metric else _top(series)
    notes += cut
    if metric == "loss":
        notes += mixed_losses(known.values())
    more = [NAMES[x].partition(" (")[0]] if x in ("tokens", "flops") else []
    columns = ["run", "step", "hours", *more, "min", "mean", "max"]
    links = {note: {"full": "1"} for note in cut}
    return Figure(
        titled(metric, known.values()),
        _option(series, metric, x, log, top),
        columns,
        lambda: _table(found, bool(more)),
        notes,
        "" if series or asked is not None or metric != "loss" else "lt2 run quickstart",
        links,
    )


def _newest(snapshot: Snapshot, metric: str) -> list[str]:
    """The runs shown where none are named."""
    found = snapshot.query(
        "SELECT run FROM runs WHERE run IN (SELECT run FROM metrics WHERE metric = ?) "
        "ORDER BY created DESC, run LIMIT ?",
        [metric, NEWEST],
    )
    return [run for (run,) in found]


def _groups(
    runs: list[str], known: Mapping[str, RunInfo], lines: Mapping[str, Line], *, seeds: bool
) -> list[tuple[int, list[str]]]:
    """(number of a colour, runs that are one line): it does not hang on which of them have logged a metric."""
    found = by_seed({run: info.config for run, info in known.items()}) if seeds else [[run] for run in known]
    drawn = [(runs.index(members[0]), [run for run in members if run in lines]) for members in found]
    return [(position, members) for position, members in drawn if members]


def _of_group(
    members: list[str],
    names: Mapping[str, str],
    position: int,
    lines: Mapping[str, Line],
    *,
    banded: bool,
    log: bool,
    smooth: int,
) -> list[dict[str, Any]]:
    if len(members) > 1:
        points = [
            (at, np.array(_smoothed(curve["mean"].to_numpy(), smooth))) for curve, at in map(lines.__getitem__, members)
        ]
        if together := mean_lines(members, names[members[0]], position, points, banded=not log):
            return together
    return [each for run in members for each in _lines(names[run], position, *lines[run], banded=banded, smooth=smooth)]


def _table(found: dict[str, tuple[pa.Table, float, np.ndarray]], with_places: bool) -> list[list[Any]]:
    rows: list[list[Any]] = []
    for run, (curve, start, places) in found.items():
        columns = zip(places.tolist(), *(curve[name].to_pylist() for name in ("step", "time", "min", "mean", "max")))
        rows += [
            [run, step, round((time - start) / 3600, 6), *([place] if with_places else []), *values]
            for place, step, time, *values in columns
        ]
    return rows


def _lines(
    name: str, position: int, curve: pa.Table, places: np.ndarray, *, banded: bool, smooth: int
) -> list[dict[str, Any]]:
    banded = banded and int(curve["width"].to_numpy().max()) > 1
    metric = curve["metric"][0].as_py()
    # Gradient spikes are what one looks for, and a mean over a bucket would hide them; the band shows them already.
    value = curve["max" if metric in SPIKY and not banded and not smooth else "mean"].to_numpy()
    at = places.tolist()  # steps are whole numbers, of which every digit counts
    at = [rounded(value) if isinstance(value, float) else value for value in at]
    data = [[a, rounded(v)] for a, v in zip(at, _smoothed(value, smooth))]
    low, high = curve["min"].to_numpy(), curve["max"].to_numpy()
    behind = band(name, at, low, high - low, position) if banded else []
    return [*behind, line(name, data, position, showSymbol=curve.num_rows < 2)]


def _top(series: list[dict[str, Any]]) -> tuple[float | None, list[str]]:
    """The end of the value axis that leaves out runs that diverged and the start of training, and notes on what is not
    shown; (None, []) if that would gain little.
    """
    lines = {
        line["name"]: values
        for line in series
        if "band" not in line and (values := [value for _, value in line["data"] if value is not None])
    }
    if not lines:
        return None, []
    rest = [values for values in lines.values() if max(values) <= DIVERGED * abs(values[0])] or list(lines.values())
    low, high = min(map(min, rest)), max(map(max, rest))
    diverged = [name for name, values in lines.items() if max(values) > high]
    notes = [f"Above the axis: {first_of(diverged)}."] if diverged else []
    if min(map(len, rest)) >= MIN_POINTS_TO_CUT:
        after_start = max(max(values[len(values) * 3 // 100 :]) for values in rest)
        if after_start - low < 0.6 * (high - low):
            return rounded(after_start), [*notes, START_CUT]
    return (rounded(high), notes) if diverged else (None, [])


def _smoothed(values: np.ndarray, half_life: int) -> list[float]:
    """Exponential moving average without the bias of its start; NaN leaves a gap and does not spread."""
    if half_life <= 0:
        return values.tolist()
    decay, total, weight, out = 0.5 ** (1 / half_life), 0.0, 0.0, []
    for value in values.tolist():
        if value == value:
            total, weight = decay * total + value, decay * weight + 1.0
        out.append(total / weight if value == value else value)
    return out


def _option(series: list[dict[str, Any]], metric: str, x: str, log: bool, top: float | None) -> dict[str, Any]:
    end = {} if top is None else {"max": top, "axisLabel": {"showMaxLabel": False}}
    return {
        "xAxis": {"type": "value", "name": NAMES[x], "max": "dataMax", **({"minInterval": 1} if x == "step" else {})},
        "yAxis": {"type": "log" if log else "value", "scale": metric != "lr", **end},
        "series": series,
        "tooltip": {"trigger": "axis"},
        "empty": None if series else f"No run shown here has logged {metric!r}.",
    }
