"""Sweeps as data: which trials there are, what identifies them, and the shipped ones at their sizes."""

from __future__ import annotations

from dataclasses import replace

import pytest
from typer.testing import CliRunner

from lt2.analysis.accounting import parameters
from lt2.config import ConfigError, ModelConfig
from lt2_platform.evaluate.ablations import TABLES
from lt2_platform.storage import Storage
from lt2_workflows.cli import app
from lt2_workflows.commands.sweeps import sweep_workflow
from lt2_workflows.engine.records import write_workflow
from lt2_workflows.graph import Workflow
from lt2_workflows.loading import load_workflow, workflow_from_record
from lt2_workflows.recipes.models import ROWS
from lt2_workflows.recipes.pretrain import pretrain_06b, pretrain_13b
from lt2_workflows.sweeps.config import SweepStep, TrialConfig, label_of, slug
from lt2_workflows.sweeps.step import check_sweep
from lt2_workflows.sweeps.trial import results_of
from tests.workflows.conftest import FAKE_STEPS

PRESETS = ("ratio", "pattern", "level", "gate", "mixers", "loops")


def fakes() -> dict:
    return load_workflow(f"{FAKE_STEPS}:chain").record()["steps"]


def preset(name: str, *overrides: str) -> SweepStep:
    return load_workflow(f"sweep_{name}", overrides).configs["sweep"]


def command(name: str, *, set_=(), grid=(), seeds=None, **options) -> SweepStep:
    return sweep_workflow(name, list(set_), list(grid), seeds, options).configs["sweep"]


def models(sweep: SweepStep) -> dict[str, ModelConfig]:
    return {
        trial.name: ModelConfig.model_validate(
            trial.workflow.configs["pretrain"].model.model_dump() | {"vocab_size": 256}
        )
        for trial in sweep.expanded
    }


def test_trials_grid_and_seeds_are_crossed():
    sweep = SweepStep(
        steps=fakes(),
        trials=(TrialConfig(label="long", group="g", settings={"first.lines": 9}), TrialConfig(label="short")),
        grid={"second.text": ("a", "b")},
        seeds=(3, 4),
        seed_keys=("third.lines",),
    )
    assert [trial.name for trial in sweep.expanded] == [
        f"{name}-text-{text}-seed-{seed}" for name in ("g-long", "short") for text in "ab" for seed in (3, 4)
    ]
    first = sweep.expanded[0]
    assert (first.label, first.group, first.seed) == ("long text=a", "g", 3)
    lines = [first.workflow.configs[name].lines for name in ("first", "second", "third")]
    assert lines == [9, 3, 3]
    assert [trial.workflow.configs["first"].lines for trial in sweep.expanded] == [9] * 4 + [3] * 4


def test_trials_share_the_steps_in_which_they_agree():
    sweep = SweepStep(steps=fakes(), grid={"second.lines": (1, 2)})
    one, two = (trial.workflow.steps for trial in sweep.expanded)
    assert one["first"].id == two["first"].id
    assert one["second"].id != two["second"].id
    assert one["third"].id != two["third"].id


