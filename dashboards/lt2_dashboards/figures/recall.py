"""Finding things in long text: knowledge recall and needles beside the paper's Table 5, and RULER's subtasks."""

from __future__ import annotations

import re

from lt2_dashboards.figures.figure import Figure
from lt2_dashboards.figures.parts.dots import MAX_RUNS, dots
from lt2_dashboards.figures.parts.store import Evaluated, evaluated, quick_looks
from lt2_dashboards.queries import Source
from lt2_platform.evaluate.paper.long_context import KNOWLEDGE, LENGTHS, LONG_CONTEXT, METRICS, TASKS, needles

ERROR_BARS = "Bars, and ± in the table, are one standard error over the items."
_SINGLE = re.compile(r"niah_single_[123]_([1-9][0-9]{1,6})")
_RULER = re.compile(r"(?:ruler_)?(niah_\w+?|vt|cwe|fwe|qa_\w+?|qa|squad_qa|hotpot_qa)_([0-9]{3,7})")


def long_context(source: Source, *, runs: list[str] | None = None) -> Figure:
    """Knowledge recall within 2,048 tokens, and single needles at 1k to 8k and what else this store has, beside
    the paper's Table 5 (1.3B).
    """
    found = evaluated(source.snapshot(), runs)
    lengths = {int(match[1]) for run in found for task, _ in run.scores if (match := _SINGLE.fullmatch(task))}
    columns = KNOWLEDGE | needles({*LENGTHS, *lengths})
    scored = {*TASKS, *(task for run in found for task, _ in run.scores)}
    columns = {task: label for task, label in columns.items() if task in scored}
    tasks, labels = list(columns), list(columns.values())
    ours = _ours(found, tasks, everyone=runs is not None)
    errors = _errors(found, tasks)
    paper = {model: [dict(zip(TASKS, row)).get(task) for task in tasks] for model, row in LONG_CONTEXT.items()}
    rows = [[run, "this store", *values, *errors[run]] for run, values in ours.items()]
    rows += [[model, "paper", *values, *[None] * len(tasks)] for model, values in paper.items()]
    notes = [
        "Paper: Table 5, 1.3B, T = 4 where looped, trained at 2,048 tokens, so that 4k is extrapolation (its appendix "
        "says 4,096); it has no 8k. Its caption says the hybrids are 1:1, its text 4:1."
    ]
    notes += _cautions([run for run in found if run.run in ours], tasks, errors)
    return Figure(
        "Recall and needles (%)",
        dots(labels, paper, ours, unit="answers found (%)", errors=errors),
        ["model", "source", *labels, *(f"{label} ±" for label in labels)],
        lambda: rows,
        notes,
        produce="" if ours else "lt2 eval RUN --pack PACK --suite recall, and --suite needles",
    )


def ruler(source: Source, *, length: int = 4096, runs: list[str] | None = None) -> Figure:
    """RULER's subtasks at one length: what distillation keeps of multi-key retrieval, tracking and counting.

    Compare a teacher with its students by `runs`. The paper draws these without printing numbers.
    """
    found = evaluated(source.snapshot(), runs)
    matches = {task: match for run in found for task, _ in run.scores if (match := _RULER.fullmatch(task))}
    lengths = sorted({int(match[2]) for match in matches.values()})
    tasks = sorted(task for task, match in matches.items() if int(match[2]) == length)
    labels = [matches[task][1].removeprefix("niah_").replace("_", " ") for task in tasks]
    ours = _ours(found, tasks, everyone=runs is not None)
    averages = {run: [v for v in values if v is not None] for run, values in ours.items()}
    means = {run: sum(v) / len(v) if len(v) == len(tasks) and v else None for run, v in averages.items()}
    errors = _errors(found, tasks)
    option = dots(labels, {}, ours, unit="answers found (%)", errors=errors)
    if not ours:
        there = f" There are results at {', '.join(map(str, lengths))} tokens." if lengths else ""
        option["empty"] = f"No run has results on RULER's subtasks at {length:,} tokens yet.{there}"
    notes = [
        "Paper: Figure 11 compares distilled models on these; it prints no numbers, only that they differ most in "
        "multi-key retrieval, which per-loop supervision helps."
    ]
    notes += _cautions([run for run in found if run.run in ours], tasks, errors)
    return Figure(
        f"RULER subtasks at {length:,} tokens (%)",
        option,
        ["model", "source", *labels, "average", *(f"{label} ±" for label in labels)],
        lambda: [[run, "this store", *values, means[run], *errors[run]] for run, values in ours.items()],
        notes,
        produce="" if ours else "lt2 eval RUN --pack PACK --suite ruler",
    )


def _ours(found: list[Evaluated], tasks: list[str], *, everyone: bool) -> dict[str, list[float | None]]:
    rows = {run.run: [run.percent(task, *METRICS) for task in tasks] for run in found}
    kept = {run: row for run, row in rows.items() if everyone or any(value is not None for value in row)}
    return dict(list(kept.items())[:MAX_RUNS])


def _errors(found: list[Evaluated], tasks: list[str]) -> dict[str, list[float | None]]:
    return {run.run: [run.percent_error(task, *METRICS) for task in tasks] for run in found}


def _cautions(shown: list[Evaluated], tasks: list[str], errors: dict[str, list[float | None]]) -> list[str]:
    bars = any(error is not None for run in shown for error in errors[run.run])
    return [*([ERROR_BARS] if bars else []), *quick_looks(shown, tasks)]
