"""Memory and hours of a run on given cards, as `lt2 plan --card` prints them."""

import re
from dataclasses import replace

import pytest
from typer.testing import CliRunner

from lt2.analysis.accounting import CARD_BYTES, find_card, forward_flops, mixer_flops, training_flops, warmup_flops
from lt2.config import ConfigError, KeptLayout, ModelConfig
from lt2.memory import OUTSIDE, plan_memory
from lt2.train.config import TrainConfig
from lt2_platform.storage import Storage
from lt2_workflows.cli import app
from lt2_workflows.cost import Hardware, describe_cost
from lt2_workflows.engine.context import StepContext
from lt2_workflows.loading import load_workflow
from lt2_workflows.plan import describe_costs, planned_training
from lt2_workflows.training import Training, flops_per_token

LAYOUT = {"type": "hybrid", "attention": {"type": "full"}, "mixer": {"type": "gdn"}, "ratio": "1:1"}
MODEL = {"vocab_size": 32_000, "dim": 1024, "n_layers": 4, "n_loops": 4, "num_heads": 8, "layout": LAYOUT}
TRAIN = {"steps": 1000, "global_batch_size": 64, "micro_batch_size": 4, "activation_checkpoint": True}
L = 2048


@pytest.fixture(scope="module")
def described():
    """`describe_cost` of these models; what is the same in them is traced once."""
    known = {}

    def describe(model=None, train=None, **hardware):
        config = ModelConfig.model_validate(MODEL | (model or {}))
        settings = TrainConfig.model_validate(TRAIN | (train or {}))
        return describe_cost(Training(config, settings, L), Hardware(**{"card": "h100", "count": 8} | hardware), known)

    return describe


def test_the_tables_add_up(described):
    text = described()
    line = "8 x H100 of 80 GB: 8 sequences of 2,048 tokens each per step, 4 at a time, gathered weights kept\n"
    assert text.startswith(line)
    *parts, total = re.findall(r"(\d+\.\d\d)$", text[: text.index("recomputation")], re.MULTILINE)
    assert sum(map(float, parts)) == pytest.approx(float(total), abs=0.05)
    assert f"block (this run)  {total}" in text
    assert "DOES NOT FIT" not in text
    rows = re.findall(r"^(none|selective|block|loop)\b.*?(\d+\.\d\d) ", text, re.MULTILINE)
    assert [name for name, _ in rows] == ["none", "selective", "block", "loop"]
    sizes = [float(size) for _, size in rows]
    assert sizes == sorted(sizes, reverse=True)


def test_hours_follow_from_flops_cards_and_utilisation(described):
    config = ModelConfig.model_validate(MODEL)
    run = Training(config, TrainConfig.model_validate(TRAIN), L)
    tokens, flops = 1000 * 64 * L, flops_per_token(run, "block")
    hours = tokens * flops / (8 * 989e12 * 0.5) / 3600
    assert re.search(rf"block \(this run\).* {hours:.2f}$", described(utilisation=0.5), re.MULTILINE)
    blocks = forward_flops(config, L) - 2 * config.vocab_size * config.dim
    assert flops_per_token(run, "none") == training_flops(config, L)
    assert flops - training_flops(config, L) == pytest.approx(blocks)
    recurrences = 4 * 2 * config.layout.mixer.sequence_flops(config.dims, L)
    assert flops_per_token(run, "selective") - training_flops(config, L) == pytest.approx(recurrences)
    assert flops_per_token(run, "loop") - training_flops(config, L) == pytest.approx(2 * blocks)


def test_an_exit_gate_is_trained_by_a_head_after_every_loop():
    gated = ModelConfig.model_validate(MODEL | {"halting": {"type": "exit_gate"}})
    train = TrainConfig.model_validate(TRAIN | {"objective": {"type": "exit_gate"}})
    heads = 3 * 4 * 2 * gated.vocab_size * gated.dim
    blocks = training_flops(gated, L) - heads / 4
    assert flops_per_token(Training(gated, train, L), "none") == pytest.approx(blocks + heads)


