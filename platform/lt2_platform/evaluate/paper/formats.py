"""A table of {model, source, columns, note}, the paper's rows and then ours: our rows, and all as CSV or LaTeX."""

from __future__ import annotations

import csv
import io
import math
from collections.abc import Collection, Mapping, Sequence
from typing import Any


def mean_of(scores: Mapping[str, float], columns: Collection[str]) -> float | None:
    """The mean over `columns`; None unless all are there."""
    values = [value for column in columns if (value := scores.get(column)) is not None]
    return math.fsum(values) / len(values) if len(values) == len(columns) else None


def our_rows(ours: Mapping[str, Mapping[str, float]], averaged: Collection[str]) -> list[dict[str, Any]]:
    """A row for each run's scores, with their mean over the columns `averaged` and a note of those that it lacks."""
    rows = []
    for run, scores in ours.items():
        missing = [column for column in averaged if column not in scores]
        note = f"no {', '.join(missing)}" if missing else ""
        rows.append({"model": run, "source": "ours", **scores, "Avg": mean_of(scores, averaged), "note": note})
    return rows


def as_csv(rows: Sequence[Mapping[str, Any]], columns: Sequence[str]) -> str:
    sink = io.StringIO()
    writer = csv.DictWriter(sink, ["model", "source", *columns, "note"], lineterminator="\n")
    writer.writeheader()
    writer.writerows([{key: row.get(key) for key in writer.fieldnames} for row in rows])
    return sink.getvalue()


def as_latex(rows: Sequence[Mapping[str, Any]], columns: Sequence[str]) -> str:
    """A tabular for booktabs; the best number of each column is bold."""
    best = {}
    for column in columns:
        numbers = (row.get(column) for row in rows)
        values = [number for number in numbers if number is not None and math.isfinite(number)]
        best[column] = (min if column == "PPL" else max)(values) if values else None
    lines = [r"\begin{tabular}{l" + "r" * len(columns) + "}", r"\toprule"]
    lines += [" & ".join(["Model", *columns]) + r" \\", r"\midrule"]
    ours_begin = next((index for index, row in enumerate(rows) if row["source"] == "ours"), len(rows))
    for index, row in enumerate(rows):
        if index == ours_begin:
            lines.append(r"\midrule")
        cells = [latex_number(row.get(column), bold=row.get(column) == best[column]) for column in columns]
        lines.append(" & ".join([latex_text(row["model"]), *cells]) + r" \\")
    return "\n".join([*lines, r"\bottomrule", r"\end{tabular}", ""])


def latex_number(value: float | None, *, bold: bool) -> str:
    if value is None:
        return "---"
    return rf"\textbf{{{value:.2f}}}" if bold else f"{value:.2f}"


def latex_text(text: str) -> str:
    for character in "&%$#_{}":
        text = text.replace(character, "\\" + character)
    return text
