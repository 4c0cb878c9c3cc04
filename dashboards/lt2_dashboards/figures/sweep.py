"""Many runs at once: every setting that varies, against one result."""

from __future__ import annotations

import textwrap
from collections.abc import Sequence
from typing import Any

from lt2_dashboards.figures.figure import Figure, rounded
from lt2_dashboards.figures.parts.chosen import LOWER_IS_BETTER, Chosen, choose
from lt2_dashboards.figures.parts.names import short_names
from lt2_dashboards.queries import Snapshot, Source

MAX_AXES = 8
BEST_TO_WORST = ("#2f6bd8", "#7a9fd0", "#d9a35b", "#c2334d")
NEEDS = "lt2 sweep ratio"  # or any runs; said where nobody has filtered them away


def sweep(source: Source, *, q: str = "", metric: str = "") -> Figure:
    """Parallel coordinates of the settings that differ among runs, coloured by a result: the best ones are blue.

    `q` filters runs as in the runs table; `metric` is a logged metric's last value or an evaluation (name/task/metric),
    by default what `chosen.RESULTS` says. Runs without that result are left out.
    """
    found, snapshot = choose(source, q, metric), source.snapshot()
    metric, runs, varying, title = found.metric, found.runs, found.varying, f"{found.title} by settings"
    if found.refused:
        return Figure(title, {"series": [], "empty": found.refused}, ["run", metric], list)
    sign = 1 if LOWER_IS_BETTER.search(metric) else -1
    runs = sorted(runs, key=lambda run: sign * run[1])
    keys = varying[:MAX_AXES]
    settings = settings_of(snapshot, [run for run, _ in runs], keys)
    rows = [[run, *(settings[run].get(key, (None, None))[0] for key in keys), value] for run, value in runs]
    more = [f"{len(varying) - MAX_AXES} more settings differ and are not drawn."] if len(varying) > MAX_AXES else []
    option = _option(runs, keys, settings, found, BEST_TO_WORST[::sign])
    produce = "" if runs or q else NEEDS
    return Figure(title, option, ["run", *keys, metric], lambda: rows, [*found.notes, *more], produce)


def settings_of(snapshot: Snapshot, runs: list[str], keys: list[str]) -> dict[str, dict[str, tuple[str, float | None]]]:
    """{run: {key: (the setting as text, as a number if it is one)}}."""
    found = snapshot.query(
        "SELECT run, key, text, number FROM config WHERE list_contains(?, run) AND list_contains(?, key)", [runs, keys]
    )
    settings: dict[str, dict[str, tuple[str, float | None]]] = {run: {} for run in runs}
    for run, key, text, number in found:
        settings[run][key] = (text, number)
    return settings


def _option(
    runs: list[tuple[str, float]], keys: list[str], settings: Any, found: Chosen, colours: Sequence[str]
) -> dict[str, Any]:
    """`runs` best first, and so drawn last; `colours` are those of the lowest to the highest value."""
    if not runs:
        return {"series": [], "empty": f"No run that matches has the result {found.metric!r}."}
    if not keys:
        return {"series": [], "empty": "These runs have the same settings; choose runs that differ."}
    columns = {key: [settings[run].get(key, ("not set", None)) for run, _ in runs] for key in keys}
    names = short_names(keys)
    axes = [_axis(index, names[key], columns[key]) for index, key in enumerate(keys)]
    values = [value for _, value in runs]
    result = textwrap.fill(found.title.partition(" (")[0], 14)
    axes.append({"dim": len(keys), "name": result, "type": "value", "scale": True})
    lines = [
        {"name": run, "value": [*(_at(axis, settings[run].get(key)) for axis, key in zip(axes, keys)), rounded(value)]}
        for run, value in reversed(runs)
    ]
    low, high = min(values), max(values)
    return {
        "parallel": {"left": 60, "right": 110, "top": 54, "bottom": 20},
        "parallelAxis": axes,
        "visualMap": {
            "type": "continuous", "min": low, "max": high if high > low else low + 1, "dimension": len(keys),
            "right": 8, "top": "middle", "itemHeight": 160, "itemWidth": 10, "precision": 4,
            "inRange": {"color": list(colours)},
        },
        "series": [
            {"type": "parallel", "name": "runs", "data": lines, 
             "lineStyle": {"width": 1.6 if len(lines) < 100 else 1, "opacity": 0.75 if len(lines) < 100 else 0.35}}
        ],
        "tooltip": {"trigger": "item"},
    }  # fmt: skip


def _axis(index: int, name: str, values: list[tuple[str, float | None]]) -> dict[str, Any]:
    """A numeric axis when every run has a number there (logarithmic over more than a decade), else one of names."""
    numbers = [number for _, number in values]
    if all(number is not None for number in numbers):
        positive = [number for number in numbers if number is not None and number > 0]
        log = len(positive) == len(numbers) and max(positive) > 10 * min(positive)
        whole = {"minInterval": 1} if all(number % 1 == 0 for number in numbers if number is not None) else {}
        return {"dim": index, "name": name, **({"type": "log"} if log else {"type": "value", "scale": True, **whole})}
    kinds = sorted({(number is None, number or 0.0, text) for text, number in values})  # 20 before 200 before "not set"
    return {"dim": index, "name": name, "type": "category", "data": list(dict.fromkeys(text for *_, text in kinds))}


def _at(axis: dict[str, Any], setting: tuple[str, float | None] | None) -> Any:
    text, number = setting or ("not set", None)
    return text if axis["type"] == "category" else number