def test_steps_of_several_depths_cost_their_mean():
    model = ModelConfig.model_validate(MODEL)
    train = TrainConfig.model_validate(TRAIN | {"objective": {"type": "next_token", "loops": [1, 4]}})
    ends = [model.model_copy(update={"n_loops": n_loops}) for n_loops in (1, 4)]
    plain = TrainConfig.model_validate(TRAIN)
    for recompute in ("none", "selective", "block", "loop"):
        each = [flops_per_token(Training(end, plain, L), recompute) for end in ends]
        assert flops_per_token(Training(model, train, L), recompute) == pytest.approx(sum(each) / 2)


def test_dense_steps_of_dsa_count_where_they_are_still_to_be_made():
    layout = {"type": "uniform", "mixer": {"type": "dsa", "top_k": 16, "warmup_steps": 400}}
    model, train = ModelConfig.model_validate(MODEL | {"layout": layout}), TrainConfig.model_validate(TRAIN)
    more, forwards = warmup_flops(model, train.objective, L)[400], {"none": 3, "selective": 3, "block": 4, "loop": 5}
    sparse = {name: flops_per_token(Training(model, train, L, done=400), name) for name in forwards}
    assert sparse["none"] == training_flops(model, L)
    for name, forward in forwards.items():
        whole, half = (flops_per_token(Training(model, train, L, done=done), name) for done in (0, 200))
        assert whole - sparse[name] == pytest.approx(forward * more * 400 / 1000)
        assert half - sparse[name] == pytest.approx(forward * more * 200 / 800)


def test_hours_of_a_run_in_fp32_are_said_to_be_too_few(described):
    assert "THE PEAK IS FOR BF16" in described(train={"precision": "fp32"})
    assert "THE PEAK" not in described()


def test_what_does_not_fit_names_what_would(described):
    long = {"global_batch_size": 512, "micro_batch_size": None, "activation_checkpoint": False}
    assert "DOES NOT FIT with recomputation 'none'; it does with train.activation_checkpoint=" in described(train=long)
    small = {"card": "l4", "count": 1}
    advice = described(train={"global_batch_size": 256, "micro_batch_size": None}, **small).splitlines()[-1]
    assert re.fullmatch(
        r"DOES NOT FIT; it does with train.activation_checkpoint=loop and train.micro_batch_size=\d+", advice
    )
    never = described(
        model={"dim": 8192, "num_heads": 64}, train={"global_batch_size": 2, "micro_batch_size": 2}, **small
    )
    assert never.endswith("DOES NOT FIT on these cards with any recomputation, even one sequence at a time; "
                          "use more or larger cards")  # fmt: skip


def test_what_lies_outside_torch_counts_and_steps_that_are_done_do_not(monkeypatch):
    model = ModelConfig.model_validate(MODEL | {"layout": {"type": "uniform", "mixer": {"type": "full"}}})
    run, known = Training(model, TrainConfig.model_validate(TRAIN), L), {}
    needed = plan_memory(model, run.train, L, workers=1, known=known).total + OUTSIDE
    for size, answer in ((needed, "yes"), (needed - 1, "NO")):
        monkeypatch.setitem(CARD_BYTES, "L4", size)
        text = describe_cost(run, Hardware("l4"), known)
        assert re.search(rf"^block \(this run\) +[\d.]+ +{answer} ", text, re.MULTILINE)
        assert ("DOES NOT FIT" in text) == (answer == "NO")
        assert "gathered weights kept" not in text
    whole, half = (
        float(re.search(r"^block .* ([\d.,]+)$", describe_cost(each, Hardware("l4"), known), re.MULTILINE)[1])
        for each in (run, replace(run, done=500))
    )
    assert half == pytest.approx(whole / 2, abs=0.01)


