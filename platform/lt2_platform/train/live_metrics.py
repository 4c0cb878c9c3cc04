"""Rank 0's numbers as gauges of Ray, for Prometheus. The results store stays the record; these are for watching."""

from __future__ import annotations

from typing import Any

from ray.util.metrics import Gauge

from lt2.training import TrainState

GAUGES = {
    "loss": "lt2_train_loss",
    "grad_norm": "lt2_train_grad_norm",
    "tokens_per_s": "lt2_train_tokens_per_s",
    "step_time": "lt2_train_step_seconds",
    "data_wait": "lt2_train_data_wait_seconds",
}
"""Metric of lt2.training.train -> name of the gauge, which Prometheus sees with Ray's prefix: ray_lt2_train_loss."""

STEP = "lt2_train_step"


class LiveMetrics:
    """Callback of the training loop: publishes GAUGES and STEP with the run's id as the tag `run`."""

    def __init__(self, run_id: str):
        names = [STEP, *GAUGES.values()]
        self.gauges = {name: Gauge(name, tag_keys=("run",)) for name in names}
        for gauge in self.gauges.values():
            gauge.set_default_tags({"run": run_id})

    def on_step(self, state: TrainState, metrics: dict[str, Any]) -> None:
        self.gauges[STEP].set(state.step)
        for metric, name in GAUGES.items():
            if metric in metrics:
                self.gauges[name].set(metrics[metric])
