"""The step that averages checkpoints: what it needs is checked before the run it waits for has trained."""

from __future__ import annotations

from types import SimpleNamespace

import pytest

from lt2.config import ConfigError, ModelConfig
from lt2_platform.results.store import ResultsStore
from lt2_platform.storage import Storage
from lt2_workflows.engine.context import StepContext
from lt2_workflows.loading import workflow_from_record
from lt2_workflows.plan import describe_plan
from lt2_workflows.provenance import log_evaluations, log_model
from lt2_workflows.steps.average import check_enough, run_average
from lt2_workflows.steps.distill import planned_checkpoint
from lt2_workflows.steps.pretrain import check_fit
from lt2_workflows.steps.refs import CheckpointRef

MODEL = {"dim": 16, "n_layers": 2, "num_heads": 2, "layout": {"type": "uniform", "mixer": {"type": "full"}}}


def workflow(last=3, more=(), **train):
    train = {"steps": 100, "global_batch_size": 2, "lr": 1e-3, "warmup_steps": 1, **train}
    steps = {
        "prepare": {"type": "prepare"},
        "pretrain": {"type": "pretrain", "data": {"step": "prepare"}, "model": MODEL, "train": train},
        "average": {"type": "average", "checkpoint": {"step": "pretrain"}, "last": last},
    }
    return workflow_from_record({"workflow": "w", "steps": steps | dict(more)}, source="test")


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


def test_a_run_that_goes_on_leaves_the_checkpoints_of_its_own_steps(tmp_path):
    longer = {"steps": 100, "global_batch_size": 2, "lr": 1e-3, "checkpoint_every": 10, "keep_checkpoints": 9}
    step = {"type": "pretrain", "data": {"step": "prepare"}, "continue_from": {"step": "pretrain"}, "model": MODEL}
    more = {"longer": step | {"train": longer}, "average": {"type": "average", "checkpoint": {"step": "longer"}}}
    context = context_of(tmp_path, more=more, steps=60)  # last=5; steps 70, 80, 90 and 100
    with pytest.raises(ConfigError, match="last 5: step longer will keep 4 of its checkpoints"):
        check_enough(context.step.config, context)


def test_a_run_that_would_go_on_from_an_average_is_told_before_there_is_one(tmp_path):
    step = {"type": "pretrain", "data": {"step": "prepare"}, "continue_from": {"step": "average"}, "model": MODEL}
    train = {"steps": 200, "global_batch_size": 2, "lr": 1e-3}
    found = workflow(more={"longer": step | {"train": train}}, checkpoint_every=10, keep_checkpoints=3)
    context = StepContext(Storage(str(tmp_path)), found, found.steps["longer"])
    with pytest.raises(ConfigError, match="continue_from: step average makes weights only; use `start` to take them"):
        check_fit(context.step.config, context)


def test_what_has_one_checkpoint_is_not_averaged(tmp_path):
    more = {
        "base": {"type": "import_model", "folder": "x"},
        "average": {"type": "average", "checkpoint": {"step": "base"}},
    }
    context = context_of(tmp_path, more=more)
    with pytest.raises(ConfigError, match="checkpoint: step base makes one checkpoint; average those of a run"):
        check_enough(context.step.config, context)


def test_an_average_has_the_settings_of_its_run_in_the_store(tmp_path, monkeypatch):
    info = SimpleNamespace(
        model=ModelConfig(vocab_size=9, n_loops=1, **MODEL),
        train={"seed": 1, "averaged": [80, 100]},
        sources={"averaged": "abc"},
    )
    monkeypatch.setattr("lt2_platform.train.checkpoints.averaging.store_average", lambda *of, **how: {"step": 100})
    monkeypatch.setattr("lt2_platform.train.checkpoints.checkpoint.resolve", str)
    monkeypatch.setattr("lt2_platform.train.checkpoints.checkpoint.read_info", lambda place: info)
    context = context_of(tmp_path)
    data = {"fingerprint": "0123456789ab", "seq_len": 64}
    log_model(context.storage, context.workflow.steps["pretrain"].id, {"data": data, "train": {"seed": 1}})
    assert run_average(context.step.config, context) == {"run": context.run_id, "step": 100}
    run = ResultsStore(context.storage).run(context.run_id)
    assert not run.elsewhere
    assert (run.config["train"], run.config["sources"]) == (info.train, info.sources)
    assert (run.config["data"], run.info["workflow"]) == (data, context.workflow.id)
    log_evaluations(context.storage, context.run_id, "its checkpoint", {})  # keeps them
    assert "evaluated" not in ResultsStore(context.storage).run(context.run_id).config
