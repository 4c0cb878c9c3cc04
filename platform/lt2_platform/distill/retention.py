"""What students keep of their teacher, task by task, and the figure of it (after the paper's Fig. distill)."""

from __future__ import annotations

import io
from collections.abc import Mapping, Sequence
from typing import Any

from lt2.layout import loops_text
from lt2_platform.evaluate.repeats import is_reading

LOWER_IS_BETTER = {"perplexity", "ppl"}
LEFT_OUT = {"loss", "late_loss", "flops_per_token", "mean_loops"}
NOT_SCORES = ("teacher_kl", "_tokens_per_s", "context_cut", "empty_", "continuation_too_long", "not_a_number")


def retention_rows(
    teacher: Sequence[Mapping[str, Any]], students: Mapping[str, Sequence[Mapping[str, Any]]]
) -> list[dict[str, Any]]:
    """One row per task and metric that the teacher has: {"task", "metric", "teacher", "students": name -> {"value",
    "retention"}}.

    retention is the student's score over the teacher's, turned round where lower is better, and None where the
    teacher has 0: nothing can be kept of it. Chance is not subtracted. A task that was asked at several depths is named
    with each.
    """
    depths: dict[str, set[tuple[Any, ...]]] = {}
    for row in teacher:
        depths.setdefault(row["task"], set()).add(_depth(row))
    found = {name: {_key(row): float(row["value"]) for row in rows} for name, rows in students.items()}
    table = []
    for row in teacher:
        metric = str(row["metric"])
        if not is_score(metric) or is_reading(row):
            continue
        value = float(row["value"])
        scores = {name: values[_key(row)] for name, values in found.items() if _key(row) in values}
        kept = {name: {"value": score, "retention": retained(metric, value, score)} for name, score in scores.items()}
        task = row["task"] if len(depths[row["task"]]) == 1 else f"{row['task']}, {loops_text(*_depth(row))}"
        table.append({"task": task, "metric": metric, "teacher": value, "students": kept})
    return table


def _key(row: Mapping[str, Any]) -> tuple[Any, ...]:
    return row["task"], row["metric"], *_depth(row)


def _depth(row: Mapping[str, Any]) -> tuple[Any, ...]:
    return row.get("n_loops"), row.get("early_exit"), row.get("exit_threshold")


def is_score(metric: str) -> bool:
    return metric not in LEFT_OUT and not any(part in metric for part in NOT_SCORES)


def retained(metric: str, teacher: float, student: float) -> float | None:
    """The student's part of the teacher's score, turned round where lower is better; None where there is nothing."""
    first, second = (teacher, student) if metric in LOWER_IS_BETTER else (student, teacher)
    return first / second if second else None


def draw(rows: Sequence[Mapping[str, Any]], students: Sequence[str], title: str) -> bytes:
    """A PNG of bars: each student's retention by task and metric, the teacher's level as a line at 100 %."""
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    shown = [row for row in rows if any(found["retention"] is not None for found in row["students"].values())]
    figure = Figure(figsize=(max(5.0, 1.2 * len(shown) + 2), 3.6), layout="constrained")
    axes = figure.subplots()
    width = 0.8 / max(len(students), 1)
    for place, name in enumerate(students):
        shares = [row["students"].get(name, {}).get("retention") for row in shown]
        at = [index - 0.4 + width * (place + 0.5) for index in range(len(shown))]
        axes.bar(at, [100 * (share or 0) for share in shares], width, label=name)
    axes.axhline(100, color="black", linewidth=0.8, linestyle="--")
    names = [f"{row['task']}\n{row['metric']}".replace(", ", "\n") for row in shown]
    axes.set_xticks(range(len(shown)), names, fontsize=8)
    axes.set_ylabel("% of the teacher")
    axes.set_title(title, fontsize=10)
    figure.legend(fontsize=8, loc="outside lower center", ncols=len(students))
    sink = io.BytesIO()
    FigureCanvasAgg(figure).print_png(sink)
    return sink.getvalue()