def test_a_sweep_is_identified_by_its_trials():
    def fingerprint(steps, **fields):
        return Workflow("w", {"s": SweepStep(steps=steps, **fields)}).steps["s"].fingerprint

    steps = fakes()
    same = [
        fingerprint(steps, grid={"first.lines": (1, 2)}),
        # the same trials, spelled differently
        fingerprint(steps, trials=tuple(TrialConfig(label=f"lines={n}", settings={"first.lines": n}) for n in (1, 2))),
        # resources and defaults written out are no part of it
        fingerprint(steps, grid={"first.lines": (1, 2)}, resources={"concurrent": 7}),
        fingerprint({**steps, "first": {"type": "write"}}, grid={"first.lines": (1, 2)}),
    ]
    assert len(set(same)) == 1
    others = [
        fingerprint(steps, grid={"first.lines": (1, 3)}),
        fingerprint(steps, grid={"first.lines": (1, 2)}, retry=1),
        fingerprint(steps, grid={"first.lines": (1, 2)}, scheduler={"type": "asha", "grace_steps": 3}),
    ]
    assert len({*same, *others}) == 4
    plain = SweepStep(steps=steps, grid={"first.lines": (1, 2)})
    assert plain.identity({}).keys() == {"type", "trials", "scheduler"}, "what is not asked for has no name in it"


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"grid": {"first.line": (1,)}}, r"line=1: first\.line: unknown key 'line'; did you mean 'lines'\?"),
        ({"grid": {"frist.lines": (1,)}}, "unknown step 'frist'; did you mean 'first'"),
        ({"grid": {"first.lines": ("x",)}}, "lines=x: first.lines"),
        ({"grid": {"first.lines": tuple(range(10_001))}}, "10,001 trials; at most 10,000"),
        ({"grid": {"first.lines": tuple(range(5_001))}, "seeds": (0, 1)}, "10,002 trials; at most 10,000"),
        ({"match_parameters": "pretrain"}, "match_parameters: the recipe has no step 'pretrain'"),
        ({"match_parameters": "first"}, "match_parameters: the recipe has no step 'first' with a model"),
        (
            {"trials": tuple(TrialConfig(label="a", settings={"first.lines": n}) for n in (1, 2))},
            "are called 'a'; give",
        ),
        ({"grid": {"first.text": ("1", 1)}}, "two configurations of the sweep are called 'text=1'; give each trial"),
        (
            {"grid": {"first.lines": (1, 2)}, "seeds": (3, 4), "seed_keys": ("first.lines",)},
            r"'lines-1-seed-3' and 'lines-2-seed-3' of the sweep are the same run: .* seeds \(in first\.lines\)",
        ),
        ({"seeds": (3, 4), "seed_keys": ()}, r"'recipe-seed-3' and 'recipe-seed-4' .* seeds \(in no seed_keys\)"),
        ({"grid": {"first.lines": (1, 1.0)}}, "'lines-1' and 'lines-1-0' of the sweep are the same run"),
        ({"paper": "ratios"}, "no ablation table 'ratios'"),
        ({"scheduler": {"type": "asha", "grace_steps": 1}}, "scheduler.step: the recipe has no step 'pretrain'"),
    ],
)
def test_what_cannot_work_is_said_before_anything_runs(fields, message):
    with pytest.raises(ConfigError, match=message):
        check_sweep(SweepStep(steps=fakes(), **fields))


def test_a_sweep_needs_places_for_the_widest_step_of_any_trial():
    trials = (TrialConfig(label=f"{n}", settings={"first.resources.num_workers": n, "first.lines": n}) for n in (4, 2))
    assert SweepStep(steps=fakes(), trials=tuple(trials)).workers == 4


def test_groups_may_have_a_run_in_common():
    trials = tuple(TrialConfig(label="both", group=group) for group in "ab")
    one, other = SweepStep(steps=fakes(), trials=trials).expanded
    assert one.workflow.steps["third"].id == other.workflow.steps["third"].id


def test_all_trials_that_cannot_be_are_named_at_once():
    with pytest.raises(ConfigError) as few:
        command("ratio", set_=["pretrain.model.n_layers=5"])
    assert [line.partition(": pretrain.model: ratio ")[::2] for line in str(few.value).splitlines()] == [
        ("1:6", "1:6 over 5 layers leaves no attention layer; use at least 7 layers"),
        ("1:12", "1:12 over 5 layers leaves no attention layer; use at least 13 layers"),
    ]
    with pytest.raises(ConfigError) as alike:
        check_sweep(SweepStep(steps=fakes(), grid={"first.lines": (1, "x"), "second.text": ("a", "b")}))
    assert len(str(alike.value).splitlines()) == 1  # lines=x, whatever the text


