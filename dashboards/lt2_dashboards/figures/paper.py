"""Numbers printed in the LT2 paper, as references in figures. Percentages unless said otherwise."""

from __future__ import annotations

from lt2_platform.evaluate.paper import DOWNSTREAM, TASK_LABELS, TASKS

__all__ = ["DOWNSTREAM", "PATTERNS", "RATIOS", "TASKS", "TASK_LABELS"]

# Table 3: 1.3B, T = 4, 100B tokens: (attention:GDN or schedule, perplexity, average).
RATIOS = (
    ("1:0", 9.87, 59.27),
    ("1:1", 9.41, 60.92),
    ("1:4", 9.31, 61.39),
    ("1:6", 9.36, 61.07),
    ("1:12", 9.74, 59.51),
    ("0:1", 10.02, 58.42),
)
PATTERNS = (("bookend", 9.27, 61.52), ("interleave", 9.31, 61.39), ("front", 9.45, 60.61), ("back", 9.53, 60.43))
