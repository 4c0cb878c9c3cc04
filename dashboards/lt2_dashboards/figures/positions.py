"""Loss by position in a document, of several runs or of the same weights at several depths."""

from __future__ import annotations

from typing import Any

from lt2.layout import loops_text
from lt2_dashboards.figures.figure import Figure, rounded
from lt2_dashboards.figures.parts.names import told_apart
from lt2_dashboards.figures.parts.series import Panel, at_length, by_length, line, panels, whiskers
from lt2_dashboards.figures.parts.store import rows_of
from lt2_dashboards.figures.parts.texts import text_notes
from lt2_dashboards.queries import Source
from lt2_platform.evaluate.repeats import at_own_depth, counting
from lt2_platform.evaluate.spans import difference
from lt2_platform.results.store import RunInfo
from lt2_platform.wording import first_of

MAX_RUNS = 8  # newest first, where none are named
Row = dict[str, Any]
Curve = dict[int, Row]  # by the last position of each octave
Distances = dict[int, tuple[float, float | None]]  # (value, standard error) likewise
Depth = tuple[int, bool, float | None]  # loops, early exit, its threshold


def positions(
    source: Source, *, task: str = "positions", depths: bool = False, runs: list[str] | None = None
) -> Figure:
    """Held-out loss by position in the document: whether a model uses a long context, and whether
    that goes beyond the length of its training.

    By default the newest runs that have it, as they were trained; with `depths` at every depth of their evaluations.
    The lower chart is each line's distance from the first one, that of the run named first in `runs`.
    """
    snapshot = source.snapshot()
    by_run: dict[str, list[Row]] = {}
    for run, row in rows_of(snapshot, "e.name = 'positions' AND e.task = ?", [task], runs=runs):
        by_run.setdefault(run, []).append(row)
    shown = [run for run in runs if run in by_run] if runs else list(by_run)[:MAX_RUNS]
    infos, names = snapshot.runs(shown), told_apart(snapshot, shown)
    drawn: dict[str, Curve] = {}
    distances: dict[str, Distances] = {}  # of each curve from the first
    table: list[list[Any]] = []
    for run in shown:
        for depth, curve in _curves(by_run[run], None if depths else infos.get(run)).items():
            label = f"{names[run]}: {loops_text(*depth)}" if depths else names[run]
            drawn[label] = curve
            distances[label] = apart = _apart(curve, next(iter(drawn.values())))
            compared = len(drawn) > 1
            for last, row in curve.items():
                known = [run, loops_text(*depth), row["first"], last, row["value"], row.get("stderr"), row.get("n")]
                table.append(known + list(apart.get(last, (None, None)) if compared else (None, None)))
    ends = [last for curve in drawn.values() for last in curve]
    axis = by_length("position in the document", ends)
    trained = {_trained_at(infos[run]) for run in shown if run in infos}
    beyond = sorted(length for length in trained if length and length < max(ends))
    reference = next(iter(drawn), "")
    upper = Panel("loss (nats per token)", axis, {"type": "value", "scale": True})
    lower = Panel(f"above {reference} (nats per token)", axis, {"type": "value", "scale": True})
    for position, (label, curve) in enumerate(drawn.items()):
        data = [[at_length(last), rounded(row["value"])] for last, row in curve.items()]
        marks = {"markLine": {"data": [{"xAxis": at_length(n)} for n in beyond]}} if beyond and not position else {}
        style = {"showSymbol": True, "symbolSize": 5}
        upper.series.append(line(label, data, position, **style, **marks))
        apart = {at_length(last): found for last, found in distances[label].items()}
        bars = [
            ([at, rounded(value - error)], [at, rounded(value + error)])
            for at, (value, error) in apart.items()
            if error
        ]
        lower.series += whiskers(label, bars, position)
        lower.series.append(line(label, [[at, rounded(value)] for at, (value, _) in apart.items()], position, **style))
    notes = [
        "A point is the mean over the positions since the previous point. All positions come from the same spans of "
        "text, each read from its beginning. The paper has no such figure.",
        *["Dashed: the length of the rows in training."][: len(beyond)],
        *text_notes([(label, row) for label, curve in drawn.items() for row in list(curve.values())[-1:]]),
    ]
    if others := [series["name"] for series in lower.series if not series["data"]]:
        notes.append(f"Evaluated on other spans than {reference}, so not in the lower chart: {first_of(others)}.")
    if any(row[-1] for row in table):
        notes.append(
            f"Whiskers: one standard error of the distance from {reference}, over groups of the same spans. Results "
            "from before these were stored have none; measure them again (lt2 positions RUN)."
        )
    option = panels([upper, lower] if len(drawn) > 1 else [upper], columns=1)
    option["empty"] = None if drawn else _nothing(source, task)
    columns = ["run", "depth", "first position", "last position", "loss (nats per token)", "standard error", "tokens"]
    columns += [f"above {reference}", "its standard error"] if len(drawn) > 1 else []
    produce = "" if drawn else "lt2 positions RUN, or a positions task of an evaluate step"
    return Figure(
        "Loss by position", option, columns, lambda: [row[: len(columns)] for row in table], notes, produce=produce
    )


def _curves(rows: list[Row], trained: RunInfo | None) -> dict[Depth, Curve]:
    """A run's rows by depth, at each those of the evaluation that counts; of a run that is known at its own alone."""
    n_loops = (trained.config.get("model") or {}).get("n_loops") if trained else None
    found: dict[Depth, list[Row]] = {}
    for row in at_own_depth(rows, n_loops) if isinstance(n_loops, int) else rows:
        depth = row["n_loops"], bool(row.get("early_exit")), row.get("exit_threshold")
        found.setdefault(depth, []).append(row)
    order = sorted(found, key=lambda depth: (depth[1], depth[0], depth[2] or 1))
    return {depth: _of_one_evaluation(found[depth]) for depth in order}


def _of_one_evaluation(rows: list[Row]) -> Curve:
    (newest,) = counting(("", row) for row in rows).values()
    kept = [row for row in rows if row.get("length") == newest.get("length")]  # other lengths have other octaves
    return dict(sorted(counting((row["position"], row) for row in kept).items()))


def _apart(curve: Curve, reference: Curve) -> Distances:
    """How far a curve is above another where both are of the same spans, and the standard error if that is known."""
    found = {}
    for last in curve.keys() & reference.keys():
        row, other = curve[last], reference[last]
        if all(row.get(key) == other.get(key) for key in ("data", "length", "n")):
            paired = difference(other.get("groups", ""), row.get("groups", "")) or {}
            found[last] = row["value"] - other["value"], paired.get("stderr")
    return dict(sorted(found.items()))


def _trained_at(run: RunInfo) -> int | None:
    data = run.config.get("data")
    seq_len = data.get("seq_len") if isinstance(data, dict) else None
    return seq_len if isinstance(seq_len, int) else None


def _nothing(source: Source, task: str) -> str:
    """The message of an empty figure: there is nothing of this task, but of these others."""
    others = source.snapshot().query("SELECT DISTINCT task FROM evals WHERE name = 'positions' ORDER BY 1")
    known = f" There are: {', '.join(name for (name,) in others[:20])}." if others else ""
    return f"No run has losses by position of the task {task!r} yet.{known}"
