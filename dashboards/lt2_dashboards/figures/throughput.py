"""Prefill and decode throughput by sequence length and batch size, and where memory ends."""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass, replace
from typing import Any

from lt2_dashboards.figures.figure import Figure, rounded
from lt2_dashboards.figures.parts.paper import CAPS, DECODE
from lt2_dashboards.figures.parts.series import Panel, at_length, by_length, line, panels, points, whiskers
from lt2_dashboards.figures.parts.store import AT_OWN_DEPTH, rows_of
from lt2_dashboards.queries import Source

METRICS = {"prefill_tokens_per_s": "prefill", "decode_tokens_per_s": "decode"}
MAX_BATCHES = 4  # rows of panels
MAX_LINES = 12


@dataclass(frozen=True)
class Cell:
    """One measured (run, phase, batch, context): tokens/s with quartiles, or None where memory ran out. line: what its
    line in the figure is called."""

    run: str
    line: str
    phase: str
    batch: int
    context: int
    rate: float | None
    low: float | None
    high: float | None
    device: str


def throughput(source: Source, *, runs: list[str] | None = None) -> Figure:
    """Prefill and decode throughput by context, one row of panels per batch size; open squares mark the last context
    that fitted where a longer one ran out of memory.

    The paper's decode rates and limits that its text names (one H100 of 80 GB, 1.3B, T = 4) are drawn in grey.
    """
    cells = _cells(source, runs)
    names = list(dict.fromkeys(cell.line for cell in cells))[:MAX_LINES]
    cells = [cell for cell in cells if cell.line in names]
    batches = sorted({cell.batch for cell in cells})[-MAX_BATCHES:] or [8]
    found = [
        _panel(phase, batch, names, [cell for cell in cells if (cell.phase, cell.batch) == (phase, batch)])
        for batch in batches
        for phase in ("prefill", "decode")
    ]
    rows: list[list[Any]] = [
        [
            c.run,
            "this store",
            c.phase,
            c.batch,
            c.context,
            c.rate,
            c.low,
            c.high,
            c.device,
            "yes" if c.rate is None else "",
        ]
        for c in cells
    ]
    h100 = "H100 80 GB"
    rows += [[m, "paper", "decode", b, length, rate, None, None, h100, ""] for m, b, length, rate in DECODE]
    rows += [[m, "paper", "decode", b, length, None, None, None, h100, "beyond"] for (m, b), length in CAPS.items()]
    columns = [
        "model",
        "source",
        "phase",
        "batch",
        "context",
        "tokens/s",
        "lower quartile",
        "upper quartile",
        "device",
        "out of memory",
    ]
    if not any(cell.phase == "prefill" for cell in cells):
        found = [panel for panel in found if panel.title.startswith("decode")]
    option = panels(found, columns=2 if len(found) > len(batches) else 1) | {"tooltip": {"trigger": "item"}}
    notes = [
        "Paper (text of Sections 3.1 and 3.2 and the introduction): at batch 8 and 8k, 125 against 22 tokens/s decoded "
        "(GDN+DSA against the Looped Transformer), about 5 times for Full+GDN; at batch 1 and 32k about 3 times for "
        "both and for GDN (2.9 and 2.7 for the hybrids); the Looped Transformer ends near 16k at batch 4 and near 8k "
        "at batch 8. The curves themselves are printed without numbers."
    ]
    if any(cell.low and cell.high for cell in cells):
        notes.append("Points are medians; bars reach from the lower to the upper quartile of the repeats.")
    if len({cell.device for cell in cells}) > 1:
        notes.append("These runs were measured on different devices; see the table.")
    return Figure(
        "Throughput by context and batch",
        option,
        columns,
        lambda: rows,
        notes,
        produce="" if cells else "python benchmarks/throughput.py cpu --frontier --storage ROOT",
    )


def _cells(source: Source, runs: list[str] | None) -> list[Cell]:
    """Every measured cell, the later of two of the same; a run on several devices is a line for each."""
    condition = f"{AT_OWN_DEPTH} AND e.metric IN ('prefill_tokens_per_s', 'decode_tokens_per_s')"
    found: dict[tuple[str, str, str, int, int], Cell] = {}
    for run, row in rows_of(source.snapshot(), condition, runs=runs):
        batch, context = row.get("batch_size"), row.get("context")
        if not isinstance(batch, int) or not isinstance(context, int):
            continue  # of a store from before cells said their place
        phase = METRICS[row["metric"]]
        rate = None if row.get("out_of_memory") else row.get("value")
        device = str(row.get("device") or "")
        found[run, device, phase, batch, context] = Cell(
            run, run, phase, batch, context, rate, row.get("q1"), row.get("q3"), device
        )
    devices = Counter(run for run, _ in dict.fromkeys((cell.run, cell.device) for cell in found.values()))
    return [replace(one, line=f"{one.run}, {one.device}") if devices[one.run] > 1 else one for one in found.values()]


def _panel(phase: str, batch: int, names: list[str], cells: list[Cell]) -> Panel:
    paper = [point for point in DECODE if phase == "decode" and point[1] == batch]
    lengths = [*(cell.context for cell in cells), *(context for _, _, context, _ in paper)]
    panel = Panel(
        f"{phase}, batch {batch} (tokens/s)",
        by_length("context (tokens)", lengths),
        {"type": "log"},
    )
    for position, name in enumerate(names):
        mine = sorted((cell for cell in cells if cell.line == name), key=lambda cell: cell.context)
        fits = [cell for cell in mine if cell.rate is not None]
        out = [cell.context for cell in mine if cell.rate is None]
        last = fits[-1] if fits and out and max(out) > fits[-1].context else None
        data = [_point(cell, is_last=cell is last) for cell in fits]
        spans = [(cell.context, cell.low, cell.high) for cell in fits if cell.low and cell.high]
        ends = [([at_length(n), rounded(low)], [at_length(n), rounded(high)]) for n, low, high in spans]
        panel.series += whiskers(name, ends, position)
        if data:
            panel.series.append(line(name, data, position, showSymbol=True, symbolSize=6))
    for model, _, context, rate in paper:
        symbol = "emptyRect" if CAPS.get((model, batch)) == context else "triangle"
        data = [{"name": f"paper, {model}", "value": [at_length(context), rate], "shown": rate}]
        panel.series.append(points(f"paper, {model}", data, symbol=symbol, symbolSize=11))
    return panel


def _point(cell: Cell, *, is_last: bool) -> dict[str, Any]:
    """A measured point; the last one before memory ran out is an open square."""
    mark = {"symbol": "emptyRect", "symbolSize": 12, "detail": "longer ones ran out of memory"}
    value = [at_length(cell.context), rounded(cell.rate)]
    told = {"detail": f"quartiles {cell.low:.4g} to {cell.high:.4g}"} if cell.low and cell.high else {}
    return told | {
        "name": f"{cell.line}, {cell.context:,} tokens",
        "value": value,
        **(mark if is_last else {"symbol": "circle"}),
    }
