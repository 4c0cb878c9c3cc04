"""Whether the perplexities that a figure shows are of one text: those of one run, and across runs."""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping
from typing import Any

from lt2_dashboards.figures.parts.store import AT_OWN_DEPTH, rows_of
from lt2_dashboards.queries import PERPLEXITY, Snapshot
from lt2_platform.evaluate.repeats import counting, texts
from lt2_platform.wording import first_of

PER_TOKEN = re.compile(r"loss|perplexity|ppl|(^|/)(ce|kl)($|/)")
"""Finds metrics that have another scale on another text."""

Row = Mapping[str, Any]


def perplexity_notes(snapshot: Snapshot, runs: Iterable[str]) -> list[str]:
    """`text_notes` of the perplexities that `store.evaluated` has of these runs."""
    wanted = list(runs)
    return text_notes(rows_of(snapshot, f"{PERPLEXITY} AND name <> 'training' AND {AT_OWN_DEPTH}", runs=wanted))


def text_notes(found: Iterable[tuple[str, Row]]) -> list[str]:
    """The notes on (run, row of a perplexity) that are not all of one text; none where they are, or rows do not say."""
    rows: dict[str, list[Row]] = {}
    for run, row in found:
        rows.setdefault(run, []).append(row)
    notes = []
    if several := [run for run, each in rows.items() if texts(each) > 1]:
        notes.append(
            f"Evaluated on several texts under one name: {first_of(several)}. One of them counts at each "
            "depth; `lt2 results RUN` lists all."
        )
    counts = counting((run, row) for run, each in rows.items() for row in each)
    data = sorted({str(row["data"]) for row in counts.values() if row.get("data")})
    if len(data) > 1:
        notes.append(f"Measured on different held-out texts (data {first_of(data)}), so not comparable.")
    return notes
