"""The paper's ablation tables, and the trials of a sweep beside them with means and spreads over seeds."""

from __future__ import annotations

import csv
import io
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from lt2.config import ConfigError
from lt2_platform.evaluate.paper.main_table import DOWNSTREAM, TASK_LABELS, average, contradictions, scores_of
from lt2_platform.evaluate.student import mean_std, welch

SCORES = ("PPL", "Avg")
FLOPS = "training_flops"  # of all that a trial has trained
P_MEANS = (
    "p is that of Welch's t-test against the best configuration, over seeds; among many, one is the best by chance."
)


@dataclass(frozen=True)
class PaperTable:
    """`rows` maps (group, label) to (perplexity, average over the eight tasks); `notes` are sentences on them."""

    title: str
    rows: Mapping[tuple[str, str], tuple[float, float]]
    notes: Sequence[str] = ()


def _main_table(scale: str) -> dict[tuple[str, str], tuple[float, float]]:
    rows = {}
    for name, values in DOWNSTREAM[scale].items():
        if values is not None and (mean := average(dict(zip(TASK_LABELS, values[1:])))) is not None:
            rows["", name] = (values[0], round(mean, 2))
    return rows


# Tables 3 and 4: 1.3B, T = 4, 100B tokens of FineWeb-Edu, averages as printed.
TABLES: dict[str, PaperTable] = {
    "ratio": PaperTable(
        "Hybrid ratio (Full : GDN, interleaved)",
        {
            ("", "1:0"): (9.87, 59.27),
            ("", "1:1"): (9.41, 60.92),
            ("", "1:4"): (9.31, 61.39),
            ("", "1:6"): (9.36, 61.07),
            ("", "1:12"): (9.74, 59.51),
            ("", "0:1"): (10.02, 58.42),
        },
    ),
    "pattern": PaperTable(
        "Hybrid pattern (Full + GDN, 1:4)",
        {
            ("", "bookend"): (9.27, 61.52),
            ("", "interleave"): (9.31, 61.39),
            ("", "front"): (9.45, 60.61),
            ("", "back"): (9.53, 60.43),
        },
    ),
    "level": PaperTable(
        "Hybridization level (matched parameters)",
        {
            ("", "random + vote"): (9.26, 61.55),
            ("", "depth"): (9.31, 61.39),
            ("", "coarse to fine"): (9.36, 60.71),
            ("", "fine to coarse"): (9.42, 61.10),
        },
    ),
    "gate": PaperTable(
        "SDPA output gate (FFN width matched)",
        {
            ("Looped Transformer", "no gate"): (9.87, 59.27),
            ("Looped Transformer", "gate"): (9.39, 60.70),
            ("Full+GDN", "no gate"): (9.31, 61.39),
            ("Full+GDN", "gate"): (9.03, 62.33),
            ("GDN+DSA", "no gate"): (9.72, 59.23),
            ("GDN+DSA", "gate"): (9.53, 59.96),
        },
    ),
    "mixers-0.6b": PaperTable("Mixers (paper: 0.6B, T = 4, averages recomputed)", _main_table("0.6B")),
    "mixers-1.3b": PaperTable(
        "Mixers (paper: 1.3B, T = 4, averages recomputed)", _main_table("1.3B"), contradictions("1.3B")
    ),
}


def paper_table(name: str) -> PaperTable:
    """Raises ConfigError for a table that the paper does not have."""
    if name not in TABLES:
        raise ConfigError(f"the paper has no ablation table {name!r}; it has {', '.join(TABLES)}")
    return TABLES[name]


def summarize(trials: Sequence[Mapping[str, Any]], paper: str | None) -> list[dict[str, Any]]:
    """One row per configuration, in the order of the trials.

    trials: {"label", "group", "seed", "state", "metrics": {"task/metric": value}, "parameters", "training_flops"}.
    Returns rows {group, label, n, stopped, failed, parameters, training_flops, PPL, PPL_std, PPL_paper, PPL_p, Avg, …,
    metrics}: means over the seeds that finished (n; the scheduler stopped `stopped` others), their sample standard
    deviation (None below two) and the p-value against the best row (see P_MEANS; None of the best itself). PPL is the
    perplexity on held-out text, Avg the mean of the paper's eight tasks in percent, where all eight were evaluated.
    """
    reference = paper_table(paper).rows if paper else {}
    by_row: dict[tuple[str, str], list[Mapping[str, Any]]] = {}
    for trial in trials:
        by_row.setdefault((trial["group"], trial["label"]), []).append(trial)
    rows = {key: _row(key, found, reference.get(key)) for key, found in by_row.items()}
    for name, sign in zip(SCORES, (1, -1), strict=True):  # of perplexities the lowest is best, of averages the highest
        values = {key: _scores(found, name) for key, found in by_row.items()}
        known = [key for key in rows if rows[key][name] is not None and math.isfinite(rows[key][name])]
        best = min(known, key=lambda key: sign * rows[key][name], default=None)
        for key, row in rows.items():
            row[f"{name}_p"] = None if key == best or best is None else welch(values[best], values[key])
    return list(rows.values())


