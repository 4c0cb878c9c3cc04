"""How far each step is, as a gauge of Ray, for Prometheus; only while the step's process is connected to Ray."""

from __future__ import annotations

import sys
from functools import cache
from typing import Any

PROGRESS = "lt2_step_progress"
"""Fraction done of a workflow's step, tags `workflow` and `step`; Prometheus sees it as ray_lt2_step_progress."""


def publish_progress(workflow: str, step: str, values: dict[str, Any]) -> None:
    """Set PROGRESS from a step's progress values {"step", "steps", …}; does nothing without Ray or without a total."""
    if "ray" not in sys.modules or not values.get("steps"):
        return
    import ray

    if ray.is_initialized():
        _gauge().set(values["step"] / values["steps"], tags={"workflow": workflow, "step": step})


@cache
def _gauge() -> Any:
    from ray.util.metrics import Gauge

    return Gauge(PROGRESS, description="Fraction done of a workflow's step", tag_keys=("workflow", "step"))
