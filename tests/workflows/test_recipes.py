"""Every shipped recipe builds, replays from its record, and can be planned at its size."""

from __future__ import annotations

import json

import pytest

from lt2_platform.storage import Storage
from lt2_workflows.loading import load_workflow, shipped_recipes
from lt2_workflows.plan import describe_plan


def test_quickstart_is_shipped():
    assert "quickstart" in shipped_recipes()


@pytest.mark.parametrize("name", sorted(shipped_recipes()))
def test_recipe(name, tmp_path):
    workflow = load_workflow(name)
    record = tmp_path / "record.json"
    record.write_text(json.dumps(workflow.record()))
    assert load_workflow(str(record)).id == workflow.id
    assert shipped_recipes()[name].__doc__
    plan = describe_plan(workflow, Storage(str(tmp_path / "storage")))
    assert all(step.id in plan for step in workflow.steps.values())
    assert not (tmp_path / "storage").exists()


def test_quickstart_plan_names_parameters_tokens_and_flops(tmp_path):
    plan = describe_plan(load_workflow("quickstart", ["pretrain.train.steps=1000"]), Storage(str(tmp_path)))
    line = next(line for line in plan.splitlines() if "parameters" in line)
    assert "1,000 steps, 4.1M tokens" in line
    assert "FLOPs" in line


def test_the_models_vocabulary_follows_the_tokenizer(tmp_path):
    small = describe_plan(load_workflow("quickstart"), Storage(str(tmp_path)))
    vocabulary = {f"token{i}": i for i in range(5000)} | {"</s>": 5000}
    tokenizer = tmp_path / "tokenizer.json"
    tokenizer.write_text(
        json.dumps({"version": "1.0", "model": {"type": "WordLevel", "vocab": vocabulary, "unk_token": "token0"}})
    )
    large = describe_plan(load_workflow("quickstart", [f"prepare.tokenizer={tokenizer}"]), Storage(str(tmp_path)))
    assert parameters(large) > parameters(small) + 2 * 96 * 4500


def parameters(plan: str) -> float:
    text = next(line for line in plan.splitlines() if "parameters" in line).split()[0]
    return float(text[:-1]) * {"k": 1e3, "M": 1e6}[text[-1]]
