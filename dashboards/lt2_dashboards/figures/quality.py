"""Quality against what it costs: parameters, and the compute spent when a model is run deeper."""

from __future__ import annotations

import math
from typing import Any, Literal

from lt2.layout import loops_text
from lt2_dashboards.figures.ablations import AXES
from lt2_dashboards.figures.figure import Figure, rounded
from lt2_dashboards.figures.parts.names import told_apart
from lt2_dashboards.figures.parts.paper import DOWNSTREAM, contradictions, mean_of_tasks
from lt2_dashboards.figures.parts.series import chart, frontier, line, points, whiskers
from lt2_dashboards.figures.parts.store import Evaluated, evaluated, rows_of
from lt2_dashboards.figures.parts.texts import PER_TOKEN, perplexity_notes, text_notes
from lt2_dashboards.queries import Source
from lt2_platform.evaluate.repeats import counting

NOMINAL = {"0.6B": 0.6e9, "1.3B": 1.3e9}
REASONING = {
    "gsm8k": ("exact_match/strict-match", "exact_match"),
    "minerva_math": ("math_verify", "exact_match"),
    "mmlu": ("acc",),
}
SCORES = {**AXES, "reasoning": "average of gsm8k, minerva_math and mmlu (%)"}
SUITE = {"average": "core", "perplexity": "core", "reasoning": "reasoning"}
ELSEWHERE = "external models"
Point = tuple[str, str, float, float]  # model, architecture, parameters, quality


def pareto(source: Source, *, quality: Literal["average", "perplexity", "reasoning"] = "average") -> Figure:
    """Quality by number of parameters, with the frontier: models that no smaller one beats.

    The average is over the paper's eight tasks. The paper's models (Table 2) stand at their nominal 0.6B and 1.3B.
    Released models that `lt2 eval` was given as folders stand beside the runs of this store.
    """
    snapshot = source.snapshot()
    found = evaluated(snapshot)
    ours = [
        (run.run, _kind(run), float(run.parameters), value)
        for run in found
        if run.parameters and (value := _score(run, quality)) is not None
    ]
    paper = [
        (model, model, NOMINAL[size], row[0] if quality == "perplexity" else mean_of_tasks(row))
        for size, models in DOWNSTREAM.items()
        for model, row in models.items()
        if row is not None and quality != "reasoning"
    ]
    better = min if quality == "perplexity" else max
    kinds = sorted({kind for _, kind, *_ in ours}, key=lambda kind: (kind == ELSEWHERE, kind))
    series = []
    if paper:
        series = [points("paper", _points(paper), symbolSize=8), _frontier_line("paper, frontier", paper, better, None)]
    for position, kind in enumerate(kinds):
        data = _points([point for point in ours if point[1] == kind])
        series.append(points(kind, data, position, symbol="diamond", symbolSize=12, z=4))
    if len(ours) > 1:
        series.append(_frontier_line("this store, frontier", ours, better, len(kinds)))
    notes = ["Paper: Table 2 at nominal sizes; averages are recomputed from the eight tasks."]
    notes += contradictions("1.3B")
    if quality == "perplexity":
        notes.append("Perplexities are comparable only with the same tokenizer and held-out text.")
        notes += perplexity_notes(snapshot, [run for run, *_ in ours])
    if quality == "reasoning":
        notes = [
            "Paper: Figure 1 (right) compares the distilled 1.4B with released models of 1B to 4B and prints no "
            "numbers. gsm8k counts by its strict match, minerva_math as math-verify judges."
        ]
    links = {}
    if not ours:
        others = {each: sum(_score(run, each) is not None for run in found) for each in SCORES if each != quality}
        links = {f"{count} runs have the {each}.": {"quality": each} for each, count in others.items() if count}
        notes += links
    table = [[run, "this store", kind, size, value] for run, kind, size, value in ours]
    table += [[model, "paper", kind, size, value] for model, kind, size, value in paper]
    y = {"type": "value", "name": SCORES[quality], "scale": True}
    nothing = "No run has all three reasoning tasks yet."
    return Figure(
        f"Quality by parameters: {SCORES[quality]}",
        chart({"type": "log", "name": "parameters"}, y, series, nothing),
        ["model", "source", "architecture", "parameters", quality],
        lambda: table,
        notes,
        produce="" if ours else f"lt2 eval RUN --pack PACK --suite {SUITE[quality]}",
        links=links,
    )


def _score(run: Evaluated, quality: str) -> float | None:
    if quality == "perplexity":
        return run.perplexity
    return run.average if quality == "average" else run.mean(REASONING)


def _kind(run: Evaluated) -> str:
    if kind := run.architecture:
        return kind.title
    return ELSEWHERE if "evaluated" in run.config else "unknown"


