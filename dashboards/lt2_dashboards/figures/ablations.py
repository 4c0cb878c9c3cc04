"""Hybrid ablations: how much attention, and where, in the paper and in this store."""

from __future__ import annotations

from typing import Any, Literal

from lt2_dashboards.figures.figure import Figure, rounded
from lt2_dashboards.figures.paper import PATTERNS, RATIOS
from lt2_dashboards.queries import PERPLEXITY, Source


def hybrid(source: Source, *, by: Literal["ratio", "pattern"] = "ratio") -> Figure:
    """Validation perplexity of Full+GDN hybrids by ratio of attention to GDN, or by pattern at 1:4.

    Ours are runs with a hybrid (or uniform full or gdn) layout and a perplexity evaluation. Perplexities are
    comparable only between models trained on the same data: look at the shape, not at the offset.
    """
    reference = RATIOS if by == "ratio" else PATTERNS
    names = [name for name, *_ in reference]
    ours = _ours(source, by)
    known = [(run, name, value) for run, name, value in ours if name in names]
    rows: list[list[Any]] = [[run, "this store", name, value] for run, name, value in known]
    rows += [["1.3B", "paper", name, ppl] for name, ppl, _ in reference]
    option = {
        "xAxis": {"type": "category", "data": names, "name": "attention : GDN" if by == "ratio" else "pattern"},
        "yAxis": [
            {"type": "value", "name": "perplexity, paper", "scale": True},
            {"type": "value", "name": "perplexity, this store", "scale": True, "splitLine": {"show": False}},
        ],
        "series": [
            {"type": "line", "name": "paper, 1.3B", "paper": True, "showSymbol": True, "symbolSize": 8,
             "data": [ppl for _, ppl, _ in reference], "lineStyle": {"type": "dashed"}},
            {"type": "scatter", "name": "this store", "colorIndex": 0, "yAxisIndex": 1, "symbolSize": 11,
             "data": [{"name": run, "value": [name, rounded(value)]} for run, name, value in known]},
        ],
        "tooltip": {"trigger": "item"},
        "legend": {"show": True},
    }  # fmt: skip
    notes = ["Paper: Table 3, 1.3B, T = 4, 100B tokens."]
    if not known:
        notes.insert(0, "No run in this store is such a hybrid with a perplexity evaluation yet.")
    return Figure(
        f"Hybrid {by}: validation perplexity", option, ["model", "source", by, "perplexity"], lambda: rows, notes
    )


def _ours(source: Source, by: str) -> list[tuple[str, str, float]]:
    found = source.snapshot().query(
        "SELECT e.run, any_value(e.value), map_from_entries(list((c.key, c.text))) FROM evals e JOIN config c "
        f"ON c.run = e.run WHERE {PERPLEXITY} AND e.value IS NOT NULL AND contains(c.key, 'layout.') "
        "GROUP BY e.run ORDER BY e.run"
    )
    result = []
    for run, value, entries in found:
        layout = {key.split("layout.")[-1]: text for key, text in entries.items()}
        place = _ratio(layout) if by == "ratio" else _pattern(layout)
        if place is not None:
            result.append((run, place, value))
    return result


def _ratio(layout: dict[str, str]) -> str | None:
    if layout.get("type") == "uniform":
        return {"full": "1:0", "gdn": "0:1"}.get(layout.get("mixer.type", ""))
    is_full_gdn = layout.get("attention.type") == "full" and layout.get("mixer.type") == "gdn"
    return layout.get("ratio") if is_full_gdn and layout.get("pattern", "interleave") == "interleave" else None


def _pattern(layout: dict[str, str]) -> str | None:
    is_full_gdn = layout.get("attention.type") == "full" and layout.get("mixer.type") == "gdn"
    return layout.get("pattern") if is_full_gdn and layout.get("ratio") == "1:4" else None
