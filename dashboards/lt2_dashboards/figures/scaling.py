"""A result by the training compute behind it: how architectures scale."""

from __future__ import annotations

import json
import math
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal

import numpy as np

from lt2.layout import loops_text
from lt2_dashboards.figures.figure import Figure, rounded
from lt2_dashboards.figures.parts.across import NAMES
from lt2_dashboards.figures.parts.chosen import LOWER_IS_BETTER, RESULTS, choose
from lt2_dashboards.figures.parts.names import MAX_TOLD, in_words
from lt2_dashboards.figures.parts.seed_means import by_seed
from lt2_dashboards.figures.parts.series import chart, frontier, line, points, whiskers
from lt2_dashboards.figures.parts.store import architecture
from lt2_dashboards.queries import Source
from lt2_platform.evaluate.student import mean_std
from lt2_platform.results.flops import spending_of
from lt2_platform.results.store import RunInfo, differences
from lt2_platform.results.tables import flatten
from lt2_platform.wording import first_of

LOSS = "validation/perplexity/loss"  # of the same text as RESULTS[0]; a perplexity follows no power law
FEWEST = 3  # points that a law is fitted to: through two goes any
_GROWS = re.compile(r"(heads|dim|rank|kept)$")  # settings of mixers, and the layers of a layout
_FITTED = re.compile(r"(^|[/_])(loss|ce)$")


@dataclass(frozen=True)
class Point:
    """Runs that differ in their seeds only: what one of them spent, and their mean result."""

    runs: tuple[str, ...]
    spent: float
    value: float
    deviation: float | None


@dataclass(frozen=True)
class Law:
    """value = a · spent^-b, by least squares of the logarithms; `error` is b's standard error."""

    a: float
    b: float
    error: float
    first: float
    last: float

    def at(self, spent: float) -> float:
        return self.a * spent**-self.b

    def spends(self, value: float) -> float:
        return (self.a / value) ** (1 / self.b)


def scaling(source: Source, *, q: str = "", metric: str = "", x: Literal["flops", "tokens"] = "flops") -> Figure:
    """A result by the training FLOPs, or tokens, behind it; one colour per layout and number of loops.

    Through the losses of a layout that was trained with three budgets or more goes a power law, fitted to its best
    runs: those that none of its own beats with as little. Runs that differ in their seeds only are one point. `q`
    filters runs as in the runs table; `metric` is a logged metric's last value or an evaluation (name/task/metric), by
    default a held-out loss. Runs that have not ended, or that begin with or learn from other models, are left out.
    """
    found, snapshot = choose(source, q, metric), source.snapshot()
    if not metric and found.metric == RESULTS[0] and (held_out := choose(source, q, LOSS)).runs:
        found = held_out
    metric = found.metric
    title, unit = f"{found.title} by training {'FLOPs' if x == 'flops' else 'tokens'}", NAMES[x].partition(" (")[0]
    columns = ["layout", "loops", unit, metric, "standard deviation", "best", "runs"]
    if found.refused:
        return Figure(title, {"series": [], "empty": found.refused}, columns, list)
    infos = snapshot.runs([run for run, _ in found.runs])
    spent, notes = _spent(infos, x)
    grouped = _points({run: value for run, value in found.runs if run in spent}, infos, spent)
    better = min if LOWER_IS_BETTER.search(metric) else max
    names = _names({key: infos[members[0].runs[0]].config for key, members in grouped.items()})
    series, rows, laws = [], [], {}
    for position, key in enumerate(sorted(grouped, key=names.__getitem__)):
        name, members = names[key], sorted(grouped[key], key=lambda point: (point.spent, point.value))
        best = frontier(members, lambda point: (point.spent, point.value), better)
        kind = architecture(infos[members[0].runs[0]].config)
        loops = kind.n_loops if kind else 1
        series += _drawn(name, members, position)
        if _FITTED.search(metric) and (law := _fit(best)):
            laws[name] = law
            series.append(_curve(name, law, position))
        rows += [
            [name, loops, p.spent, p.value, p.deviation, "yes" if p in best else "no", ", ".join(p.runs)]
            for p in members
        ]
    y = {"type": "value", "name": found.title, "scale": True}
    nothing = f"No finished run that matches and started from scratch has the result {metric!r}."
    option = chart({"type": "log", "name": NAMES[x]}, y, series, nothing)
    notes = [*found.notes, *notes, *_said(laws, unit)]
    produce = "" if rows or q else "lt2 sweep examples/equal_flops.py:scaling"
    return Figure(title, option, columns, lambda: rows, notes, produce)


