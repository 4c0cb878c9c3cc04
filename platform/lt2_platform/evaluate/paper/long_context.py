"""The paper's long-context table (Table 5), and ours beside it: recall within 2,048 tokens, and single needles."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any

from lt2_platform.evaluate.paper.formats import mean_of, our_rows
from lt2_platform.evaluate.repeats import standing

KNOWLEDGE = {
    "swde": "SWDE",
    "squad_completion": "SQuAD",
    "fda": "FDA",
    "triviaqa_cloze": "TriviaQA",
    "nq_cloze": "NQ",
    "drop_cloze": "DROP",
}
LENGTHS = (1024, 2048, 4096, 8192)


def needles(lengths: Iterable[int]) -> dict[str, str]:
    """{task: column} of the single needles at `lengths`, by kind and length."""
    return {
        f"niah_single_{kind}_{length}": f"NIAH-{kind} " + (f"{length}" if length % 1024 else f"{length // 1024}k")
        for kind in (1, 2, 3)
        for length in sorted(lengths)
    }


NEEDLES = needles(LENGTHS)
TASKS = {**KNOWLEDGE, **NEEDLES}  # our names -> column; the paper has no 8k
METRICS = ("contains", "acc")  # lm-eval's name for "the answer is in the continuation", then anything else
COLUMNS = (*KNOWLEDGE.values(), "Avg", *NEEDLES.values())

_PRINTED = {
    "Transformer": (48.9, 46.6, 58.4, 67.5, 31.7, 26.4, 100, 100, 0, 92.2, 100, 0, 98.6, 99.4, 0),
    "GDN": (32.7, 40, 28.3, 63.5, 25.7, 24.5, 100, 100, 99.8, 100, 93.8, 49.8, 83.8, 68.4, 34.2),
    "Mamba2": (30.7, 39.1, 23.7, 64.3, 25.1, 28.5, 100, 99.6, 62, 100, 53.8, 11.8, 95.8, 87.4, 13.4),
    "Looped Transformer": (52.8, 49.4, 61.7, 68.2, 33.6, 28.1, 100, 100, 0, 94.6, 100, 0, 99.2, 99.8, 0),
    "Looped GDN": (34.9, 41.8, 30.6, 64.7, 27, 25.9, 100, 100, 99.8, 100, 96.4, 53.2, 85.6, 71, 35.8),
    "Looped Mamba2": (33.9, 40.5, 25.8, 65.1, 26.8, 29.7, 100, 100, 65.7, 100, 57.1, 13.5, 96.2, 88.1, 16.2),
    "Looped Hybrid (GDN+DSA)": (51.6, 48, 60.4, 66.9, 33, 28.4, 100, 100, 91.4, 100, 100, 77.6, 100, 99.6, 60.3),
    "Looped Hybrid (Full+GDN)": (53.1, 48.9, 62, 67.8, 34, 30.2, 100, 100, 93.5, 100, 100, 81, 99.8, 99.8, 63.7),
}
_COLUMNS = [task for task in TASKS if not task.endswith("_8192")]

# A value per task, percent of answers found; None where the paper has none.
LONG_CONTEXT: dict[str, tuple[float | None, ...]] = {
    model: tuple(dict(zip(_COLUMNS, row)).get(task) for task in TASKS) for model, row in _PRINTED.items()
}


def scores_of(rows: Iterable[Mapping[str, Any]]) -> dict[str, float]:
    """{column: percent} of one run's evaluation rows {task, metric, value}; see `standing` for repeats."""
    found: dict[tuple[str, str], float] = {}
    for row in sorted(rows, key=standing):
        found[str(row.get("task")), str(row.get("metric"))] = 100 * float(row["value"])
    scores = {}
    for task, column in TASKS.items():
        metric = next((metric for metric in METRICS if (task, metric) in found), None)
        if metric is not None:
            scores[column] = found[task, metric]
    return scores


def compared(ours: Mapping[str, Mapping[str, float]]) -> list[dict[str, Any]]:
    """Rows {model, source, COLUMNS, note}: the paper's, then ours by run. Avg is the mean of the six of knowledge."""
    rows: list[dict[str, Any]] = []
    averaged = KNOWLEDGE.values()
    for model, values in LONG_CONTEXT.items():
        scores = {column: value for column, value in zip(TASKS.values(), values) if value is not None}
        rows.append({"model": model, "source": "paper", **scores, "Avg": mean_of(scores, averaged), "note": ""})
    return rows + our_rows(ours, averaged)
