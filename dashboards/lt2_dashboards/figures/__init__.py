"""Figures: one Python function each, from the results store to a chart, a table and the paper's numbers.

To add a figure, write a function in a module of this folder and list it in `FIGURES`:

    def my_figure(source: Source, *, runs: list[str], metric: str = "loss") -> Figure: ...

Its keyword arguments become the query parameters of /figures/my_figure; no JavaScript is needed.
"""

from lt2_dashboards.figures.ablations import hybrid
from lt2_dashboards.figures.curves import curves
from lt2_dashboards.figures.downstream import downstream
from lt2_dashboards.figures.figure import Figure, draw
from lt2_dashboards.figures.sweep import sweep

FIGURES = {function.__name__: function for function in (curves, downstream, hybrid, sweep)}

__all__ = ["FIGURES", "Figure", "draw"]
