"""The same made-up runs for every dashboard of dashboard_peers.py: `peer_logs.py KIND ROOT RUNS STEPS`.

KIND is ours, tensorboard or mlflow; each is written through its own writer. The last two run in an interpreter that has
them, which need not have LT2.
"""

from __future__ import annotations

import sys
import time
from collections.abc import Iterator
from pathlib import Path

import numpy as np


def curves(runs: int, steps: int) -> Iterator[tuple[str, float, dict[str, np.ndarray]]]:
    """(name, learning rate, metric -> one value per step) of every run."""
    for number in range(runs):
        rng = np.random.default_rng(number)
        step = np.arange(steps)
        loss = 2.5 + rng.random() + 8 * np.exp(-step / (0.02 * steps)) + 0.05 * rng.standard_normal(steps)
        norm = 0.3 + np.abs(0.1 * rng.standard_normal(steps))
        yield f"run-{number:04d}", float(10 ** rng.uniform(-4, -3)), {"loss": loss, "grad_norm": norm}


def write_ours(root: Path, runs: int, steps: int) -> None:
    from lt2_platform.results.store import ResultsStore
    from lt2_platform.storage import Storage

    store = ResultsStore(Storage(str(root)))
    for name, lr, values in curves(runs, steps):
        with store.create_run(name, {"config": {"train": {"lr": lr, "steps": steps}}}) as writer:
            for step in range(steps):
                writer.log(step, {metric: value[step] for metric, value in values.items()})


def write_tensorboard(root: Path, runs: int, steps: int) -> None:
    from tensorboard.compat.proto.event_pb2 import Event
    from tensorboard.compat.proto.summary_pb2 import Summary
    from tensorboard.summary.writer.event_file_writer import EventFileWriter

    for name, _, values in curves(runs, steps):
        writer = EventFileWriter(str(root / name), max_queue_size=10_000)
        for step in range(steps):
            found = [Summary.Value(tag=metric, simple_value=value[step]) for metric, value in values.items()]
            writer.add_event(Event(step=step, wall_time=time.time(), summary=Summary(value=found)))
        writer.close()


def write_mlflow(root: Path, runs: int, steps: int) -> None:
    from mlflow import MlflowClient
    from mlflow.entities import Metric

    root.mkdir(parents=True, exist_ok=True)
    client = MlflowClient(f"sqlite:///{root}/mlflow.db")
    experiment = client.create_experiment("runs", artifact_location=str(root / "artifacts"))
    now = int(1e3 * time.time())
    for name, lr, values in curves(runs, steps):
        run = client.create_run(experiment, run_name=name).info.run_id
        client.log_param(run, "lr", lr)
        rows = [
            Metric(metric, float(value[step]), now, step) for metric, value in values.items() for step in range(steps)
        ]
        for start in range(0, len(rows), 1_000):  # the most that one call takes
            client.log_batch(run, metrics=rows[start : start + 1_000])
        client.set_terminated(run)


WRITERS = {"ours": write_ours, "tensorboard": write_tensorboard, "mlflow": write_mlflow}

if __name__ == "__main__":
    kind, root, runs, steps = sys.argv[1:]
    WRITERS[kind](Path(root), int(runs), int(steps))