def test_weights_that_are_gathered_for_each_use_are_advised_where_kept_ones_leave_no_room(monkeypatch):
    model = ModelConfig.model_validate(MODEL | {"n_loops": 1, "layout": {"type": "uniform", "mixer": {"type": "full"}}})
    train = TrainConfig.model_validate(TRAIN | {"micro_batch_size": 1, "compile": True})
    run, known = Training(model, train, 64), {}
    kept = [
        plan_memory(model, train.model_copy(update={"activation_checkpoint": name}), 64, workers=8, known=known).total
        for name in ("none", "block", "loop")
    ]
    monkeypatch.setitem(CARD_BYTES, "L4", OUTSIDE + min(kept) - 1)
    advice = describe_cost(run, Hardware("l4", 8), known).splitlines()[-1]
    assert advice == "DOES NOT FIT; it does with train.activation_checkpoint=none and train.keep_gathered=false"
    freed = replace(run, train=train.model_copy(update={"keep_gathered": False}))
    text = describe_cost(freed, Hardware("l4", 8), known)
    assert "gathered weights freed after each use\n" in text
    assert "DOES NOT FIT" not in text
    monkeypatch.setitem(CARD_BYTES, "L4", OUTSIDE)
    assert describe_cost(freed, Hardware("l4", 8), known).endswith("use more or larger cards")


def test_policies_that_a_run_cannot_have_are_left_out(described):
    assert "\nloop" not in described(
        model={"halting": {"type": "act"}, "layout": {"type": "uniform", "mixer": {"type": "full"}}}
    )
    assert "\nselective" not in described(train={"compile": True})


def test_bad_requests_are_named(described):
    with pytest.raises(ConfigError, match="unknown card 'h10'; choose one of B200, H200, H100 PCIe"):
        described(card="h10")
    with pytest.raises(ConfigError, match="64 is not divisible by 7 cards; plan with --count 4 or 8, or set"):
        described(count=7)
    with pytest.raises(ConfigError, match="4 is not divisible by 8 cards; plan with --count 4, or set"):
        described(train={"global_batch_size": 4})
    with pytest.raises(ConfigError, match="shard_workers 8 does not divide 12 workers"):
        described(train={"global_batch_size": 60, "shard_workers": 8}, count=12)
    assert find_card("h100 pcie") == "H100 PCIe"


def test_lt2_plan_prints_the_cost_of_a_recipe_on_a_card(tmp_path):
    options = ["--storage", str(tmp_path), "--card", "l4", "--count", "1"]
    done = CliRunner().invoke(app, ["plan", "quickstart", *options])
    assert done.exit_code == 0, done.output
    assert "pretrain on 1 x L4 of 24 GB" in done.output
    assert "hours" in done.output
    assert not list(tmp_path.iterdir())
    elsewhere = CliRunner().invoke(app, ["plan", "quickstart", *options, "--set", "pretrain.data=/nowhere"])
    assert elsewhere.exit_code == 0, elsewhere.output
    assert "\npretrain: not known: /nowhere is not a finished dataset" in elsewhere.output
    nothing = CliRunner().invoke(app, ["plan", "state_recall", *options])
    assert nothing.output.strip().endswith("has no step of type pretrain or distill, the ones that --card is for")


