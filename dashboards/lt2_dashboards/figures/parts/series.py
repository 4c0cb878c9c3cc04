"""Parts of charts: series, and charts of several panels, which the page's theme places."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from typing import Any, TypeVar

from lt2_dashboards.figures.figure import rounded

Item = TypeVar("Item")


def line(name: str, data: list[Any], colour: int | None = None, **more: Any) -> dict[str, Any]:
    """A line in the theme's colour of that number; without one it is the paper's, in grey."""
    return {"type": "line", "name": name, "data": data, **_tint(colour), **more}


def points(name: str, data: list[Any], colour: int | None = None, **more: Any) -> dict[str, Any]:
    """A series of single points; arguments as of `line`."""
    return {"type": "scatter", "name": name, "data": data, **_tint(colour), **more}


def whiskers(name: str, ends: Iterable[tuple[list[Any], list[Any]]], colour: int, **more: Any) -> list[dict[str, Any]]:
    """Error bars: a line between the two points of each of `ends`; no series if there are none.

    A series and no mark, so that the axis makes room for it.
    """
    data = [point for low, high in ends for point in (low, high, [None, None])]
    style = {"silent": True, "symbol": "none", "lineStyle": {"width": 1.5, "type": "solid"}}
    return [line(name, data, colour, **style, **more)] if data else []


def band(name: str, places: Sequence[Any], low: Iterable[float], width: Iterable[float], colour: int) -> list[Any]:
    """A shaded band from `low` up by `width`; stacked, also where its lower end is negative."""
    common = {"stack": f"range {name}", "band": True, "stackStrategy": "all"}
    below, above = ([[at, rounded(value)] for at, value in zip(places, values)] for values in (low, width))
    return [line(name, below, colour, **common), line(name, above, colour, areaStyle={"opacity": 0.16}, **common)]


def frontier(
    found: Iterable[Item], place: Callable[[Item], tuple[float, float]], better: Callable[[float, float], float]
) -> list[Item]:
    """Of items at (cost, value) those that no other beats for as little, by rising cost; `better` is min or max."""
    best: list[Item] = []
    for item in sorted(found, key=lambda item: place(item)[0]):
        cost, value = place(item)
        if not best or better(value, place(best[-1])[1]) != place(best[-1])[1]:
            if best and place(best[-1])[0] == cost:
                best.pop()
            best.append(item)
    return best


def chart(
    x: dict[str, Any], y: dict[str, Any] | list[dict[str, Any]], series: list[dict[str, Any]], empty: str = ""
) -> dict[str, Any]:
    """The option of a chart whose tooltip tells of one point; `empty` is what to say where there is nothing to draw."""
    option = {"xAxis": x, "yAxis": y, "series": series, "tooltip": {"trigger": "item"}, "legend": {"show": True}}
    return option | ({} if series else {"empty": empty})


def _tint(colour: int | None) -> dict[str, Any]:
    return {"paper": True} if colour is None else {"colorIndex": colour}


@dataclass
class Panel:
    """One panel: its title, its two axes and the series drawn in it."""

    title: str
    x: dict[str, Any]
    y: dict[str, Any]
    series: list[dict[str, Any]] = field(default_factory=list)


def panels(found: list[Panel], *, columns: int) -> dict[str, Any]:
    """The option of `found` in rows of `columns`; the theme turns "panels" into ECharts grids and titles."""
    return {
        "panels": {"columns": columns, "titles": [panel.title for panel in found]},
        "xAxis": [{**panel.x, "gridIndex": index} for index, panel in enumerate(found)],
        "yAxis": [{**panel.y, "gridIndex": index} for index, panel in enumerate(found)],
        "series": [
            {**series, "xAxisIndex": index, "yAxisIndex": index}
            for index, panel in enumerate(found)
            for series in panel.series
        ],
        "tooltip": {"trigger": "axis"},
        "legend": {"show": True},
    }


def by_length(name: str, lengths: Iterable[int]) -> dict[str, Any]:
    """The x axis of `lengths` in tokens, on which a length stands at `at_length`."""
    places = [at_length(length) for length in lengths]
    low, high = math.floor(min(places, default=10)), math.ceil(max(places, default=10))
    alone = low == high
    return {"type": "value", "binary": True, "interval": 1, "min": low - alone, "max": high + alone, "name": name}


def at_length(tokens: int) -> float:
    """The base-2 logarithm; the theme writes 14 as 16k."""
    return round(math.log2(tokens), 6)