def _spent(infos: Mapping[str, RunInfo], x: str) -> tuple[dict[str, float], list[str]]:
    """By run what it spent until its end, and notes on those of which that cannot be said."""
    spent: dict[str, float] = {}
    left: dict[str, list[str]] = {}
    for run, info in infos.items():
        step, tokens = info.last.get("tokens", (0, 0.0))
        if info.elsewhere or step < 1:
            continue
        others = [name for name in info.info.get("models", {}) if name != "continue_from"]
        if info.state != "finished":
            left.setdefault("have not ended", []).append(run)
        elif others:
            left.setdefault("start from or learn from other models, whose cost is not counted", []).append(run)
        elif x == "tokens":
            spent[run] = tokens
        elif isinstance(spending := spending_of(info.config, step, tokens), str):
            left.setdefault(f"have unknown FLOPs ({spending})", []).append(run)
        else:
            spent[run] = spending.by(step, tokens)
    return spent, [f"Left out, because they {why}: {first_of(runs)}." for why, runs in left.items()]


def _points(
    values: Mapping[str, float], infos: Mapping[str, RunInfo], spent: Mapping[str, float]
) -> dict[str, list[Point]]:
    """By a key of the layout its points."""
    found: dict[str, list[Point]] = {}
    for runs in by_seed({run: infos[run].config for run in values}):
        mean, deviation = mean_std([values[run] for run in runs])
        assert mean is not None  # a group has a run
        point = Point(tuple(runs), spent[runs[0]], mean, deviation)
        found.setdefault(json.dumps(_shape(infos[runs[0]].config), sort_keys=True), []).append(point)
    return found


def _shape(config: Mapping[str, Any]) -> dict[str, Any]:
    """What makes an architecture, as flat settings: none of those that grow with the model."""
    model = config.get("model", config)
    model = model if isinstance(model, Mapping) else {}
    found = flatten({name: model.get(name) for name in ("layout", "n_loops", "halting")})
    return {key: value for key, value in found.items() if not _GROWS.search(key)}


def _names(configs: Mapping[str, Mapping[str, Any]]) -> dict[str, str]:
    """By key what the architecture is called; those called alike by what they differ in as well."""
    kinds = {key: architecture(config) for key, config in configs.items()}
    names = {key: f"{kind.name}, {loops_text(kind.n_loops)}" if kind else "unknown" for key, kind in kinds.items()}
    for name in set(names.values()):
        alike = [key for key, each in names.items() if each == name]
        apart = differences({key: _shape(configs[key]) for key in alike})
        for number, key in enumerate(alike if len(alike) > 1 else [], 1):
            names[key] = f"{name} ({', '.join(in_words(apart[key])[:MAX_TOLD]) or number})"
    return names


def _fit(best: Sequence[Point]) -> Law | None:
    """The law through points of different budgets; None of too few, and of a loss that does not fall."""
    if len(best) < FEWEST or min(point.value for point in best) <= 0:
        return None
    at, values = (np.log([getattr(point, name) for point in best]) for name in ("spent", "value"))
    centred = at - at.mean()
    slope = float(centred @ values / (centred @ centred))
    residual = values - values.mean() - slope * centred
    error = math.sqrt(float(residual @ residual) / (len(best) - 2) / float(centred @ centred))
    a = math.exp(float(values.mean() - slope * at.mean()))
    return Law(a, -slope, error, best[0].spent, best[-1].spent) if slope < 0 else None


def _drawn(name: str, members: Sequence[Point], position: int) -> list[dict[str, Any]]:
    data, ends = [], []
    for point in members:
        told = [f"{len(point.runs)} run" + "s" * (len(point.runs) > 1)]
        if point.deviation is not None:
            told.append(f"± {point.deviation:.3g}")
            low, high = (rounded(point.value + sign * point.deviation) for sign in (-1, 1))
            ends.append(([point.spent, low], [point.spent, high]))
        value = [rounded(point.spent), rounded(point.value)]
        data.append({"name": f"{point.runs[0]}: {name}", "value": value, "detail": ", ".join(told)})
    return [*whiskers(name, ends, position), points(name, data, position, symbolSize=9, z=4)]


def _curve(name: str, law: Law, position: int) -> dict[str, Any]:
    places = np.geomspace(law.first, law.last, 24).tolist()
    data = [[rounded(place), rounded(law.at(place))] for place in places]
    return line(name, data, position, symbol="none", lineStyle={"type": "dotted"}, silent=True)


def _said(laws: Mapping[str, Law], unit: str) -> list[str]:
    """The notes on laws: their exponents, and what the best one saves where all of them were measured."""
    if not laws:
        return []
    notes = [
        "Lines are power laws through each layout's best runs, without an irreducible loss: they do not extrapolate "
        f"beyond their range, and are only as good as the settings tried at each budget. Exponents of {unit}: "
        + "; ".join(f"{name} -{law.b:.3g} ± {law.error:.1g}" for name, law in laws.items())
        + "."
    ]
    here = min(law.last for law in laws.values())
    shared = {name: law for name, law in laws.items() if law.first < here}
    best = min(shared, key=lambda name: shared[name].at(here), default="")
    for name, law in shared.items():
        needed = shared[best].spends(law.at(here))
        if name != best and needed >= shared[best].first:
            notes.append(f"{best} matches the loss of {name} at {here:.3g} {unit} with {needed / here:.2f} of them.")
    return notes
