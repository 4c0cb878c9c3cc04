"""A recipe file for jobs on a cluster: its step runs a Ray task and says which code ran where."""

from __future__ import annotations

import os
import time
from pathlib import Path
from typing import Literal

import ray

import lt2_workflows
from lt2.train.loop import TrainState
from lt2_platform.train.reporting.live_metrics import GAUGES, LiveMetrics
from lt2_workflows.engine.local_ray import join_ray
from lt2_workflows.graph import StepConfig, Workflow, step_type


class RemoteStep(StepConfig):
    uses_ray = True
    type: Literal["remote"] = "remote"
    trace: str = ""
    pause_s: float = 0.0
    code: int | None = None
    source: str | None = None


@ray.remote(num_cpus=0.5)
def work(trace: str, pause_s: float) -> str:
    Path(trace, "worker").write_text(str(os.getpid()))
    live = LiveMetrics("a-run")  # as rank 0 of training publishes its own
    live.on_step(TrainState(step=7), dict.fromkeys([*GAUGES, "rho_norm_0"], 0.5))
    deadline = time.monotonic() + pause_s
    while time.monotonic() < deadline and not Path(trace, "go").exists():
        time.sleep(0.05)
    import lt2_workflows

    return lt2_workflows.__file__


@step_type(RemoteStep)
def remote(config: RemoteStep, context) -> dict[str, str]:
    join_ray()
    Path(config.trace, "attempt").write_text(str(os.getpid()))
    task = work.remote(config.trace, config.pause_s)
    while not ray.wait([task], timeout=0.5)[0]:
        context.progress({"step": 1, "steps": 4})
    worker = ray.get(task)
    if config.source is not None:
        Path(config.source).read_bytes()
    if config.code is not None:
        raise ValueError(f"asked to fail with {config.code}")
    return {"attempt": lt2_workflows.__file__, "worker": worker}


def one() -> Workflow:
    return Workflow("one", {"only": RemoteStep()})


def swept() -> Workflow:
    """One trial of a sweep over `one`."""
    from lt2_workflows.sweeps import SweepStep

    return Workflow("swept", {"only": SweepStep(steps=one().record()["steps"], grid={"only.pause_s": (0.0,)})})


def training() -> Workflow:
    """A tiny model that trains until it is stopped, on the dataset given with --set."""
    from lt2.train.config import TrainConfig
    from lt2_platform.train.config import PretrainModel
    from lt2_workflows.steps import PretrainStep

    model = {
        "dim": 16,
        "n_layers": 1,
        "n_loops": 1,
        "num_heads": 2,
        "layout": {"type": "uniform", "mixer": {"type": "full"}},
    }
    train = TrainConfig(steps=1_000_000, global_batch_size=8, warmup_steps=1, lr=1e-3, checkpoint_every=None)
    step = PretrainStep(data="unset", model=PretrainModel.model_validate(model), train=train)
    return Workflow("training", {"train": step})
