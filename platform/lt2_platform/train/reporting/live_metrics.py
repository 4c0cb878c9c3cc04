"""Rank 0's numbers as gauges of Ray, for Prometheus. The results store stays the record; these are for watching."""

from __future__ import annotations

from typing import Any

from ray.util.metrics import Gauge

from lt2.train.loop import TrainState

GAUGES = {
    "loss": "lt2_train_loss",
    "grad_norm": "lt2_train_grad_norm",
    "grad_spikes": "lt2_train_grad_spikes",
    "lr": "lt2_train_lr",
    "tokens_per_s": "lt2_train_tokens_per_s",
    "mfu": "lt2_train_mfu",
    "step_time": "lt2_train_step_seconds",
    "data_wait": "lt2_train_data_wait_seconds",
    "data_wait_fraction": "lt2_train_data_wait_fraction",
    "peak_memory_gb": "lt2_train_peak_memory_bytes",
    "mean_loops": "lt2_train_mean_loops",
}
"""Metric of a run -> name of the gauge, which Prometheus sees with Ray's prefix: ray_lt2_train_loss."""

FACTORS = {"peak_memory_gb": 1e9}
STEP, TOKENS = "lt2_train_step", "lt2_train_tokens"
RHO_METRIC, RHO_NORM = "rho_norm_", "lt2_train_rho_norm"  # one metric per loop; one gauge with the tag `loop`


class LiveMetrics:
    """Callback of the training loop: publishes whatever of GAUGES there is, STEP, TOKENS and RHO_NORM.

    Every gauge has the run's id as the tag `run`. A gauge without a value yet is not shown.
    """

    def __init__(self, run_id: str):
        self.run = {"run": run_id}
        self.gauges = {name: Gauge(name, tag_keys=("run",)) for name in (STEP, TOKENS, *GAUGES.values())}
        self.rho = Gauge(RHO_NORM, tag_keys=("run", "loop"))

    def on_step(self, state: TrainState, metrics: dict[str, Any]) -> None:
        values = {name: metrics[key] * FACTORS.get(key, 1) for key, name in GAUGES.items() if key in metrics}
        for name, value in {STEP: state.step, TOKENS: state.tokens, **values}.items():
            self.gauges[name].set(value, tags=self.run)
        for key, value in metrics.items():
            if key.startswith(RHO_METRIC):
                self.rho.set(value, tags=self.run | {"loop": key.removeprefix(RHO_METRIC)})