def _points(found: list[Point]) -> list[dict[str, Any]]:
    return [
        {"name": run if run == kind else f"{run}: {kind}", "value": [size, rounded(value)], "shown": rounded(value)}
        for run, kind, size, value in found
    ]


def _frontier_line(name: str, found: list[Point], better: Any, colour: int | None) -> dict[str, Any]:
    """A step line through the points that no model of at most their size beats."""
    steps = [[size, rounded(value)] for *_, size, value in frontier(found, lambda point: point[2:], better)]
    if steps:
        steps.append([max(point[2] for point in found), steps[-1][1]])
    return line(name, steps, colour, step="end", lineStyle={"type": "dotted"}, silent=True)


def depth(
    source: Source, *, task: str = "perplexity", metric: str = "perplexity", runs: list[str] | None = None
) -> Figure:
    """One score of the same weights run at several depths, over the compute that each depth spends.

    From evaluations with `loops` or `exit_thresholds`; a model with halting also has a point for early exit, with an
    exit gate one at each threshold.
    """
    condition = "e.name = 'depth' AND e.task = ? AND e.metric = ?"
    found: dict[str, dict[tuple[int, bool, float], dict[str, Any]]] = {}
    snapshot = source.snapshot()
    usable = [
        (run, row)
        for run, row in rows_of(snapshot, condition, [task, metric], runs=runs)
        if row.get("value") is not None and row.get("flops_per_token")
    ]
    keyed = (((run, (row["n_loops"], bool(row.get("early_exit")), _threshold(row))), row) for run, row in usable)
    for (run, place), row in counting(keyed).items():
        found.setdefault(run, {})[place] = row
    drawn = list(found)[:20]
    names = told_apart(snapshot, drawn)
    table, series = [], []
    for position, run in enumerate(drawn):
        by_depth = found[run]
        lines: dict[bool, list[dict[str, Any]]] = {False: [], True: []}
        ends = []
        for (n_loops, exits, threshold), row in sorted(by_depth.items()):
            spent = [row.get("mean_loops"), float(row["flops_per_token"])]
            at = "" if threshold == math.inf else f" at {threshold}"
            table.append([run, n_loops, f"yes{at}" if exits else "no", *spent, row["value"], row.get("stderr")])
            name = f"{names[run]}: early exit{at}" if exits else f"{names[run]}: {loops_text(n_loops)}"
            point = {"name": name, "value": [row["flops_per_token"], rounded(row["value"])]}
            if (error := row.get("stderr")) is not None:
                point["detail"] = f"± {error:.3g}"
                low, high = rounded(row["value"] - error), rounded(row["value"] + error)
                ends.append(([row["flops_per_token"], low], [row["flops_per_token"], high]))
            if not exits:
                point["label"] = {"show": True, "position": "top", "formatter": str(n_loops), "color": "inherit"}
            lines[exits].append(point)
        series += whiskers(names[run], ends, position)
        series.append(
            line(names[run], lines[False], position, showSymbol=True, symbolSize=7, labelLayout={"hideOverlap": True})
        )
        if lines[True]:
            early = sorted(lines[True], key=lambda point: point["value"])
            pins = {"symbol": "pin", "symbolSize": 18, "lineStyle": {"type": "dashed"}}
            series.append(line(f"{names[run]}, early exit", early, position, showSymbol=True, **pins))
    y = {"type": "value", "name": f"{task}, {metric}" if task != metric else metric, "scale": True}
    nothing = "" if found else _no_depths(source, task, metric)
    columns = ["run", "loops", "early exit", "mean loops", "FLOPs per token", metric, "standard error"]
    return Figure(
        f"Depth: {task} by compute",
        chart({"type": "log", "name": "forward FLOPs per token"}, y, series, nothing),
        columns,
        lambda: table,
        [
            "Numbers are loops, bars one standard error. The paper trains and evaluates at T = 4 only.",
            "Only runs evaluated with evaluate.loops or evaluate.exit_thresholds are shown; to add a baseline of one "
            "depth, set evaluate.loops=[1].",
            *(text_notes([(run, row) for run, row in usable if run in drawn]) if PER_TOKEN.search(metric) else []),
        ],
        produce="" if found else "lt2 eval RUN --pack PACK --suite core --loops 1,2,4,8",
    )


def _threshold(row: dict[str, Any]) -> float:
    """Behind all that were asked for the model's own, which rows do not say."""
    return row.get("exit_threshold", math.inf)


def _no_depths(source: Source, task: str, metric: str) -> str:
    """The message of an empty figure: there is nothing for this task, but for these others."""
    others = source.snapshot().query(
        "SELECT DISTINCT concat(task, ', ', metric) FROM evals WHERE name = 'depth' AND value IS NOT NULL ORDER BY 1"
    )
    known = f" There are: {'; '.join(name for (name,) in others[:20])}." if others else ""
    return f"No run was evaluated at several depths on {task!r} by {metric!r} yet.{known}"
