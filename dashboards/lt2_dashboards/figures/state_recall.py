"""State-based recall: how far through the curriculum each architecture gets, by loops."""

from __future__ import annotations

from typing import Any

from lt2_dashboards.figures.figure import Figure
from lt2_dashboards.figures.parts.paper import STATE_RECALL
from lt2_dashboards.figures.parts.store import architecture, rows_of
from lt2_dashboards.queries import Source

STAGES = 6
LOOPS = (1, 2, 4, 8)


def state_recall(source: Source) -> Figure:
    """Highest stage of the curriculum that each architecture passed, by loops T: stage s is n = m = 2^(s+2).

    Of several runs of one architecture at one T, the best counts. Cells of the paper are what its text names.
    """
    snapshot = source.snapshot()
    ours: dict[tuple[str, int], tuple[int, int, str]] = {}
    found = rows_of(snapshot, "e.task = 'state_recall' AND e.metric IN ('stage', 'n_max') AND e.value IS NOT NULL")
    by_run: dict[str, dict[str, float]] = {}
    for run, row in found:
        by_run.setdefault(run, {})[row["metric"]] = row["value"]
    infos = snapshot.runs(list(by_run))
    for run, numbers in by_run.items():
        kind = architecture(infos[run].config) if run in infos else None
        name, n_loops = (kind.name, kind.n_loops) if kind else (run, 1)
        best = ours.get((name, n_loops), (-1, 0, ""))
        if numbers.get("stage", -1) > best[0]:
            ours[name, n_loops] = (int(numbers["stage"]), int(numbers.get("n_max", 0)), run)
    names = sorted({name for name, _ in ours}, key=lambda name: (name.startswith("Hybrid"), name))
    loops = sorted({n_loops for _, n_loops in ours} | set(LOOPS))
    paper = {(name, t): stage for name, (_, named) in STATE_RECALL.items() for t, stage in named.items()}
    best_at_any = {name: best for name, (best, _) in STATE_RECALL.items()}
    down = [*(f"{name}" for name in names), *(f"paper: {name}" for name in STATE_RECALL)]
    across = [*(f"T = {t}" for t in loops), "best"]
    data: list[dict[str, Any]] = []
    rows: list[list[Any]] = []

    def cell(label: str, at: str, stage: int, **more: str) -> None:
        place = [across.index(at), down.index(label), stage]
        data.append({"name": f"{label}, {at}", "value": place, **more})

    for (name, t), (stage, n_max, run) in sorted(ours.items()):
        cell(name, f"T = {t}", stage, detail=f"n = {n_max}, {run}")
        rows.append([name, "this store", t, stage, n_max, run])
    for (name, t), stage in paper.items():
        cell(f"paper: {name}", f"T = {t}", stage)
        rows.append([name, "paper", t, stage, 2 ** (stage + 2), None])
    for name, stage in best_at_any.items():
        cell(f"paper: {name}", "best", stage)
        rows.append([name, "paper", "best", stage, 2 ** (stage + 2), None])
    stages = [{"value": stage, "label": str(stage or "none")} for stage in range(STAGES + 1)]
    where = {"dimension": 2, "top": 0, "left": "center", "orient": "horizontal"}
    option = {
        "xAxis": {"type": "category", "data": across, "splitLine": {"show": False}},
        "yAxis": {"type": "category", "data": down, "inverse": True, "splitLine": {"show": False}},
        "visualMap": {"type": "piecewise", "heat": True, "pieces": stages, **where},
        "series": [{"type": "heatmap", "name": "stage", "data": data, "label": {"show": True}}],
        "tooltip": {"trigger": "item"},
    }
    return Figure(
        "State-based recall: highest stage passed",
        option,
        ["architecture", "source", "T", "stage", "n_max", "run"],
        lambda: rows,
        [
            "Stages 1 to 6 are n = 8 to 256; a stage is passed with 0.90 of all asserts right within 100k steps. "
            "Paper: Section 3.6; its figure prints no numbers, its text names these."
        ],
        produce="" if ours else "lt2 sweep state_recall, or lt2 sweep state_recall:paper for its grid",
    )
