"""The paper's main table, and ours beside it. Averages are recomputed from the eight columns."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any

from lt2.config import ConfigError
from lt2_platform.evaluate.paper.formats import mean_of, our_rows
from lt2_platform.evaluate.repeats import standing

# Table 2: zero-shot accuracy after 100B tokens of FineWeb-Edu, T = 4. lm-eval's task names.
TASKS = ("arc_easy", "arc_challenge", "hellaswag", "piqa", "winogrande", "openbookqa", "sciq", "boolq")
TASK_LABELS = ("ARC-E", "ARC-C", "HellaSwag", "PIQA", "WinoGrande", "OBQA", "SciQ", "BoolQ")

# Model -> (perplexity, the eight tasks in the order of TASKS, average as printed); None: training diverged.
# The printed average is not always the mean of the eight columns.
DOWNSTREAM: dict[str, dict[str, tuple[float, ...] | None]] = {
    "0.6B": {
        "Transformer": (13.14, 63.09, 30.72, 47.43, 69.53, 56.24, 35.6, 68.2, 50.07, 51.34),
        "Looped Transformer": (11.92, 67.13, 34.67, 53.29, 70.58, 62.83, 38.2, 73.6, 54.87, 56.42),
        "Looped RetNet": None,
        "Looped HGRN2": (14.59, 59.82, 27.93, 43.17, 67.34, 52.13, 33.4, 65.2, 48.53, 49.69),
        "Looped Mamba2": (12.78, 64.53, 31.82, 49.87, 69.74, 58.63, 35.6, 68.8, 51.83, 53.86),
        "Looped DeltaNet": (14.16, 60.47, 28.53, 44.22, 67.87, 53.24, 33.8, 65.5, 49.13, 50.12),
        "Looped GDN": (12.06, 66.43, 33.89, 52.62, 70.27, 61.48, 36.4, 70.5, 54.13, 55.74),
        "Looped KDA": (12.13, 66.12, 33.63, 52.37, 70.13, 61.22, 36.2, 70.2, 53.92, 55.49),
        "Looped Window": (12.87, 64.23, 31.53, 48.83, 69.82, 57.34, 35.8, 68.5, 51.23, 52.17),
        "Looped NSA": (12.3, 65.57, 32.74, 51.43, 70.04, 60.32, 36.0, 69.5, 53.13, 54.84),
        "Looped DSA": (12.08, 66.37, 33.82, 52.53, 70.23, 61.42, 36.4, 70.4, 54.07, 55.67),
        "Looped Hybrid (Full+Window)": (12.24, 65.32, 32.13, 51.23, 69.86, 58.42, 36.0, 69.2, 53.13, 54.43),
        "Looped Hybrid (Full+DSA)": (12.2, 65.53, 32.34, 51.42, 70.04, 58.63, 36.2, 69.4, 53.32, 54.62),
        "Looped Hybrid (Full+GDN)": (11.43, 69.82, 37.34, 55.83, 72.62, 64.61, 38.9, 73.3, 57.74, 58.65),
        "Looped Hybrid (GDN+DSA)": (11.85, 67.43, 34.53, 53.42, 70.63, 62.92, 37.0, 71.2, 55.13, 56.53),
    },
    "1.3B": {
        "Transformer": (10.65, 67.52, 33.84, 52.47, 71.03, 61.48, 36.6, 71.3, 54.02, 56.04),
        "Looped Transformer": (9.87, 70.83, 37.54, 57.06, 72.43, 65.83, 38.6, 74.1, 57.83, 59.27),
        "Looped Mamba2": (10.3, 69.47, 36.63, 55.94, 72.68, 64.37, 38.2, 73.0, 57.03, 58.43),
        "Looped GDN": (9.75, 71.28, 38.33, 57.73, 73.37, 66.26, 39.1, 74.3, 58.78, 59.92),
        "Looped KDA": (9.68, 71.57, 38.62, 57.99, 73.53, 66.42, 39.3, 74.6, 58.98, 60.14),
        "Looped Window": (10.42, 68.43, 35.47, 54.87, 71.32, 63.23, 36.9, 71.7, 55.87, 57.23),
        "Looped NSA": (10.17, 69.02, 35.97, 55.08, 71.52, 64.03, 37.2, 72.2, 56.53, 57.72),
        "Looped DSA": (9.97, 69.93, 36.93, 56.38, 71.94, 64.87, 37.7, 72.9, 57.42, 58.54),
        "Looped Hybrid (Full+Window)": (9.84, 70.93, 37.12, 56.68, 73.12, 64.34, 38.8, 73.3, 58.56, 59.13),
        "Looped Hybrid (Full+DSA)": (9.8, 71.13, 37.28, 56.84, 73.24, 64.52, 38.9, 73.4, 58.73, 59.28),
        "Looped Hybrid (Full+GDN)": (9.12, 74.82, 41.63, 61.04, 75.93, 69.52, 41.3, 75.4, 62.04, 62.89),
        "Looped Hybrid (GDN+DSA)": (9.5, 72.44, 39.33, 58.84, 73.98, 67.13, 39.7, 74.9, 59.77, 60.73),
    },
}

NORMALISED = {"arc_challenge", "hellaswag", "openbookqa"}  # where acc_norm is the customary number
COLUMNS = ("PPL", *TASK_LABELS, "Avg")

# The paper contradicts itself on these (text and ablations against the main table).
CONTRADICTED = {
    ("1.3B", "Looped Hybrid (Full+GDN)"): "the text and Tables 3 and 4 have average 61.39, PPL 9.31",
    ("1.3B", "Looped Hybrid (GDN+DSA)"): "the text and Table 4 have average 59.23, PPL 9.72",
    ("1.3B", "Looped GDN"): "Table 3 has average 58.42, PPL 10.02",
}


def contradictions(scale: str) -> list[str]:
    """What the paper says elsewhere of its models of that scale, a sentence each."""
    return [f"{model}: {say}." for (size, model), say in CONTRADICTED.items() if size == scale]


def scores_of(rows: Iterable[Mapping[str, Any]]) -> dict[str, float]:
    """{"PPL", label: percent} of one run's evaluation rows {task, metric, value}; see `standing` for repeats."""
    found: dict[str, float] = {}
    labels = dict(zip(TASKS, TASK_LABELS))
    wanted: dict[tuple[str, str], str] = {
        (task, "acc_norm" if task in NORMALISED else "acc"): label for task, label in labels.items()
    }
    for row in sorted(rows, key=standing):
        key = str(row.get("task")), str(row.get("metric"))
        if key in wanted:
            found[wanted[key]] = 100 * float(row["value"])
        elif key == ("perplexity", "perplexity"):
            found["PPL"] = float(row["value"])
    return found


