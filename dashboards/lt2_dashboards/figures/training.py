"""How looping trains and computes: gradient spikes by mixer, and what the residual stream does from loop to loop."""

from __future__ import annotations

import statistics
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

from lt2_dashboards.figures.figure import Figure, rounded
from lt2_dashboards.figures.parts.chosen import mixed_losses
from lt2_dashboards.figures.parts.paper import RMS_GROWTH, STABILITY
from lt2_dashboards.figures.parts.series import Panel, line, panels
from lt2_dashboards.figures.parts.store import Architecture, architecture, known_runs, rows_of
from lt2_dashboards.queries import Source
from lt2_platform.evaluate.repeats import counting
from lt2_platform.results.curves import refit
from lt2_platform.results.store import RunInfo
from lt2_platform.results.tables import unit_of

MAX_LINES = 16  # the architectures of the paper's main table
POINTS = 600  # per line
WINDOW, SPIKE = 32, 3.0  # a spike is a gradient norm above SPIKE times the median of the WINDOW points before


def stability(source: Source, *, runs: list[str] | None = None) -> Figure:
    """Loss and gradient norm over training by mixer, with spikes and divergence counted beside the paper's words.

    By default the newest looped run of every architecture. The norm is drawn as the largest in each bucket of steps.
    """
    chosen = _chosen(source, runs)
    left_out, chosen = chosen[MAX_LINES:], chosen[:MAX_LINES]
    unit = " (nats per token)" if all(unit_of("loss", run.config) for run, _ in chosen) else ""
    loss = Panel(
        f"training loss{unit}",
        {"type": "value", "name": "step", "max": "dataMax", "minInterval": 1},
        {"type": "value", "scale": True},
    )
    norm = Panel(
        "gradient norm before clipping",
        {"type": "value", "name": "step", "max": "dataMax", "minInterval": 1},
        {"type": "log"},
    )
    rows: list[list[Any]] = []
    for position, (run, kind) in enumerate(chosen):
        table = source.curves(run).table
        curves = {metric: table.filter(pc.field("metric") == metric) for metric in ("loss", "grad_norm")}
        for panel, metric, column in ((loss, "loss", "mean"), (norm, "grad_norm", "max")):
            if curves[metric].num_rows:
                panel.series.append(line(kind.title, _points(curves[metric], column), position))
        rows.append([kind.title, "this store", run.run_id, *_summary(run, curves), STABILITY.get(kind.mixers, "")])
    shown = {kind.mixers for _, kind in chosen}
    rows += [
        [_words(mixers), "paper", None, *[None] * 6, text] for mixers, text in STABILITY.items() if mixers not in shown
    ]
    option = panels([loss, norm], columns=1)
    option["empty"] = None if chosen else "No looped run has logged losses and gradient norms yet."
    columns = [
        "architecture",
        "source",
        "run",
        "lr",
        "last loss",
        "median norm",
        "largest norm",
        "spikes",
        "not finite",
        "the paper",
    ]
    notes = [
        f"Spikes: points of the stored curve whose norm exceeds {SPIKE:g} times the median of the previous {WINDOW}. "
        "Paper: Section 3.5, figures without printed numbers."
    ]
    if left_out:
        notes.append(f"Not drawn: {', '.join(kind.title for _, kind in left_out)}; choose them with runs.")
    notes += mixed_losses(run for run, _ in chosen)
    produce = "" if chosen else "python scripts/stability.py --storage ROOT"
    return Figure("Stability by mixer", option, columns, lambda: rows, notes, produce=produce)


def _chosen(source: Source, runs: list[str] | None) -> list[tuple[RunInfo, Architecture]]:
    snapshot = source.snapshot()
    logged = "run IN (SELECT run FROM metrics WHERE metric = 'grad_norm')"
    if runs is None:
        newest = snapshot.query(f"SELECT run FROM runs WHERE {logged} ORDER BY created DESC, run LIMIT 500")
        infos = snapshot.runs([run for (run,) in newest])
    else:
        infos = known_runs(snapshot, runs)
    found: dict[Any, tuple[RunInfo, Architecture]] = {}
    for run, info in infos.items():
        kind = architecture(info.config)
        if kind is not None and (runs is not None or kind.n_loops > 1):
            found.setdefault(run if runs is not None else kind.title, (info, kind))
    return list(found.values())


def _points(curve: pa.Table, column: str) -> list[list[Any]]:
    drawn = refit(curve, POINTS)
    return [[step, rounded(value)] for step, value in zip(drawn["step"].to_pylist(), drawn[column].to_pylist())]