def _scores(trials: Sequence[Mapping[str, Any]], name: str) -> list[float]:
    found = (headline(trial["metrics"]) for trial in trials if trial["state"] == "done")
    return [scores[name] for scores in found if name in scores]


def _row(key: tuple[str, str], trials: list[Mapping[str, Any]], paper: tuple[float, float] | None) -> dict[str, Any]:
    done = [trial for trial in trials if trial["state"] == "done"]
    stopped = sum(trial["state"] == "stopped" for trial in trials)
    failed = len(trials) - len(done) - stopped
    row: dict[str, Any] = {"group": key[0], "label": key[1], "n": len(done), "stopped": stopped, "failed": failed}
    row["parameters"] = next((trial["parameters"] for trial in trials if trial.get("parameters")), None)
    row[FLOPS], _ = mean_std([trial[FLOPS] for trial in done if trial.get(FLOPS)])
    for index, name in enumerate(SCORES):
        mean, spread = mean_std(_scores(done, name))
        row |= {name: mean, f"{name}_std": spread, f"{name}_paper": paper[index] if paper else None}
    names = dict.fromkeys(name for trial in done for name in trial["metrics"])
    row["metrics"] = {
        name: mean_std([trial["metrics"][name] for trial in done if name in trial["metrics"]]) for name in names
    }
    return row


def headline(metrics: Mapping[str, float]) -> dict[str, float]:
    """{"PPL", "Avg"} as far as `metrics` ("task/metric") has what they need."""
    split = [(*name.rpartition("/")[::2], value) for name, value in metrics.items()]
    scores = scores_of({"task": task, "metric": metric, "value": value} for task, metric, value in split)
    mean = average(scores)
    return {name: value for name, value in (("PPL", scores.get("PPL")), ("Avg", mean)) if value is not None}


def score_cells(row: Mapping[str, Any], *, with_paper: bool) -> dict[str, Any]:
    """A row's scores, their p-values and the paper's numbers, by the column of a table that shows them."""
    cells: dict[str, Any] = {}
    for name in SCORES:
        cells |= {name: plus_minus(row[name], row[f"{name}_std"]), f"{name}, p": p_text(row[f"{name}_p"])}
        if with_paper:
            cells[f"{name}, paper"] = row[f"{name}_paper"]
    return cells


def p_text(p_value: float | None) -> str:
    return "" if p_value is None else "<0.001" if p_value < 0.001 else f"{p_value:.2g}"


def counts(rows: Sequence[Mapping[str, Any]]) -> set[str]:
    """The names of `metrics` that count something (stages passed, steps): those that are whole numbers in every row."""
    pairs = [item for row in rows for item in row["metrics"].items()]
    broken = {name for name, pair in pairs if not all(float(value or 0).is_integer() for value in pair)}
    return {name for name, _ in pairs} - broken


def plus_minus(mean: float | None, spread: float | None, digits: int = 2) -> str:
    """'9.31 ± 0.04', '9.31', or '' for None; from a thousand on (tokens/s) without decimals."""
    if mean is None:
        return ""
    digits = digits if abs(mean) < 1000 else 0
    return f"{mean:.{digits}f}" + (f" ± {spread:.{digits}f}" if spread is not None else "")


def as_csv(rows: Sequence[Mapping[str, Any]]) -> str:
    """The rows of `summarize`, every metric in two columns of its own."""
    fixed = [key for key in rows[0] if key != "metrics"]
    names = list(dict.fromkeys(name for row in rows for name in row["metrics"]))
    sink = io.StringIO()
    writer = csv.writer(sink, lineterminator="\n")
    writer.writerow([*fixed, *(part for name in names for part in (name, f"{name} std"))])
    for row in rows:
        numbers = [part for name in names for part in row["metrics"].get(name, (None, None))]
        writer.writerow([*(row[key] for key in fixed), *numbers])
    return sink.getvalue()