def test_labels_tell_keys_apart():
    assert label_of({"a.train.lr": 0.1, "b.train.lr": 0.2}) == "a.train.lr=0.1 b.train.lr=0.2"
    assert label_of({"train.lr": 0.1, "pretrain.train.lr": 0.2}) == "train.lr=0.1 pretrain.train.lr=0.2"
    assert label_of({"a.model.layout": {"type": "uniform", "mixer": {}}, "a.x": [1]}) == "layout=uniform x=[1]"
    own, plain, other = {"type": "gdn", "conv_size": 0}, {"type": "gdn"}, {"type": "kda"}
    labels = [label_of({"x.mixer": value}, {"x.mixer": (own, plain, other)}) for value in (own, plain, other)]
    assert labels == ["mixer=gdn(conv_size=0)", "mixer=gdn", "mixer=kda"]
    layouts = [{"type": "hybrid", "mixer": mixer, "ratio": "1:4"} for mixer in (own, plain)]
    labels = [label_of({"layout": layout}, {"layout": layouts}) for layout in layouts]
    assert labels == ["layout=hybrid(mixer=gdn(conv_size=0))", "layout=hybrid(mixer=gdn)"]
    assert slug("x" * 99) == "x" * 60, "names of folders have limits"
    assert slug("Looped Hybrid (Full+GDN) 1:4") == "looped-hybrid-full-gdn-1-4"
    sweep = SweepStep(steps=fakes(), grid={"first.text": ("A B", "a-b")})
    assert [trial.name for trial in sweep.expanded] == ["text-a-b", "text-a-b-2"]


@pytest.mark.parametrize("name", PRESETS)
def test_labels_of_a_shipped_sweep_are_those_of_the_papers_table(name):
    sweep = preset(name)
    if sweep.paper is None:
        assert name == "loops"
        return
    found = {(trial.group, trial.label) for trial in sweep.expanded}
    assert found >= TABLES[sweep.paper].rows.keys() - {("", "Transformer")}
    assert {trial.seed for trial in sweep.expanded} == ({0} if name == "mixers" else {0, 1})


@pytest.mark.parametrize("name", ["ratio", "level", "gate"])
def test_trials_have_as_many_parameters_as_the_recipe(name):
    sizes = {trial: parameters(model).total for trial, model in models(preset(name)).items()}
    assert max(sizes.values()) / min(sizes.values()) < 1.01, sizes
    widths = {model.ffn_dim for model in models(preset(name)).values()}
    assert len(widths) > 1  # without matching they would differ


def test_ratios_and_patterns_differ_in_their_layers():
    from lt2.layout import layout

    counts = [sum(m.type == "full" for m in layout(model)[0]) for model in models(preset("ratio")).values()]
    assert counts[::2] == [15, 7, 3, 2, 1, 0]
    rows = {tuple(m.type for m in layout(model)[0]) for model in models(preset("pattern")).values()}
    assert len(rows) == 4


@pytest.mark.parametrize("size", ["0.6b", "1.3b"])
@pytest.mark.parametrize("name", PRESETS)
def test_full_size_sweeps_are_the_papers_runs(name, size):
    sweep = preset(f"{name}:{size}")
    for trial in sweep.expanded:
        train = trial.workflow.configs["pretrain"].train
        assert (train.steps, train.global_batch_size, train.seed, train.init_seed) == (255_000, 96, 777, 42)
        tasks = {task.type for task in trial.workflow.configs["evaluate"].tasks}
        assert tasks == {"perplexity", "harness"} | ({"diagnostics"} if name == "gate" else set())


@pytest.mark.parametrize(("size", "recipe"), [("0.6b", pretrain_06b), ("1.3b", pretrain_13b)])
def test_full_size_mixers_train_as_the_rows_of_the_main_table_do(size, recipe):
    trials = {trial.label: trial.workflow.steps["pretrain"] for trial in preset(f"mixers:{size}").expanded}
    rows = {row.title: name for name, row in ROWS.items() if size in row.scales}
    assert trials.keys() == rows.keys()
    for title, name in rows.items():
        assert trials[title].fingerprint == recipe(name).steps["pretrain"].fingerprint, name


