"""Numbers printed in the LT2 paper, as references in figures. Percentages unless said otherwise."""

from __future__ import annotations

from lt2_platform.evaluate.ablations import paper_table
from lt2_platform.evaluate.paper.main_table import DOWNSTREAM, NORMALISED, TASK_LABELS, TASKS, average, contradictions

__all__ = [
    "CAPS",
    "DECODE",
    "DOWNSTREAM",
    "GATES",
    "LEVELS",
    "NORMALISED",
    "PATTERNS",
    "RATIOS",
    "RMS_GROWTH",
    "STABILITY",
    "STATE_RECALL",
    "TASKS",
    "TASK_LABELS",
    "contradictions",
    "mean_of_tasks",
]


def _ablation(name: str) -> tuple[tuple[str, float, float], ...]:
    return tuple((label, *numbers) for (_, label), numbers in paper_table(name).rows.items())


# Table 3: 1.3B, T = 4, 100B tokens: (attention:GDN, pattern or level, perplexity, average).
RATIOS, PATTERNS, LEVELS = _ablation("ratio"), _ablation("pattern"), _ablation("level")

# Table 4: model -> (perplexity, average) without and with the gate after the attention.
_GATED = paper_table("gate").rows
GATES = {
    title: (_GATED[group, "no gate"], _GATED[group, "gate"])
    for title, group in (
        ("Looped Transformer", "Looped Transformer"),
        ("Looped Hybrid (Full+GDN)", "Full+GDN"),
        ("Looped Hybrid (GDN+DSA)", "GDN+DSA"),
    )
}

# The introduction, one H100: (model, batch, context, decoded tokens/s).
DECODE = (
    ("Looped Transformer", 8, 8192, 22.0),
    ("Looped Hybrid (GDN+DSA)", 8, 8192, 125.0),
)
# Section 3.2: (model, batch) -> about the longest context before 80 GB were full.
CAPS = {("Looped Transformer", 4): 16_384, ("Looped Transformer", 8): 8_192}

RMS_GROWTH = 20.0  # Section 3.4: the residual stream's RMS at the end of loop 4, about, as a multiple of its start

# Section 3.5, in short, by mixers (attention first).
STABILITY = {
    ("full",): "reference; occasional sharp spikes mid-training",
    ("retnet",): "diverges; large gradient norms and frequent spikes",
    ("deltanet",): "occasional spikes that reach the loss",
    ("mamba2",): "occasional spikes that reach the loss",
    ("gdn",): "smoothest loss, smallest gradient norms",
    ("window",): "no spikes, slightly higher loss",
    ("nsa",): "no spikes, slightly higher loss",
    ("dsa",): "no spikes, slightly higher loss",
    ("full", "gdn"): "no spikes, loss at or below the reference",
    ("dsa", "gdn"): "no spikes, loss at or below the reference",
}

# Section 3.6, text: architecture -> (highest stage at any T, {T: stage} where a T is named). Stage s is n = 2^(s+2).
STATE_RECALL = {
    "Transformer": (4, {}),
    "Hybrid (Full+Window)": (4, {}),
    "Hybrid (Full+GDN)": (5, {}),
    "Hybrid (GDN+Window)": (5, {1: 3, 2: 3, 4: 3, 8: 5}),
    "NSA": (5, {}),
    "Hybrid (GDN+NSA)": (5, {}),
}


def mean_of_tasks(row: tuple[float, ...]) -> float:
    """The mean of a Table 2 row's eight accuracies; the printed average is not always that."""
    mean = average(dict(zip(TASK_LABELS, row[1:])))
    assert mean is not None, row
    return mean
