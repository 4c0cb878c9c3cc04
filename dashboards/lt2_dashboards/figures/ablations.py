"""The paper's ablations of hybrids and of the output gate, beside the runs of this store."""

from __future__ import annotations

import math
from typing import Any, Literal

from lt2_dashboards.figures.figure import Figure, rounded
from lt2_dashboards.figures.parts.paper import GATES, LEVELS, PATTERNS, RATIOS
from lt2_dashboards.figures.parts.repeats import Known, Line, Mean, depth_and_size, lines
from lt2_dashboards.figures.parts.series import chart, line, points, whiskers
from lt2_dashboards.figures.parts.store import Architecture, Evaluated, evaluated
from lt2_dashboards.figures.parts.texts import perplexity_notes
from lt2_dashboards.queries import Source

Quality = Literal["perplexity", "average"]
AXES = {"perplexity": "perplexity", "average": "average accuracy (%)"}


def hybrid(
    source: Source, *, by: Literal["ratio", "pattern", "level"] = "ratio", quality: Quality = "perplexity"
) -> Figure:
    """Full+GDN hybrids by ratio of attention to GDN, by pattern at 1:4, or by level: the paper's Table 3, and ours.

    Ours are runs with such a layout and a perplexity evaluation, or all eight downstream tasks, told apart by depth.
    Runs that differ in their seeds only are also joined at their mean, with their standard deviation.
    """
    reference = {"ratio": RATIOS, "pattern": PATTERNS, "level": LEVELS}[by]
    names = [name for name, *_ in reference]
    theirs = [(name, ppl if quality == "perplexity" else average) for name, ppl, average in reference]
    snapshot = source.snapshot()
    known = [
        (run, place, value)
        for run in evaluated(snapshot)
        if (place := _place(run.architecture, by)) in names and (value := value_of(run, quality)) is not None
    ]
    repeated = [each for each in lines(known) if each.is_repeated]
    notes = ["Paper: Table 3, 1.3B, T = 4, 100B tokens. Ours has its own axis: compare shapes, not heights."]
    if by == "ratio":
        notes.append("The axis shows the requested ratios; with few layers not all are possible (see attention in).")
    if repeated:
        notes.append("Squares are means over seeds, with one standard deviation; diamonds are single runs.")
    if by == "level":
        notes.append("Random + vote needs 5 times the compute to evaluate.")
    if quality == "perplexity":
        notes += perplexity_notes(snapshot, [run.run for run, *_ in known])
    grey = {"showSymbol": True, "symbolSize": 8, "lineStyle": {"type": "dashed"}}
    series = [line("paper, 1.3B", [value for _, value in theirs], **grey), *_hybrids(known, repeated, names)]
    x_axis = {"type": "category", "data": names, "name": "attention : GDN" if by == "ratio" else by}
    rows: list[list[Any]] = [
        [run.run, "this store", name, run.attention_in, depth_and_size([run]), value, None]
        for run, name, value in known
    ]
    rows += [
        [f"mean of {mean.n}", "this store", name, None, mean.label, mean.value, mean.deviation]
        for each in repeated
        for name, mean in each.means.items()
        if mean.n > 1
    ]
    rows += [["1.3B", "paper", name, None, "T = 4, 1.3B", value, None] for name, value in theirs]
    return Figure(
        f"Hybrid {by}: {AXES[quality]}",
        _beside_paper(x_axis, quality, series),
        ["model", "source", by, "attention in", "depth and size", quality, "standard deviation"],
        lambda: rows,
        notes,
        produce="" if known else f"lt2 sweep {by}",
    )


def _hybrids(known: list[Known], repeated: list[Line], names: list[str]) -> list[dict[str, Any]]:
    """Lines through the means of runs that were repeated, those runs in their line's colour, and others by depth."""
    series = []
    for colour, each in enumerate(repeated):
        label = f"this store, {each.label}"
        ends = [
            ([name, rounded(mean.value - mean.deviation)], [name, rounded(mean.value + mean.deviation)])
            for name, mean in each.means.items()
            if mean.deviation is not None
        ]
        middle = [_mean_point(name, each.means.get(name)) for name in names]
        # A mark at each mean: a line through a single place would not be seen.
        marks = {"showSymbol": True, "symbol": "rect", "symbolSize": 7}
        series += whiskers(label, ends, colour, yAxisIndex=1)
        series.append(_single(label, [run for run in known if run[0].run in each.runs], colour))
        series.append(line(label, middle, colour, yAxisIndex=1, connectNulls=True, **marks))
    drawn = {run for each in repeated for run in each.runs}
    depths: dict[int, list[Known]] = {}
    for run in known:
        if run[0].run not in drawn and run[0].architecture:
            depths.setdefault(run[0].architecture.n_loops, []).append(run)
    more = ", not repeated" if repeated else ""
    for colour, (n_loops, runs) in enumerate(sorted(depths.items()), start=len(repeated)):
        series.append(_single(f"this store, T = {n_loops}{more}", runs, colour))
    return series


def _single(label: str, runs: list[Known], colour: int) -> dict[str, Any]:
    data = [{"name": f"{run.run}: {_told(run)}", "value": [name, rounded(value)]} for run, name, value in runs]
    return points(label, data, colour, yAxisIndex=1, symbol="diamond", symbolSize=11)


