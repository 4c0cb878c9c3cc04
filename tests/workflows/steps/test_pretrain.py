"""The step that pretrains, where it goes on from another."""

import pytest

from lt2.config import ConfigError
from lt2_platform.data.stream import load_manifest
from lt2_platform.storage import Storage
from lt2_platform.train.on_ray import trainer
from lt2_platform.wording import amount
from lt2_workflows.engine.context import StepContext
from lt2_workflows.inputs import conflicts
from lt2_workflows.loading import workflow_from_record
from lt2_workflows.plan import planned_training
from lt2_workflows.steps import pretrain
from lt2_workflows.steps.pretrain import check_fit, describe_pretrain, run_pretrain
from lt2_workflows.training import Training, flops_per_token
from tests.platform.train.packed import MODEL, train_config, write_dataset
from tests.platform.train.test_worker import losses
from tests.workflows.steps.test_distill import finish, in_this_process

CONSTANT, COOL = {"type": "constant"}, {"type": "wsd", "decay_steps": 2}


def train(**fields):
    return train_config(checkpoint_every=2, **fields).model_dump(mode="json")


def budgets(data, cool=None):
    """A trunk at a constant rate, and a run that goes on from its end."""
    step = {"type": "pretrain", "data": data, "model": MODEL}
    return {
        "trunk": step | {"train": train(steps=4, schedule=CONSTANT)},
        "cool": step | {"train": train(schedule=COOL), "continue_from": {"step": "trunk"}} | (cool or {}),
    }


def context_of(root, steps, name):
    workflow = workflow_from_record({"workflow": "w", "steps": steps}, source="test")
    return StepContext(Storage(str(root)), workflow, workflow.steps[name], lambda values: None)


@pytest.fixture
def data(tmp_path):
    return write_dataset(tmp_path / "data")


def test_a_run_goes_on_from_a_step_to_a_length_of_its_own(tmp_path, data, monkeypatch):
    monkeypatch.setattr(trainer, "pretrain", in_this_process)
    monkeypatch.setattr(pretrain, "join_ray", dict)
    steps = budgets(data) | {"whole": {"type": "pretrain", "data": data, "model": MODEL, "train": train(schedule=COOL)}}
    contexts = {name: context_of(tmp_path / "storage", steps, name) for name in steps}
    results = {name: run_pretrain(each.step.config, each) for name, each in contexts.items()}
    assert (results["cool"]["step"], results["cool"]["tokens"]) == (6, results["whole"]["tokens"])
    curves = {name: losses(tmp_path / "storage", each.run_id) for name, each in contexts.items()}
    assert curves["trunk"] | curves["cool"] == curves["whole"]

    finish(contexts["cool"], {"trunk": {}})
    check_fit(contexts["cool"].step.config, contexts["cool"])
    short = context_of(tmp_path / "storage", steps | budgets(data, {"train": train(steps=4, schedule=COOL)}), "cool")
    with pytest.raises(ConfigError, match=r"continue_from: .*/step-00000004 has 4 steps already; raise train.steps"):
        check_fit(short.step.config, short)


def test_a_plan_counts_what_is_left(tmp_path, data):
    context = context_of(tmp_path / "storage", budgets(data), "cool")
    text = describe_pretrain(context.step.config, context)
    assert ", 2 steps, 192 tokens (1.2 epochs in all), " in text  # of 40 rows, in 6 steps of 8
    once = context_of(tmp_path / "storage", budgets(data), "trunk")
    assert "epoch" not in describe_pretrain(once.step.config, once)
    assert text.endswith(", after step 4 of trunk")
    planned = planned_training(context.step.config, context)
    assert isinstance(planned, Training)
    assert planned.done == 4


@pytest.mark.parametrize(
    ("cool", "message"),
    [
        ({}, None),
        ({"train": train(steps=4)}, "step trunk has 4 steps already; raise train.steps beyond that"),
        ({"train": train(seed=6)}, "step trunk was trained with train.seed 5; set that, or use `start`"),
        ({"model": MODEL | {"rope_theta": 5e5}}, "step trunk: model differs in rope_theta; use `start`"),
        ({"data": "other"}, "step trunk was trained on another dataset"),
    ],
)
def test_what_cannot_go_on_is_told_before_anything_runs(tmp_path, data, cool, message):
    write_dataset(tmp_path / "other")
    if "data" in cool:
        cool = {"data": str(tmp_path / "other")}
    context = context_of(tmp_path / "storage", budgets(data, cool), "cool")
    found = conflicts(context.workflow, context.storage, [context.step])
    if message is None:
        assert found == []
    else:
        (line,) = found
        assert line.startswith(f"cool: continue_from: {message}")


def test_weights_alone_or_everything(data):
    with pytest.raises(ConfigError, match=r"give start .* or continue_from .*, not both"):
        context_of("unused", budgets(data, {"start": data}), "cool")


def test_the_plan_has_the_flops_of_the_objective(tmp_path, data):
    gated = {
        "model": MODEL | {"halting": {"type": "exit_gate"}},
        "train": train(steps=4, objective={"type": "exit_gate"}),
    }
    steps = {"gated": {"type": "pretrain", "data": data} | gated}
    context = context_of(tmp_path / "storage", steps, "gated")
    run = planned_training(context.step.config, context)
    tokens = run.train.steps * run.train.global_batch_size * run.seq_len
    assert f", {amount(tokens * flops_per_token(run, 'none'))} FLOPs" in describe_pretrain(context.step.config, context)


def test_the_plan_says_what_a_model_does_that_its_name_does_not(tmp_path, data):
    def plan(window, **changes):
        layout = {"type": "uniform", "mixer": {"type": "window", "window": window}}
        model = MODEL | {"layout": layout, "halting": {"type": "exit_gate"}}
        steps = {"one": {"type": "pretrain", "data": data, "model": model, "train": train(steps=4, **changes)}}
        context = context_of(tmp_path / "storage", steps, "one")
        return describe_pretrain(context.step.config, context)

    seq_len = load_manifest(data)["seq_len"]
    assert f"; WINDOWS OF {seq_len} SEE WHOLE ROWS of {seq_len}, as full" in plan(seq_len)
    assert "; objective 'next_token' DOES NOT TRAIN THE EXIT GATE; train.objective.type=exit_gate does" in plan(seq_len)
    assert ";" not in plan(seq_len - 1, objective={"type": "exit_gate"})
