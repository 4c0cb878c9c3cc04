"""Which mixer runs where: the unrolled grid of loops and layers."""

from __future__ import annotations

from typing import Any

from lt2.config import MixerConfig, ModelConfig
from lt2.layout import layout
from lt2_dashboards.figures.cost import own_models, paper_model
from lt2_dashboards.figures.figure import Figure
from lt2_dashboards.figures.parts.series import Panel, panels, points
from lt2_dashboards.figures.parts.store import label
from lt2_dashboards.queries import Source

_WINDOWS = [{"type": "window", "window": window} for window in (512, 256, 128)]
PAPER = {
    "Depth-level (Full+GDN, 1:4)": "Looped Hybrid (Full+GDN)",
    "Loop-level, coarse to fine": {"type": "loops", "mixers": [{"type": "full"}, *_WINDOWS]},
}


def layouts(source: Source, *, runs: list[str] | None = None) -> Figure:
    """Which mixer runs at every loop and layer: the paper's two ways to hybridise (Figure 3), and runs of this store.

    By default its newest architectures. A random hybrid is drawn as in its first step.
    """
    ours, problems = own_models(source, runs)
    entries = [(name, "paper", paper_model(given, n_loops=4)) for name, given in PAPER.items()]
    entries += [(run, "this store", model) for run, model in ours.items()]
    colours: dict[str, int] = {}
    found, rows = [], []
    for name, origin, model in entries:
        cells: dict[str, list[dict[str, Any]]] = {}
        for loop, row in enumerate(layout(model), start=1):
            for layer, mixer in enumerate(row, start=1):
                kind = called(mixer)
                colours.setdefault(kind, len(colours))
                cells.setdefault(kind, []).append(
                    {
                        "name": f"{name}: loop {loop}, layer {layer}",
                        "value": [f"{layer}", f"loop {loop}"],
                        "shown": kind,
                    }
                )
            kinds = [called(mixer) for mixer in row]
            counts = {kind: kinds.count(kind) for kind in dict.fromkeys(kinds)}
            rows.append([name, origin, loop, len(row), ", ".join(f"{n} {kind}" for kind, n in counts.items())])
        found.append(_panel(name, model, cells, colours))
    notes = ["1:4 over the paper's 20 layers at 1.3B is every fifth layer. All loops share a layer's weights."]
    columns = ["model", "source", "loop", "layers", "mixers"]
    option = panels(found, columns=2) | {"tooltip": {"trigger": "item"}}
    return Figure("Mixers by loop and layer", option, columns, lambda: rows, [*notes, *problems])


def called(mixer: MixerConfig) -> str:
    """A mixer's name; windows of several widths are told apart."""
    width = getattr(mixer, "window", None) if mixer.type == "window" else None
    return label(mixer.type) if width is None else f"{label(mixer.type)} {width}"


def _panel(name: str, model: ModelConfig, cells: dict[str, list[dict[str, Any]]], colours: dict[str, int]) -> Panel:
    layers = [f"{layer}" for layer in range(1, model.n_layers + 1)]
    x = {"type": "category", "name": "layer", "data": layers, "splitLine": {"show": False}}
    loops = [f"loop {loop}" for loop in range(1, model.n_loops + 1)]
    y = {"type": "category", "data": loops, "inverse": True, "splitLine": {"show": False}}
    series = [points(kind, data, colours[kind], symbol="rect", symbolSize=13) for kind, data in cells.items()]
    return Panel(name, x, y, series)