def _summary(run: RunInfo, curves: dict[str, pa.Table]) -> list[Any]:
    """lr, last loss, median and largest norm, spikes, values that are not finite."""
    train = run.config.get("train", run.config)
    lr = train.get("lr") if isinstance(train, dict) else None
    norm, broken = curves["grad_norm"], sum(int(np.sum(curve["nonfinite"].to_numpy())) for curve in curves.values())
    means = [value for value in norm["mean"].to_pylist() if value is not None and value == value]
    peaks = [value for value in norm["max"].to_pylist() if value is not None and value == value]
    last = run.last.get("loss")
    head = [lr if isinstance(lr, int | float) else None, last[1] if last else None]
    if not means:
        return [*head, None, None, None, broken]
    spikes = sum(
        peaks[at] > SPIKE * statistics.median(means[at - WINDOW : at])
        for at in range(WINDOW, min(len(means), len(peaks)))
    )
    return [*head, statistics.median(means), max(peaks), spikes, broken]


def _words(mixers: tuple[str, ...]) -> str:
    parts = {"attention": {"type": mixers[0]}, "mixer": {"type": mixers[-1]}}
    kind = architecture({"n_loops": 4, "layout": {"type": "hybrid" if len(mixers) > 1 else "uniform", **parts}})
    return kind.title if kind else ""


READINGS = {
    "first_token_mass": ("attention on the first token", "value"),
    "max_abs": ("largest activation", "log"),
    "rms": ("residual stream, RMS", "value"),
}


def loop_diagnostics(source: Source, *, runs: list[str] | None = None) -> Figure:
    """The unrolled sawtooth: sink mass, largest activation and RMS at every (loop, layer), loop after loop.

    Compare a run with and without the output gate by `runs`; by default the newest runs that have these readings.
    """
    found: dict[str, dict[tuple[str, int, int], dict[str, Any]]] = {}
    keyed = (
        ((run, str(row.get("metric")), row["loop"], row["layer"]), row)
        for run, row in rows_of(source.snapshot(), "e.name = 'diagnostics'", runs=runs)
        if "loop" in row and "layer" in row
    )
    for (run, metric, loop, layer), row in counting(keyed).items():
        found.setdefault(run, {})[metric, loop, layer] = row
    names = list(found)[: len(found) if runs is not None else 3]
    found = {run: found[run] for run in names}
    kinds = {run: architecture(info.config) for run, info in source.snapshot().runs(names).items()}
    gates = {run: kind.gate or "none" for run, kind in kinds.items() if kind}
    labels = {run: f"{run}: {kind.title}, {'gate' if kind.gate else 'no gate'}" for run, kind in kinds.items() if kind}
    drawn = [
        Panel(
            title,
            {"type": "value", "name": "layer, counted through the loops", "min": 1, "minInterval": 1},
            {"type": kind, "scale": True},
        )
        for title, kind in READINGS.values()
    ]
    table: list[list[Any]] = []
    for position, (run, readings) in enumerate(found.items()):
        n_layers = 1 + max(layer for _, _, layer in readings)
        n_loops = 1 + max(loop for _, loop, _ in readings)
        for panel, metric in zip(drawn, READINGS):
            places = {(loop, layer): row for (name, loop, layer), row in readings.items() if name == metric}
            data = [
                {
                    "name": f"loop {loop + 1}, layer {layer + 1}: {row.get('mixer', '')}",
                    "value": [1 + loop * n_layers + layer, rounded(row["value"])],
                }
                for (loop, layer), row in sorted(places.items())
            ]
            marks = [{"xAxis": loop * n_layers + 0.5} for loop in range(1, n_loops)] if position == 0 else []
            more = {"markLine": {"data": marks}} if marks else {}
            panel.series.append(line(labels.get(run, run), data, position, showSymbol=True, symbolSize=4, **more))
        for (metric, loop, layer), row in sorted(readings.items(), key=lambda item: item[0]):
            table.append([run, gates.get(run), loop + 1, layer + 1, row.get("mixer"), metric, row["value"]])
    if found:
        first = [row for (name, *_), row in sorted(next(iter(found.values())).items()) if name == "rms"]
        if first:
            end = RMS_GROWTH * first[0]["value"]
            span = [[1, rounded(end)], [len(first), rounded(end)]]
            drawn[2].series.append(line("paper, about 20 times the start", span, lineStyle={"type": "dashed"}))
    nothing = {"series": [], "empty": "No run has these readings yet."}
    option = panels(drawn, columns=1) | {"tooltip": {"trigger": "item"}} if found else nothing
    return Figure(
        "Unrolled diagnostics",
        option,
        ["run", "gate", "loop", "layer", "mixer", "reading", "value"],
        lambda: table,
        [
            f"Dashed lines: ends of loops. Paper: Figure 5 (no printed numbers) and its text: the RMS grows to about "
            f"{RMS_GROWTH:g} times by the end of loop 4, sink and largest activation intensify each loop; the output "
            "gate flattens these two and reduces the growth of the RMS."
        ],
        produce="" if found else "lt2 diagnose RUN, or lt2 sweep gate",
    )
