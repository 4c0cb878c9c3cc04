"""Downstream accuracy of our runs beside the paper's table."""

from __future__ import annotations

from typing import Literal

from lt2_dashboards.figures.figure import Figure
from lt2_dashboards.figures.parts.dots import MAX_RUNS, dots
from lt2_dashboards.figures.parts.paper import DOWNSTREAM, TASK_LABELS, TASKS, contradictions, mean_of_tasks
from lt2_dashboards.figures.parts.store import evaluated, quick_looks
from lt2_dashboards.figures.parts.texts import perplexity_notes
from lt2_dashboards.queries import Source


def downstream(source: Source, *, size: Literal["0.6B", "1.3B"] = "1.3B", runs: list[str] | None = None) -> Figure:
    """Zero-shot accuracy per task: our runs in colour, the models of the paper's Table 2 of that size in grey.

    `runs` limits ours (default: the newest that have such results). A task counts with acc_norm for ARC-C, HellaSwag
    and OpenBookQA where a run has it, else with acc; a run's average is shown only when it has all eight tasks.
    """
    snapshot = source.snapshot()
    found = evaluated(snapshot, runs)
    if runs is None:
        found = [run for run in found if any(run.accuracy(task) is not None for task in TASKS)]
    ours = {run.run: [run.perplexity, *map(run.accuracy, TASKS), run.average] for run in found[:MAX_RUNS]}
    printed = DOWNSTREAM[size]
    paper = {model: [*row[:-1], mean_of_tasks(row)] for model, row in printed.items() if row is not None}
    labels = [*TASK_LABELS, "average"]
    errors = {run.run: [*map(run.error, TASKS), None] for run in found[:MAX_RUNS]}
    rows = [[run, "this store", *numbers, *errors[run][:-1]] for run, numbers in ours.items()]
    rows += [[model, "paper", *paper.get(model, [None] * 10), *[None] * len(TASKS)] for model in printed]
    notes = [
        f"Paper: Table 2, {size}, 100B tokens of FineWeb-Edu, T = 4; averages are recomputed from the eight tasks."
    ]
    if ours:
        notes.append(
            "± is one standard error. Perplexities of this store are on the runs' own held-out text and tokenizer: "
            "compare them with each other, not with the paper's."
        )
        notes += perplexity_notes(snapshot, ours)
    notes += quick_looks(found[:MAX_RUNS], TASKS)
    differ = {model: row[-1] for model, row in printed.items() if row and abs(row[-1] - paper[model][-1]) >= 0.01}
    if differ:
        notes.append("The paper prints other averages: " + ", ".join(f"{m} {v:.2f}" for m, v in differ.items()) + ".")
    notes += contradictions(size)
    notes += [f"{model}: training diverged in the paper." for model, row in printed.items() if row is None]
    option = dots(
        labels,
        {m: row[1:] for m, row in paper.items()},
        {r: row[1:] for r, row in ours.items()},
        unit="accuracy (%)",
        errors=errors,
    )
    return Figure(
        f"Zero-shot accuracy (%), {size}",
        option,
        ["model", "source", "PPL", *labels, *(f"{label} ±" for label in TASK_LABELS)],
        lambda: rows,
        notes,
        produce="" if ours else "lt2 eval RUN --pack PACK --suite core",
    )
