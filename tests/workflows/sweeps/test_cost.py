"""What configurations of a sweep have cost, beside their results."""

from __future__ import annotations

from dataclasses import replace

import pytest

from lt2.analysis.accounting import head_flops, parameters, training_flops, warmup_flops
from lt2.config import ConfigError, ModelConfig
from lt2.train.objectives import NextTokenConfig
from lt2_platform.results.flops import Spending, spending_of, spent
from lt2_platform.results.store import ResultsStore
from lt2_platform.storage import Storage
from lt2_workflows.commands.sweeps import sweep_workflow
from lt2_workflows.engine.context import StepContext
from lt2_workflows.graph import Workflow
from lt2_workflows.loading import load_workflow
from lt2_workflows.sweeps.config import SweepStep
from lt2_workflows.sweeps.step import check_sweep, describe_sweep, log_to_runs, with_flops, write_table
from lt2_workflows.sweeps.tune import count
from tests.platform.evaluate.tiny import MODEL
from tests.platform.train.packed import MODEL as HYBRID
from tests.platform.train.packed import TOKENIZER, model_config, train_config, write_dataset
from tests.workflows.conftest import FAKE_STEPS

BATCH, SEQ_LEN = 4, 32


def trained(store: ResultsStore, run: str, *, steps: int, **model: object) -> float:
    """Record a run of a model of tiny sizes; returns the training FLOPs of its tokens."""
    config = {"model": MODEL | {"vocab_size": 259} | model, "train": {"global_batch_size": BATCH, "steps": steps}}
    tokens = steps * BATCH * SEQ_LEN
    with store.create_run(run, {"config": config}) as writer:
        writer.log(steps, {"loss": 2.0, "tokens": tokens})
    return tokens * training_flops(ModelConfig.model_validate(config["model"]), SEQ_LEN)


@pytest.fixture
def store(tmp_path) -> ResultsStore:
    return ResultsStore(Storage(str(tmp_path)))


def test_what_runs_have_spent(store):
    flops = trained(store, "a", steps=10)
    assert trained(store, "b", steps=5, n_loops=4) > flops / 2
    store.create_run("evaluated", {"config": {}}).close()
    runs = store.index().runs
    assert spent([runs["a"], runs["evaluated"]]) == pytest.approx(flops)
    assert spent(runs.values()) > flops
    config = dict(runs["a"].config) | {
        "data": {"seq_len": SEQ_LEN}
    }  # else from tokens, of which a mask leaves some out
    with store.create_run("on", {"config": config, "tokens_before": 100}) as writer:
        writer.log(12, {"tokens": 120})
    runs = store.index().runs
    assert spent([runs["on"]]) == pytest.approx(flops * 20 / (10 * BATCH * SEQ_LEN))
    assert spent([]) is spent([runs["evaluated"]]) is None
    with store.create_run("unknown", {"config": {"model": {"layout": {"type": "mine"}}}}) as writer:
        writer.log(1, {"tokens": 5})
    assert spent(store.index().runs.values()) is None  # half of it would look like all


def test_what_a_run_spends_is_what_its_objective_computes():
    settings = MODEL | {"vocab_size": 259, "halting": {"type": "exit_gate"}}
    model = ModelConfig.model_validate(settings)

    def counted(**objective: str) -> float:
        train = {"global_batch_size": BATCH, "objective": objective}
        spending = spending_of({"model": settings, "train": train, "data": {"seq_len": SEQ_LEN}}, 1, 1.0)
        assert isinstance(spending, Spending)
        return spending.by(1, 1.0)

    plain = training_flops(model, SEQ_LEN)
    assert counted(type="next_token") == plain
    assert counted(type="exit_gate") == pytest.approx(plain + 3 * (model.n_loops - 1) * head_flops(model))
    assert counted(type="mine", source="gone.py") == counted(type="of another world") == plain


def test_what_dsa_has_spent_has_its_dense_steps_where_they_were_made(store):
    layout = {"type": "uniform", "mixer": {"type": "dsa", "top_k": 4, "warmup_steps": 6}}
    sparse = trained(store, "a", steps=10, layout=layout)
    trained(store, "early", steps=3, layout=layout)
    runs = store.index().runs
    for run, before in (("on", 4), ("late", 8)):
        with store.create_run(run, {"config": runs["a"].config, "tokens_before": before * BATCH * SEQ_LEN}) as writer:
            writer.log(10, {"tokens": 10 * BATCH * SEQ_LEN})
    runs = store.index().runs
    model = ModelConfig.model_validate(runs["a"].config["model"])
    more = 3 * warmup_flops(model, NextTokenConfig(), SEQ_LEN)[6] * BATCH * SEQ_LEN  # per step
    for run, steps, dense in (("a", 10, 6), ("early", 3, 3), ("on", 6, 2), ("late", 2, 0)):
        assert spent([runs[run]]) == pytest.approx(steps * sparse / 10 + dense * more), run


