"""Figures: one Python function each, from the results store to a chart, a table and the paper's numbers.

To add a figure, write a function in a module of this folder and list it in `GROUPS` (docs/dashboard.md shows how):

    def my_figure(source: Source, *, runs: list[str], metric: str = "loss") -> Figure: ...

Its keyword arguments become the query parameters of /figures/my_figure; no JavaScript is needed.
"""

from lt2_dashboards.figures.ablations import hybrid, output_gate
from lt2_dashboards.figures.cost import cost_vs_length, layer_cost
from lt2_dashboards.figures.curves import curves
from lt2_dashboards.figures.distillation import distillation
from lt2_dashboards.figures.downstream import downstream
from lt2_dashboards.figures.figure import Figure, draw
from lt2_dashboards.figures.layouts import layouts
from lt2_dashboards.figures.positions import positions
from lt2_dashboards.figures.quality import depth, pareto
from lt2_dashboards.figures.recall import long_context, ruler
from lt2_dashboards.figures.scaling import scaling
from lt2_dashboards.figures.seeds import seeds
from lt2_dashboards.figures.state_recall import state_recall
from lt2_dashboards.figures.sweep import sweep
from lt2_dashboards.figures.throughput import throughput
from lt2_dashboards.figures.training import loop_diagnostics, stability

GROUPS = {
    "Quality": (pareto, downstream, depth),
    "Ablations": (hybrid, output_gate, sweep, seeds, scaling),
    "Efficiency": (throughput, cost_vs_length, layer_cost),
    "Looping": (layouts, stability, loop_diagnostics, state_recall),
    "Long context": (long_context, ruler, positions),
    "Distillation": (distillation,),
    "Training": (curves,),
}
FIGURES = {function.__name__: function for group in GROUPS.values() for function in group}

__all__ = ["FIGURES", "GROUPS", "Figure", "draw"]