def _mean_point(name: str, mean: Mean | None) -> dict[str, Any] | None:
    if mean is None:
        return None
    told = f"mean of {mean.n}" + ("" if mean.deviation is None else f", ± {mean.deviation:.3g}")
    return {"name": f"{name}: {mean.label}", "value": rounded(mean.value), "detail": told}


def _told(run: Evaluated) -> str:
    """Depth and size, and what of a ratio its layers can have: 1:6 of 20 layers is 1:9."""
    return depth_and_size([run]) + (f", attention in {run.attention_in}" if run.attention_in else "")


def output_gate(source: Source, *, quality: Quality = "perplexity") -> Figure:
    """What the gate after the attention changes in the three models of the paper's Table 4, and in ours."""
    snapshot = source.snapshot()
    known = [
        (run.run, kind, value)
        for run in evaluated(snapshot)
        if (kind := run.architecture) and (value := value_of(run, quality)) is not None
    ]
    sides: dict[tuple[Any, ...], set[bool]] = {}
    for _, kind, _ in known:
        sides.setdefault(_but_for_gate(kind), set()).add(kind.gate is None)
    ours = [
        (run, kind.title, kind.gate, value)
        for run, kind, value in known
        if len(sides[_but_for_gate(kind)]) == 2 or (kind.gate and kind.title in GATES)
    ]
    models = [*GATES, *sorted({title for _, title, *_ in ours} - set(GATES))]
    column = 0 if quality == "perplexity" else 1
    rows: list[list[Any]] = [[run, "this store", title, gate or "none", value] for run, title, gate, value in ours]
    for title, values in GATES.items():
        rows += [["1.3B", "paper", title, gate, pair[column]] for gate, pair in zip(("none", "yes"), values)]
    arrows = [[[title, pair[0][column]], [title, pair[1][column]], [title, None]] for title, pair in GATES.items()]
    between = {"silent": True, "lineStyle": {"width": 1, "type": "dotted"}}
    series = [line("paper, gate", [end for arrow in arrows for end in arrow], **between)]
    for index, (name, symbol) in enumerate((("no gate", "emptyCircle"), ("gate", "circle"))):
        data = [{"name": title, "value": [title, pair[index][column]]} for title, pair in GATES.items()]
        series.append(points(f"paper, {name}", data, symbol=symbol, symbolSize=11))
    for name, on, symbol in (("no gate", False, "emptyDiamond"), ("gate", True, "diamond")):
        data = [{"name": run, "value": [t, rounded(v)]} for run, t, g, v in ours if bool(g) == on]
        if data:
            series.append(points(f"this store, {name}", data, 0, yAxisIndex=1, z=4, symbol=symbol, symbolSize=13))
    label = {"width": 120, "overflow": "break", "lineHeight": 14, "interval": 0}
    option = _beside_paper({"type": "category", "data": models, "axisLabel": label}, quality, series)
    notes = ["Paper: Table 4, 1.3B, T = 4, 100B tokens. Ours are architectures trained both with and without the gate."]
    if quality == "perplexity":
        notes += perplexity_notes(snapshot, [run for run, *_ in ours])
    return Figure(
        f"Output gate: {AXES[quality]}",
        option,
        ["model", "source", "architecture", "gate", quality],
        lambda: rows,
        notes,
        produce="" if ours else "lt2 sweep gate",
    )


def _but_for_gate(kind: Architecture) -> tuple[Any, ...]:
    """What is the same in an architecture with and without the gate."""
    return kind.title, kind.n_loops, *(kind.layout.get(key) for key in ("type", "ratio", "pattern"))


def _beside_paper(x_axis: dict[str, Any], quality: Quality, series: list[dict[str, Any]]) -> dict[str, Any]:
    """Two value axes: the paper's on the left, this store's on the right (`yAxisIndex` 1) if it has anything there."""
    paper, ours = (
        {"type": "value", "name": f"{AXES[quality]}, {whose}", "scale": True} for whose in ("paper", "this store")
    )
    right = [ours | {"splitLine": {"show": False}}] if any("yAxisIndex" in each for each in series) else []
    return chart(x_axis, [paper, *right], series)


def value_of(run: Evaluated, quality: Quality) -> float | None:
    return run.perplexity if quality == "perplexity" else run.average


def _place(kind: Architecture | None, by: str) -> str | None:
    """Where in the ablation an architecture stands."""
    if kind is None or kind.gate:  # the gate is an ablation of its own
        return None
    layout = kind.layout
    if layout.get("type") == "uniform":
        return {"full": "1:0", "gdn": "0:1"}.get(kind.mixers[0]) if by == "ratio" else None
    if layout.get("type") == "loops":
        return _masks(layout) if by == "level" else None
    if kind.mixers != ("full", "gdn"):
        return None
    if layout.get("type") == "random":
        return "random + vote" if by == "level" else None
    if layout.get("type") != "hybrid":
        return None
    ratio, pattern = layout.get("ratio", "1:4"), layout.get("pattern", "interleave")
    if by == "pattern":
        return pattern if ratio == "1:4" else None
    if pattern != "interleave":
        return None
    return ratio if by == "ratio" else "depth" if ratio == "1:4" else None


def _masks(layout: dict[str, Any]) -> str | None:
    """Whether the reach of a loop-level schedule shrinks or grows."""
    reach = [m.get("window", 0) if m.get("type") == "window" else math.inf for m in layout["mixers"]]
    if len(set(reach)) < 2:
        return None
    return (
        "coarse to fine"
        if reach == sorted(reach, reverse=True)
        else "fine to coarse"
        if reach == sorted(reach)
        else None
    )