def test_the_table_has_what_a_configuration_cost(store):
    sweep = SweepStep(steps=load_workflow(f"{FAKE_STEPS}:chain").record()["steps"], grid={"first.lines": (1, 2)})
    workflow = Workflow("w", {"sweep": sweep})
    context = StepContext(store.storage, workflow, workflow.steps["sweep"])
    first, second = trained(store, "stage-1", steps=4), trained(store, "stage-2", steps=6)
    records = [
        {"name": label, "group": "", "label": label, "seed": None, "state": "done", "parameters": None, "run": run,
         "steps": {"prepare": "prepare-1", **steps}, "metrics": {"perplexity/perplexity": 3.0}}
        for label, run, steps in (
            ("stages", "stage-2", {"one": "stage-1", "two": "stage-2"}), ("elsewhere", None, {"one": "gone"}),
        )
    ]  # fmt: skip
    records = with_flops(records, context)
    assert [record["training_flops"] for record in records] == [pytest.approx(first + second), None]
    again = Workflow("w", {"sweep": sweep.model_copy(update={"retry": 1})})
    for each in (context, context, replace(context, workflow=again, step=again.steps["sweep"])):
        log_to_runs(records, each)
    logged = [(row["metric"], row["value"]) for run, name, row in store.index().evals if name == "sweep"]
    assert sorted(logged) == sorted([("PPL", 3.0), ("training_flops", first + second)] * 2), "once for each sweep"
    table = write_table(sweep, records, context)["text"]
    assert "training FLOPs" in table
    assert table.rstrip().endswith("add --seeds 0,1 (finished trials are kept).")
    for seeds in ((3,), (0, 1)):
        told = write_table(sweep.model_copy(update={"seeds": seeds}), records, context)["text"]
        assert ("One seed each" in told) == (len(seeds) == 1)
    assert "training_flops" in store.storage.read_bytes(f"{context.step.folder}/out/table.csv").decode()
    older = [{key: value for key, value in record.items() if key != "training_flops"} for record in records]
    assert "training FLOPs" not in write_table(sweep, older, context)["text"]


def test_parameters_are_those_of_the_vocabulary_of_the_data(store, tmp_path):
    data = write_dataset(tmp_path / "data", tokenizer=TOKENIZER | {"vocab_size": 500})
    step = {"type": "pretrain", "data": data, "model": HYBRID, "train": train_config().model_dump(mode="json")}
    sweep = SweepStep(steps={"pretrain": step}, grid={"pretrain.data": (data, str(tmp_path / "none"))})
    workflow = Workflow("w", {"sweep": sweep})
    context = StepContext(store.storage, workflow, workflow.steps["sweep"])
    expected = parameters(model_config(vocab_size=500)).total
    assert [count(trial, context) for trial in sweep.expanded] == [expected, None]
    step = step | {"train": train_config(checkpoint_every=1).model_dump(mode="json")}
    steps = {"pretrain": step, "average": {"type": "average", "checkpoint": {"step": "pretrain"}}}
    trial, _ = SweepStep(steps=steps, grid={"average.last": (2, 3)}).expanded
    assert count(trial, context, trial.workflow.steps["average"].id) == expected


def test_parameters_are_those_of_the_model_that_was_measured(store):
    sweep = sweep_workflow("distill_small", [], ["stage3.train.lr=[1e-3, 2e-3]"], None, {})
    context = StepContext(store.storage, sweep, sweep.steps["sweep"])
    trial, _ = sweep.configs["sweep"].expanded
    steps = trial.workflow.steps
    sizes = {name: count(trial, context, steps[name].id) for name in ("teacher", "stage3", "prepare")}
    teacher = steps["teacher"].config.model.model_dump() | {"vocab_size": 259}
    assert sizes["teacher"] == parameters(ModelConfig.model_validate(teacher)).total < sizes["stage3"]
    assert sizes["prepare"] is None
    assert count(trial, context) == count(trial, context, "of another") == sizes["stage3"], "what is trained last"


def test_a_plan_says_of_each_trial_what_is_done_and_what_it_costs(store, tmp_path):
    def planned(recipe, key, values):
        workflow = sweep_workflow(recipe, [], [f"{key}={values}"], None, {"concurrent": 3})
        context = StepContext(store.storage, workflow, workflow.steps["sweep"])
        done = {"attempt": 1, "ended": 0, "result": {}, "provenance": {}}
        first = workflow.configs["sweep"].expanded[0].workflow.steps
        store.storage.write_json(f"{list(first.values())[-1].folder}/done.json", done)
        return describe_sweep(workflow.configs["sweep"], context).splitlines()

    assert planned(f"{FAKE_STEPS}:chain", "third.lines", [2, 3]) == [
        "2 trials, 3 at a time, fifo",
        "    lines-2  1/3 steps done",
        "    lines-3  0/3 steps done",
    ]
    training = planned("quickstart", "pretrain.train.steps", [40, 50])[1]
    assert training.startswith("    steps-40  1/4 steps done  pretrain: 647k parameters")
    assert "40 steps" in training
    several = planned("distill_small", "teacher.train.seed", [0, 1])[1]
    assert several.endswith("; then align, probe-0, probe-1, probe-2, probe-3 and 5 more")
    recall = planned("state_recall", "recall.max_steps", [40, 50])[1]
    assert "  recall: " in recall
    assert "at most 40 steps" in recall


def test_what_hangs_on_an_unknown_vocabulary_is_not_matched():
    step = {"type": "pretrain", "data": "x", "model": HYBRID, "train": train_config().model_dump(mode="json")}
    fields = {"grid": {"pretrain.model.dim": (16, 32)}, "match_parameters": "pretrain"}
    with pytest.raises(ConfigError, match=r"dim=32: pretrain\.model: .* set pretrain\.model\.vocab_size"):
        check_sweep(SweepStep(steps={"pretrain": step}, **fields))
    given = step | {"model": HYBRID | {"vocab_size": 40, "ffn_hidden": 400}}
    sizes = [t.workflow.configs["pretrain"].model for t in SweepStep(steps={"pretrain": given}, **fields).expanded]
    assert [model.ffn_hidden for model in sizes][0] == 400 > sizes[1].ffn_hidden
