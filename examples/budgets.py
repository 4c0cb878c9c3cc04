"""A recipe: one training at a constant rate, and models of several budgets that cool down from it.

    lt2 run examples/budgets.py:budgets
    lt2 results budgets --metric 'validation*'

Models of 120, 240 and 480 steps take 440 + 3 x 40 steps in all, not 840.
"""

from __future__ import annotations

from lt2.config import HybridLayout
from lt2.mixer_configs import FullConfig, GatedDeltaNetConfig
from lt2.train.config import TrainConfig
from lt2.train.schedules import AnySchedule, ConstantSchedule, WSDSchedule
from lt2_platform.train.config import PretrainModel
from lt2_workflows.graph import StepConfig, Workflow
from lt2_workflows.steps import CheckpointRef, DatasetRef, PrepareStep, PretrainStep

BUDGETS, COOL = (120, 240, 480), 40  # steps of each model, and how many of them cool down
MODEL = PretrainModel(
    dim=96,
    n_layers=5,
    n_loops=4,
    num_heads=2,
    layout=HybridLayout(attention=FullConfig(), mixer=GatedDeltaNetConfig(), ratio="1:4"),
)


def training(steps: int, schedule: AnySchedule, before: str | None) -> PretrainStep:
    return PretrainStep(
        data=DatasetRef(step="prepare"),
        model=MODEL,
        continue_from=None if before is None else CheckpointRef(step=before),
        train=TrainConfig(
            steps=steps, global_batch_size=16, lr=3e-3, warmup_steps=20, schedule=schedule, eval_every=COOL
        ),
    )


def budgets() -> Workflow:
    """A trunk in pieces, each of which goes on from the one before, and a cool-down from the end of each."""
    steps: dict[str, StepConfig] = {
        "prepare": PrepareStep(source="python-stdlib", seq_len=256, validation_fraction=0.02)
    }
    before = None
    for budget in BUDGETS:
        trunk = f"to-{budget - COOL}"
        steps[trunk] = training(budget - COOL, ConstantSchedule(), before)
        steps[f"{budget}-cool"] = training(budget, WSDSchedule(decay_steps=COOL), trunk)
        before = trunk
    return Workflow("budgets", steps)
