"""Every shipped recipe builds, replays from its record, and can be planned at its size."""

from __future__ import annotations

import json

import pytest

from lt2.config import ConfigError
from lt2_platform.evaluate.harness.tasks.suites import UPSTREAM
from lt2_platform.storage import Storage
from lt2_workflows.loading import load_workflow, shipped_recipes
from lt2_workflows.plan import describe_plan
from lt2_workflows.recipes.models import ROWS


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


@pytest.mark.parametrize("row", sorted(ROWS))
def test_every_row_of_the_main_table_plans_at_its_scale(row, tmp_path):
    plan = describe_plan(load_workflow(f"pretrain_06b:{row}"), Storage(str(tmp_path)))
    line = next(line for line in plan.splitlines() if "parameters" in line)
    assert "255,000 steps, 100.3B tokens" in line or "255,000 steps, 100B tokens" in line, line


def test_the_papers_hyper_parameters():
    train = load_workflow("pretrain_13b:gdn+dsa").configs["pretrain"].train
    assert (train.lr, train.warmup_steps, train.weight_decay, train.betas) == (3e-4, 10_000, 0.1, (0.9, 0.95))
    assert (train.seed, train.init_seed, train.min_lr_ratio, train.grad_clip) == (777, 42, 1e-6, 1.0)
    assert not train.compile  # DSA's selection breaks graphs
    assert load_workflow("pretrain_06b").configs["pretrain"].train.lr == 1.5e-4


def test_upcycle_takes_any_model_that_can_be_imported(tmp_path):
    sizes = {"hidden_size": 16, "intermediate_size": 24, "num_hidden_layers": 8, "num_attention_heads": 4}
    about = {"model_type": "qwen3", "vocab_size": 300, "head_dim": 8, "max_position_embeddings": 4096}
    (tmp_path / "config.json").write_text(json.dumps(sizes | about))
    workflow = load_workflow(f"upcycle:{tmp_path}", ["prepare.tokenizer=byte", "prepare.source=python-stdlib"])
    looped, hybrid = (workflow.configs[name] for name in ("looped", "hybrid"))
    assert (looped.model.n_loops, looped.model.layout.mixer.qk_norm, looped.model.vocab_size) == (4, True, 300)
    assert hybrid.kept == (3, 7)
    assert workflow.configs["align"].mixer.head_dim == 8
    plan = describe_plan(workflow, Storage(str(tmp_path / "storage")))
    assert f"{tmp_path} -> a checkpoint of 35.6k parameters in fp32" in plan
    windows = {"use_sliding_window": True, "sliding_window": 512, "max_window_layers": 0}
    (tmp_path / "config.json").write_text(json.dumps(sizes | about | windows))
    looped = load_workflow(f"upcycle:{tmp_path}").configs["looped"]
    assert (looped.model.layout.mixer.type, looped.model.layout.mixer.window) == ("window", 512)
    (tmp_path / "config.json").write_text(json.dumps(sizes | about | windows | {"max_window_layers": 4}))
    with pytest.raises(ConfigError, match="has a model with windows in some of its layers; only one with the same"):
        load_workflow(f"upcycle:{tmp_path}")
    with pytest.raises(ConfigError, match="nowhere has no config.json; give the folder of a model, as in upcycle:"):
        load_workflow("upcycle:nowhere")
    (tmp_path / "config.json").write_text(json.dumps(sizes | about | {"model_type": "ouro"}))
    with pytest.raises(ConfigError, match="has a model that is looped already; distil from it as distill_ouro_14b"):
        load_workflow(f"upcycle:{tmp_path}")


def test_upcycle_plans_for_a_model_that_is_not_there_yet(tmp_path):
    plan = describe_plan(load_workflow("upcycle"), Storage(str(tmp_path)))
    assert "SmolLM2-135M -> a checkpoint of 135M parameters in fp32" in plan
    assert "distill, 1,700 steps, 891M tokens in rows of 2,048; attention kept in [3, 7, 11, 16, 20, 24, 29]" in plan
    assert "perplexity; each at 1 loop\n" in plan


@pytest.mark.parametrize(
    ("recipe", "stages"),
    [
        ("distill_ouro_14b", ("align", "stage2", "stage3")),
        ("paper_end_to_end", ("align", "distill", "long-context")),
    ],
)
def test_distillation_has_the_papers_sizes(recipe, stages):
    configs = load_workflow(recipe).configs
    lengths = [configs[configs[stage].data.step].seq_len for stage in stages]
    assert lengths == [512, 4096, 32_768]
    trained = [configs[stage].train for stage in stages]
    tokens = [length * train.steps * train.global_batch_size for length, train in zip(lengths, trained)]
    assert tokens == [pytest.approx(size, rel=0.001) for size in (100e6, 600e6, 600e6)]
    assert configs["select"].count / configs["select"].n_layers == 0.25


@pytest.mark.parametrize(
    ("recipe", "step"),
    [
        ("pretrain_06b", "evaluate-tasks"),
        ("pretrain_13b:gdn", "evaluate-tasks"),
        ("paper_end_to_end", "evaluate-extend"),
    ],
)
def test_what_is_trained_from_scratch_is_asked_all_columns_of_the_papers_tables(recipe, step):
    tasks = [task for task in load_workflow(recipe).configs[step].tasks if task.type == "harness"]
    assert {"core", "recall", "needles"} <= {task.suite for task in tasks}
    assert {task.pack for task in tasks} == {"packs/paper"}
    window = {UPSTREAM[name].window for name in ("swde", "fda", "squad_completion")}
    assert window == {2048}


def test_a_plan_says_what_is_asked_and_that_the_pack_is_not_there(tmp_path):
    plan = describe_plan(load_workflow("pretrain_13b"), Storage(str(tmp_path)))
    asked, missing = plan.split("NOT FOUND")
    assert "  perplexity; throughput; diagnostics\n" in asked
    assert "  core, recall, needles from packs/paper\n" in asked
    deeper = describe_plan(load_workflow("quickstart", ["evaluate.loops=[1, 8]"]), Storage(str(tmp_path)))
    assert "  perplexity; throughput; diagnostics; each at 1, 8 loops\n" in deeper
    fields = ", ".join(f"evaluate-tasks.tasks.{i}.pack" for i in range(3))
    assert f"  {fields}: " in missing


def test_a_plan_says_what_ratio_a_hybrid_of_few_layers_has(tmp_path):
    twenty = ["pretrain.model.n_layers=20", "pretrain.model.layout.ratio=1:6"]
    plan = describe_plan(load_workflow("quickstart", twenty), Storage(str(tmp_path)))
    assert "full in 2 of 20 layers (1:9 for 1:6)," in plan
    assert "full in 1 of 5 layers," in describe_plan(load_workflow("quickstart"), Storage(str(tmp_path)))
    assert "dsa in 4 of 20 layers," in describe_plan(load_workflow("pretrain_13b:gdn+dsa"), Storage(str(tmp_path)))


def test_a_recipes_argument_is_checked():
    with pytest.raises(ConfigError, match="unknown row 'gnd' of the main table"):
        load_workflow("pretrain_06b:gnd")
    with pytest.raises(ConfigError, match="quickstart takes no argument"):
        load_workflow("quickstart:gdn")
