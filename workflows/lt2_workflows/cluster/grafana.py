"""The Grafana dashboard of LT2: training, waiting for data, workflow steps, and the machines below them."""

from __future__ import annotations

from typing import Any

DATASOURCE = {"type": "prometheus", "uid": "${datasource}"}


def _last(name: str, labels: str = '{run=~"$run"}') -> str:
    # Ray gives a gauge to Prometheus once for each time it is set, so a slow run's line would be dots.
    return f"last_over_time({name}{labels}[5m])"


PANELS = [
    ("Loss", _last("ray_lt2_train_loss"), "{{run}}", "none"),
    ("Gradient norm", _last("ray_lt2_train_grad_norm"), "{{run}}", "none"),
    ("Tokens per second", _last("ray_lt2_train_tokens_per_s"), "{{run}}", "short"),
    ("Model FLOPs utilisation", _last("ray_lt2_train_mfu"), "{{run}}", "percentunit"),
    ("Learning rate", _last("ray_lt2_train_lr"), "{{run}}", "none"),
    ("Gradient spikes since the attempt began", _last("ray_lt2_train_grad_spikes"), "{{run}}", "none"),
    ("Norm of each loop's rho", _last("ray_lt2_train_rho_norm"), "{{run}} loop {{loop}}", "none"),
    ("Mean loops", _last("ray_lt2_train_mean_loops"), "{{run}}", "none"),
    ("Peak memory of rank 0", _last("ray_lt2_train_peak_memory_bytes"), "{{run}}", "bytes"),
    ("Step", _last("ray_lt2_train_step"), "{{run}}", "none"),
    ("Tokens learned", _last("ray_lt2_train_tokens"), "{{run}}", "short"),
    ("Seconds per step", _last("ray_lt2_train_step_seconds"), "{{run}}", "s"),
    ("Share of a step spent waiting for data", _last("ray_lt2_train_data_wait_fraction"), "{{run}}", "percentunit"),
    ("Workflow steps: fraction done", _last("ray_lt2_step_progress", ""), "{{workflow}} {{step}}", "percentunit"),
    ("GPU utilisation", "avg by (instance) (ray_node_gpus_utilization)", "{{instance}}", "percent"),
    ("GPU memory used, MiB", "sum by (instance) (ray_node_gram_used)", "{{instance}}", "short"),
    ("CPU utilisation", "avg by (instance) (ray_node_cpu_utilization)", "{{instance}}", "percent"),
    ("Memory used", "ray_node_mem_used", "{{instance}}", "bytes"),
    ("Network received", "ray_node_network_receive_speed", "{{instance}}", "Bps"),
]
"""(title, PromQL, legend, unit)."""


def dashboard() -> dict[str, Any]:
    """Two panels a row; `run` and the data source are variables."""
    return {
        "uid": "lt2",
        "title": "LT2",
        "tags": ["lt2"],
        "schemaVersion": 39,
        "time": {"from": "now-3h", "to": "now"},
        "refresh": "10s",
        "templating": {
            "list": [
                {"name": "datasource", "type": "datasource", "query": "prometheus"},
                {
                    "name": "run",
                    "type": "query",
                    "datasource": DATASOURCE,
                    "query": "label_values(ray_lt2_train_step, run)",
                    "refresh": 2,
                    "multi": True,
                    "includeAll": True,
                    "allValue": ".*",
                    "current": {"text": "All", "value": "$__all"},
                },
            ]
        },
        "panels": [_panel(index, *panel) for index, panel in enumerate(PANELS)],
    }


def _panel(index: int, title: str, expression: str, legend: str, unit: str) -> dict[str, Any]:
    return {
        "id": index + 1,
        "title": title,
        "type": "timeseries",
        "datasource": DATASOURCE,
        "gridPos": {"x": 12 * (index % 2), "y": 8 * (index // 2), "w": 12, "h": 8},
        "fieldConfig": {"defaults": {"unit": unit}, "overrides": []},
        "targets": [{"refId": "A", "datasource": DATASOURCE, "expr": expression, "legendFormat": legend}],
    }
