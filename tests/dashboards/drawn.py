"""Figures as their tests look at them."""

from __future__ import annotations

from lt2_dashboards.figures import FIGURES, Figure, draw
from lt2_dashboards.queries import Source


def figure(source: Source, name: str, **query: str) -> Figure:
    return draw(FIGURES[name], source, query)


def ours(found: Figure) -> list[list]:
    at = found.columns.index("source")
    return [row for row in found.rows if row[at] != "paper"]


def series(found: Figure, name: str) -> list[dict]:
    return [each for each in found.option["series"] if each["name"] == name]
