"""The step that averages checkpoints: what it needs is checked before the run it waits for has trained."""

from __future__ import annotations

import pytest

from lt2.config import ConfigError
from lt2_platform.storage import Storage
from lt2_workflows.engine.context import StepContext
from lt2_workflows.loading import workflow_from_record
from lt2_workflows.plan import describe_plan
from lt2_workflows.steps.average import check_enough
from lt2_workflows.steps.distill import planned_checkpoint
from lt2_workflows.steps.refs import CheckpointRef

MODEL = {"dim": 16, "n_layers": 2, "num_heads": 2, "layout": {"type": "uniform", "mixer": {"type": "full"}}}


def workflow(last=3, **train):
    train = {"steps": 100, "global_batch_size": 2, "lr": 1e-3, "warmup_steps": 1, **train}
    steps = {
        "prepare": {"type": "prepare"},
        "pretrain": {"type": "pretrain", "data": {"step": "prepare"}, "model": MODEL, "train": train},
        "average": {"type": "average", "checkpoint": {"step": "pretrain"}, "last": last},
    }
    return workflow_from_record({"workflow": "w", "steps": steps}, source="test")


def context_of(tmp_path, **fields) -> StepContext:
    found = workflow(**fields)
    return StepContext(Storage(str(tmp_path)), found, found.steps["average"], lambda values: None)


@pytest.mark.parametrize(
    ("kept", "train"),
    [
        (1, {"keep_checkpoints": 5}),  # no checkpoint but the last
        (2, {"checkpoint_every": 10}),
        (5, {"checkpoint_every": 10, "keep_checkpoints": 5}),
        (4, {"checkpoint_every": 30, "keep_checkpoints": 9}),  # of steps 30, 60, 90 and 100
        (4, {"checkpoint_every": 10, "keep_checkpoints": 2, "keep_every": 40}),  # 40, 80, 90, 100
    ],
)
def test_a_run_that_will_keep_too_few_checkpoints_is_named_before_it_trains(tmp_path, kept, train):
    context = context_of(tmp_path, last=max(kept, 2), **train)
    if kept > 1:
        check_enough(context.step.config, context)
    context = context_of(tmp_path, last=kept + 1, **train)
    with pytest.raises(
        ConfigError, match=f"last {kept + 1}: step pretrain will keep {kept} of its checkpoints; set its"
    ):
        check_enough(context.step.config, context)


def test_a_mean_is_planned_as_the_model_it_is_of(tmp_path):
    context = context_of(tmp_path, checkpoint_every=10, keep_checkpoints=3)
    assert "mean of the last 3 checkpoints" in describe_plan(context.workflow, context.storage)
    model = planned_checkpoint(CheckpointRef(step="average"), context)
    assert model == planned_checkpoint(CheckpointRef(step="pretrain"), context)
    assert model is not None