def test_the_sink_is_read_with_and_without_gate():
    for trial in preset("gate").expanded:
        assert [task.type for task in trial.workflow.configs["evaluate"].tasks] == ["perplexity", "diagnostics"]


def test_readings_inside_a_model_and_at_other_depths_are_no_numbers_of_its_trial(monkeypatch, tmp_path):
    rows = [{"task": "perplexity", "metric": "perplexity", "value": 13.0 - n, "n_loops": n} for n in (4, 8)]
    rows += [{"task": "diagnostics", "metric": "rms", "value": 1.0, "n_loops": 4, "loop": 0, "layer": 0}]
    rows += [{"task": "positions", "metric": "loss", "value": 1.0, "n_loops": 4, "position": 8}]
    done = {"result": {"run": "r", "n_loops": 4, "rows": rows}}
    read = lambda storage, step: done if step.name == "second" else None  # noqa: E731
    monkeypatch.setattr("lt2_workflows.sweeps.trial.read_done", read)
    workflow = load_workflow(f"{FAKE_STEPS}:chain")
    assert results_of(workflow, Storage(str(tmp_path))) == ("r", {"perplexity/perplexity": 9.0})


def test_an_exit_gates_other_thresholds_are_no_numbers_of_its_trial(monkeypatch, tmp_path):
    row = {"task": "perplexity", "metric": "perplexity", "n_loops": 4}
    rows = [row | {"value": 9.0, "early_exit": False}, row | {"value": 10.0, "early_exit": True}]
    rows.append(row | {"value": 11.0, "early_exit": True, "exit_threshold": 0.5})
    done = {"result": {"run": "r", "n_loops": 4, "rows": rows}}
    read = lambda storage, step: done if step.name == "second" else None  # noqa: E731
    monkeypatch.setattr("lt2_workflows.sweeps.trial.read_done", read)
    workflow = load_workflow(f"{FAKE_STEPS}:chain")
    assert results_of(workflow, Storage(str(tmp_path))) == ("r", {"perplexity/perplexity": 10.0})


def test_what_two_steps_evaluated_alike_is_told_by_step(monkeypatch, tmp_path):
    def done(step, **values):
        rows = [{"task": task, "metric": "acc", "value": value, "n_loops": 4} for task, value in values.items()]
        return {"result": {"run": f"run of {step}", "n_loops": 4, "rows": rows}}

    found = {"second": done("second", piqa=0.5, boolq=0.7), "third": done("third", piqa=0.6)}
    monkeypatch.setattr("lt2_workflows.sweeps.trial.read_done", lambda storage, step: found.get(step.name))
    workflow = load_workflow(f"{FAKE_STEPS}:chain")
    assert results_of(workflow, Storage(str(tmp_path))) == (
        "run of third",
        {"second/piqa/acc": 0.5, "boolq/acc": 0.7, "third/piqa/acc": 0.6},
    )
    found["third"] = {"result": {"run": "an average", "loss": None}}
    assert results_of(workflow, Storage(str(tmp_path))) == ("run of second", {"piqa/acc": 0.5, "boolq/acc": 0.7})


def test_the_run_of_a_trial_is_the_one_whose_scores_its_table_shows(monkeypatch, tmp_path):
    """Where weights are trained further and both are evaluated, the second's page must not show the first's scores."""
    row = {"metric": "perplexity", "n_loops": 4}
    found = {
        "second": {"run": "first run", "n_loops": 4, "rows": [row | {"task": "perplexity", "value": 9.0}]},
        "third": {"run": "its continuation", "n_loops": 4, "rows": [row | {"task": "ppl-long", "value": 8.0}]},
    }
    done = lambda storage, step: {"result": found[step.name]} if step.name in found else None  # noqa: E731
    monkeypatch.setattr("lt2_workflows.sweeps.trial.read_done", done)
    run, metrics = results_of(load_workflow(f"{FAKE_STEPS}:chain"), Storage(str(tmp_path)))
    assert (run, metrics) == ("first run", {"perplexity/perplexity": 9.0, "ppl-long/perplexity": 8.0})


