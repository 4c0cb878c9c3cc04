"""Numbers printed in the LT2 paper, as references in figures. Percentages unless said otherwise."""

from __future__ import annotations

from lt2_platform.evaluate.ablations import paper_table
from lt2_platform.evaluate.paper import CONTRADICTED, DOWNSTREAM, TASK_LABELS, TASKS, average

__all__ = [
    "CAPS",
    "CONTRADICTED",
    "DECODE",
    "DOWNSTREAM",
    "GATES",
    "LEVELS",
    "LONG_CONTEXT",
    "LONG_CONTEXT_TASKS",
    "PATTERNS",
    "RATIOS",
    "RMS_GROWTH",
    "STABILITY",
    "STATE_RECALL",
    "TASKS",
    "TASK_LABELS",
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

# Section 4.2 and the introduction, one H100: (model, batch, context, decoded tokens/s).
DECODE = (
    ("Looped Transformer", 8, 8192, 22.0),
    ("Looped Hybrid (GDN+DSA)", 8, 8192, 125.0),
)
# (model, batch) -> about the longest context before 80 GB were full.
CAPS = {("Looped Transformer", 4): 16_384, ("Looped Transformer", 8): 8_192}

RMS_GROWTH = 20.0  # Section 4.4: the residual stream's RMS at the end of loop 4, about, as a multiple of its start

# Section 4.5, in short, by mixers (attention first).
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

# Section 4.6, text: architecture -> (highest stage at any T, {T: stage} where a T is named). Stage s is n = 2^(s+2).
STATE_RECALL = {
    "Transformer": (4, {}),
    "Hybrid (Full+Window)": (4, {}),
    "Hybrid (Full+GDN)": (5, {}),
    "Hybrid (GDN+Window)": (5, {1: 3, 2: 3, 4: 3, 8: 5}),
    "NSA": (5, {}),
    "Hybrid (GDN+NSA)": (5, {}),
}

# Table 5, 1.3B: recall within 2,048 tokens, then needles at 1k, 2k and 4k. Ours also have 8k, beyond their training.
LONG_CONTEXT_TASKS = {
    "swde": "SWDE",
    "squad_completion": "SQuAD",
    "fda": "FDA",
    "triviaqa_cloze": "TriviaQA",
    "nq_cloze": "NQ",
    "drop_cloze": "DROP",
    **{
        f"niah_single_{kind}_{length}": f"NIAH-{kind} {length // 1024}k"
        for kind in (1, 2, 3)
        for length in (1024, 2048, 4096, 8192)
    },
}
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

# A value per label: the paper has none at 8k.
_COLUMNS = [task for task in LONG_CONTEXT_TASKS if not task.endswith("_8192")]
LONG_CONTEXT: dict[str, tuple[float | None, ...]] = {
    model: tuple(dict(zip(_COLUMNS, row)).get(task) for task in LONG_CONTEXT_TASKS) for model, row in _PRINTED.items()
}


def mean_of_tasks(row: tuple[float, ...]) -> float:
    """The mean of a Table 2 row's eight accuracies; the printed average is not always that."""
    mean = average(dict(zip(TASK_LABELS, row[1:])))
    assert mean is not None, row
    return mean