def test_a_stage_of_distillation_costs_its_teacher_too():
    teacher = ModelConfig.model_validate(MODEL | {"layout": {"type": "uniform", "mixer": {"type": "full"}}})
    kept = {"type": "kept", "attention": {"type": "full"}, "mixer": {"type": "gdn"}, "kept": [3]}
    student = teacher.model_copy(update={"layout": KeptLayout.model_validate(kept)})
    both = teacher.model_copy(update={"layout": KeptLayout.model_validate(kept | {"both": True})})
    head, T = 2 * teacher.vocab_size * teacher.dim, teacher.n_loops

    def run(model, asked=None, **objective):
        return Training(model, TrainConfig.model_validate(TRAIN | {"objective": objective}), L, asked)

    second = run(student, teacher, type="distill", supervision="uniform")
    assert flops_per_token(second, "none") == pytest.approx(
        3 * forward_flops(student, L) + forward_flops(teacher, L) + 4 * (T - 1) * head
    )
    final = run(student, teacher, type="distill", supervision="final")
    assert flops_per_token(final, "none") == pytest.approx(3 * forward_flops(student, L) + forward_flops(teacher, L))
    stored = run(student, type="distill", supervision="final")
    assert flops_per_token(stored, "none") == pytest.approx(training_flops(student, L))
    # Everything of the teacher but its head forward, and three new mixers of four forward and backward, without
    # gradients of what their q, k, v, gate, and two numbers per head are made of.
    mixers = sum(sum(row[:3]) for row in mixer_flops(student, L))
    inputs = T * 3 * 2 * teacher.dim * (4 * teacher.dim + 2 * teacher.num_heads)
    first = run(both, type="align")
    assert flops_per_token(first, "none") == pytest.approx(forward_flops(teacher, L) - head + 3 * mixers - inputs)
    texts = [describe_cost(each, Hardware("h100", 8), {}) for each in (second, stored)]
    assert ["the teacher's weights" in text for text in texts] == [True, False]


def test_stages_are_planned_where_their_teacher_is_known(tmp_path, monkeypatch):
    options = ["--storage", str(tmp_path), "--card", "h100", "--count", "1"]
    done = CliRunner().invoke(app, ["plan", "distill_small", *options])
    assert done.exit_code == 0, done.output
    for name in ("teacher", "align", r"stage2[\w-]*", "stage3"):
        assert re.search(rf"^{name} on 1 x H100", done.output, re.MULTILINE)
    assert re.search(r"^probe-3: as stage2[\w-]*$", done.output, re.MULTILINE)
    monkeypatch.setattr("lt2_workflows.cost.describe_cost", lambda run, hardware, known: "what it was above")
    unknown = ["plan", "distill_small", *options, "--set", f"align.teacher={tmp_path}/later"]
    done = CliRunner().invoke(app, unknown)
    assert done.exit_code == 0, done.output
    assert f"\nalign: not known before the teacher, {tmp_path}/later, is there" in done.output


def test_cards_are_the_workers_own_and_a_stored_top_k_needs_no_teacher(tmp_path, monkeypatch):
    monkeypatch.setattr("lt2_workflows.cost.describe_cost", lambda run, hardware, known: f"{hardware.count} cards")
    storage, workflow = Storage(str(tmp_path)), load_workflow("distill_small", ["stage3.resources.num_workers=8"])
    assert "\nstage3 on 8 cards" in describe_costs(workflow, storage, card="l4")
    assert "stage3: as teacher" in describe_costs(workflow, storage, card="l4", count=4)
    context = StepContext(storage, workflow, workflow.steps["stage3"])
    config = workflow.configs["stage3"]
    asked = [planned_training(each, context).teacher for each in (config, config.model_copy(update={"topk": "stored"}))]
    assert asked[0] is not None
    assert asked[1] is None


@pytest.mark.parametrize(
    ("recipe", "model", "train"), [("quickstart", "pretrain", "pretrain"), ("distill_small", "teacher", "stage3")]
)
@pytest.mark.parametrize("halting", ["act", "exit_gate"])
def test_loops_of_a_model_that_halts_are_not_planned_with_recomputation(tmp_path, recipe, model, train, halting):
    settings = [f"{model}.model.halting.type={halting}", f"{train}.train.activation_checkpoint=loop"]
    options = ["--storage", str(tmp_path), "--card", "h100", "--count", "1"]
    done = CliRunner().invoke(app, ["plan", recipe, *options, *(part for each in settings for part in ("--set", each))])
    assert isinstance(done.exception, ConfigError), done.output
    if (recipe, halting) == ("distill_small", "act"):
        reason = "the teacher has halting type 'act'"
    else:
        reason = "'loop': a loop of a model that halts cannot be recomputed; use 'block'"
    assert reason in str(done.exception)