def test_command_on_a_shipped_sweep():
    sweep = command("ratio", set_=["pretrain.train.steps=30", "sweep.retry=2"], seeds="5,6,7", concurrent=3, asha=10)
    assert {trial.workflow.configs["pretrain"].train.steps for trial in sweep.expanded} == {30}
    assert {trial.workflow.configs["pretrain"].train.seed for trial in sweep.expanded} == {5, 6, 7}
    assert (sweep.retry, sweep.resources.concurrent, sweep.scheduler.grace_steps) == (2, 3, 10)


def test_command_on_any_recipe():
    keys = ["pretrain.train.lr=[1e-3, 3e-4]", "pretrain.model.layout.ratio=[1:1, 1:4]"]
    sweep = command("quickstart", grid=keys, seeds="1")
    assert [trial.label for trial in sweep.expanded] == [
        f"lr={lr} ratio={ratio}" for lr in ("0.001", "0.0003") for ratio in ("1:1", "1:4")
    ]
    assert sweep.seed_keys == ("pretrain.train.seed",)
    assert "report" in sweep.expanded[0].workflow.steps
    assert [trial.name for trial in command("quickstart", seeds="3,4").expanded] == ["recipe-seed-3", "recipe-seed-4"]
    recall = command("state_recall", seeds="1,2")
    assert {trial.workflow.configs["recall"].seed for trial in recall.expanded} == {1, 2}


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"name": "quickstart"}, "quickstart is not a sweep .*give --grid or --seeds as well"),
        ({"name": "ratios"}, "unknown recipe 'ratios'"),
        ({"name": "ratio:7b"}, "unknown size '7b' of a sweep"),
        ({"name": "ratio", "grid": ["pretrain.train.lr=1e-3"]}, "--grid pretrain.train.lr: give a list"),
        ({"name": "ratio", "grid": ["pretrain.train.lr"]}, "--grid pretrain.train.lr: expected key=value"),
        ({"name": "ratio", "seeds": "0,--5"}, r"sweep\.seeds\.1: .*integer"),
        ({"name": "ratio", "seeds": "a"}, r"sweep\.seeds\.0: .*integer"),
        ({"name": "ratio", "seeds": "0,1,0"}, r"seeds has a value twice, \[0, 1, 0\]; give each once"),
        ({"name": "quickstart", "grid": ["pretrain.train.lr=[1, 1]"]}, r"grid pretrain\.train\.lr has a value twice"),
        ({"name": "quickstart", "grid": ["pretrain.train.lr=[]"]}, r"grid pretrain\.train\.lr has no value; give at"),
        (
            {"name": "ratio", "grid": ["pretrain.train.lr=[1]"] * 2},
            r"--grid pretrain\.train\.lr is given more than onc",
        ),
    ],
)
def test_mistakes_on_the_command_line(arguments, message):
    with pytest.raises(ConfigError, match=message):
        command(**arguments)


def test_a_trial_names_its_sweep_in_its_record():
    workflow = Workflow("w", load_workflow(f"{FAKE_STEPS}:chain").configs, None, part_of="sweep-12345678")
    replayed = workflow_from_record(workflow.record(), source="record")
    assert (replayed.part_of, replayed.shared) == ("sweep-12345678", False)
    shared = workflow_from_record(replace(workflow, shared=True).record(), source="record")
    assert (shared.part_of, shared.shared) == ("sweep-12345678", True)
    assert replayed.id == workflow.id


def test_status_leaves_trials_out_unless_asked_for(tmp_path):
    chain = load_workflow(f"{FAKE_STEPS}:chain")
    write_workflow(Storage(str(tmp_path)), chain)
    write_workflow(Storage(str(tmp_path)), replace(chain, name="swept-trial", part_of="sweep-12345678"))
    shown = [
        CliRunner().invoke(app, ["status", *more, "--storage", str(tmp_path)]).output for more in ([], ["swept-trial"])
    ]
    assert [("chain-" in text, "swept-trial-" in text) for text in shown] == [(True, False), (False, True)]