def compared(ours: Mapping[str, Mapping[str, float]], scale: str) -> list[dict[str, Any]]:
    """Rows {model, source, PPL, the eight, Avg, note}: the paper's of that scale, then ours by run.

    An average is given only where all eight are; nothing is taken from the paper's printed averages.

    Raises:
        ConfigError: the paper has no such scale.
    """
    if scale not in DOWNSTREAM:
        raise ConfigError(f"the paper has no scale {scale!r}; it has {', '.join(DOWNSTREAM)}")
    rows = []
    for model, numbers in DOWNSTREAM[scale].items():
        if numbers is None:
            rows.append({"model": model, "source": "paper", "note": "training diverged"})
            continue
        theirs: dict[str, float] = dict(zip(("PPL", *TASK_LABELS), numbers))
        printed, mean = numbers[-1], average(theirs)
        notes = [f"printed {printed}"] if mean is not None and abs(printed - mean) >= 0.01 else []
        notes += [CONTRADICTED[scale, model]] if (scale, model) in CONTRADICTED else []
        rows.append({"model": model, "source": "paper", **theirs, "Avg": mean, "note": "; ".join(notes)})
    return rows + our_rows(ours, TASK_LABELS)


def average(scores: Mapping[str, float]) -> float | None:
    """The mean of the eight."""
    return mean_of(scores, TASK_LABELS)
