"""Recipes, records and --set: what is accepted, and that every mistake is named with its place and its fix."""

from __future__ import annotations

import json
import sys

import pytest

from lt2.config import ConfigError
from lt2_workflows.cli import main
from lt2_workflows.loading import load_workflow
from lt2_workflows.overrides import apply_overrides, parse_override
from tests.workflows.conftest import FAKE_STEPS

CHAIN = f"{FAKE_STEPS}:chain"


@pytest.mark.parametrize(
    ("text", "value"),
    [
        ("a.b=3e-4", 3e-4),
        ("a.b=yes", "yes"),
        ("a.b=null", None),
        ("a.b=~", None),
        ("a.b=#5", "#5"),
        ("a.b=true", True),
        ("a.b=[1, x]", [1, "x"]),
        ("a.b={type: gdn}", {"type": "gdn"}),
        ("a.b=s3://bucket/x", "s3://bucket/x"),
        ("a.b=*.txt", "*.txt"),
        ("a.b=/data/a #1", "/data/a #1"),
        ("a.b=2026-01-01", "2026-01-01"),
        ("a.b='3'", "3"),
        ("a.b=", ""),
        ("a.b=x=y", "x=y"),
    ],
)
def test_values_are_yaml_1_2_or_literal(text, value):
    assert parse_override(text) == ("a.b", value)


@pytest.mark.parametrize("objective", ["exit_gate", "align", "distill"])
def test_an_objective_that_the_model_is_not_made_for_is_refused_with_the_recipe(objective):
    with pytest.raises(ConfigError, match=f"quickstart: pretrain: .*objective '{objective}'"):
        load_workflow("quickstart", [f"pretrain.train.objective.type={objective}"])


def test_type_goes_first_and_drops_the_keys_of_the_old_type():
    steps = {"train": {"mixer": {"type": "window", "window": 64}, "layers": [{"type": "full"}, {"type": "full"}]}}
    overrides = ["train.mixer.heads=2", "train.mixer.type=gdn", "train.layers.1.type=window", "train.layers.1.window=8"]
    apply_overrides(steps, [parse_override(text) for text in overrides])
    assert steps["train"]["mixer"] == {"type": "gdn", "heads": 2}
    assert steps["train"]["layers"] == [{"type": "full"}, {"type": "window", "window": 8}]


def test_a_type_turns_a_plain_spelling_into_a_config():
    steps = {"prepare": {"source": "books/"}}
    apply_overrides(steps, [("prepare.source.path", "web/"), ("prepare.source.type", "fineweb_edu")])
    assert steps["prepare"]["source"] == {"type": "fineweb_edu", "path": "web/"}
    with pytest.raises(ConfigError, match="prepare.source is 'books/', which has no keys"):
        apply_overrides({"prepare": {"source": "books/"}}, [("prepare.source.path", "web/")])


def test_what_is_set_inside_a_value_that_is_set_too_comes_after_it():
    steps = {"train": {"mixer": {"type": "gdn"}}}
    apply_overrides(steps, [("train.mixer.window", 8), ("train.mixer", {"type": "window", "window": 64})])
    assert steps["train"]["mixer"] == {"type": "window", "window": 8}


def test_what_is_null_makes_way_for_a_config():
    steps = {"train": {"halting": None}}
    apply_overrides(steps, [("train.halting.epsilon", 0.1), ("train.halting.type", "act")])
    assert steps["train"]["halting"] == {"type": "act", "epsilon": 0.1}


def test_setting_the_same_type_keeps_its_siblings():
    steps = {"train": {"mixer": {"type": "window", "window": 64}}}
    apply_overrides(steps, [("train.mixer.type", "window")])
    assert steps["train"]["mixer"] == {"type": "window", "window": 64}


@pytest.mark.parametrize(
    ("recipe", "overrides", "message"),
    [
        ("quickstrat", [], "unknown recipe 'quickstrat'; did you mean 'quickstart'"),
        ("no/such.py:f", [], "recipe file no/such.py does not exist"),
        (f"{FAKE_STEPS}:chian", [], "has no function 'chian'; did you mean 'chain'"),
        (FAKE_STEPS, [], f"say which of its functions is the recipe, {FAKE_STEPS}:NAME (known: "),
        ("missing.yaml", [], "recipe record missing.yaml does not exist"),
        (
            CHAIN,
            ["first.zzzzzz=3"],
            "first.zzzzzz: unknown key 'zzzzzz'; `lt2 recipes RECIPE first` lists the settings",
        ),
        (CHAIN, ["first.lnies=3"], "first.lnies: unknown key 'lnies'; did you mean 'lines'?"),
        (CHAIN, ["frist.lines=3"], "--set frist.lines: unknown step 'frist'; did you mean 'first'?"),
        (CHAIN, ["first.lines=many"], "first.lines: Input should be a valid integer"),
        (CHAIN, ["first.lines.x=1"], "--set first.lines.x: first.lines is 3, which has no keys"),
        (CHAIN, ["first.type=wirte"], "first.type: unknown step type 'wirte'; did you mean 'write'?"),
        ("quickstart", ["pretrain.train.lr=inf"], "pretrain.train.lr: Input should be a finite number"),
        ("quickstart", ["pretrain.train.lr=.nan"], "pretrain.train.lr: Input should be a finite number"),
        ("quickstart", ["pretrain.train.betas=[0.9, .nan]"], "pretrain.train.betas.1: Input should be a finite number"),
        (
            "quickstart",
            ["evaluate.tasks=[{type: perplexity, batchsize: 4}]"],
            "quickstart: evaluate.tasks.0.batchsize: unknown key 'batchsize'; did you mean 'batch_size'?",
        ),
        ("quickstart", ["pretrain.train.betas=[0.9]"], "quickstart: pretrain.train.betas.1: Field required"),
        (
            "quickstart",
            ["pretrain.model.layout.mixer.window=64"],
            "pretrain.model.layout.mixer.window: unknown key 'window'; types with it: nsa, window",
        ),
        (CHAIN, ["first=null"], "first: a step is a type and its fields, {type: …, name: value, …}, not None"),
        ("quickstart", ["evaluate.loops=4"], "quickstart: evaluate.loops: give a list, such as [4], not 4"),
        (
            "quickstart",
            ["pretrain.model.layout.mixer=gdn"],
            "pretrain.model.layout.mixer: give a type and its fields, {type: …, name: value, …}, not gdn",
        ),
        (
            "quickstart",
            ["pretrain.model.layout={type: hybrid"],
            "pretrain.model.layout: give a type and its fields, {type: …, name: value, …}, not {type: hybrid",
        ),
        ("quickstart", ["evaluate.tasks=[]"], "evaluate.tasks: Tuple should have at least 1 item"),
        ("quickstart", ["evaluate.loops=[0, 4]"], "evaluate.loops: loops [0, 4]: give different depths of at least 1"),
        ("quickstart", ["evaluate.loops=[2, 2]"], "evaluate.loops: loops [2, 2]: give different depths of at least 1"),
        (CHAIN, ["first.lines"], "--set first.lines: expected key=value"),
        (CHAIN, ["first.lines=1", "first.lines=2"], "--set first.lines is given more than once"),
        (CHAIN, ["second.part.sources.3.step=first"], "second.part.sources has 1 items; '3' is not the index of one"),
        (CHAIN, ["second.part.sources.0.step=zero"], "second: refers to step 'zero', which is not in"),
    ],
)
def test_mistakes_are_named(recipe, overrides, message):
    with pytest.raises(ConfigError) as caught:
        load_workflow(recipe, overrides)
    assert message in str(caught.value)
    assert "\n" not in str(caught.value)


def test_a_record_replays_to_the_same_identity(tmp_path):
    workflow = load_workflow(CHAIN, ["first.lines=7"])
    record = tmp_path / "dag.json"
    record.write_text(json.dumps(workflow.record()))
    assert load_workflow(str(record)).id == workflow.id
    assert load_workflow(str(record), ["first.lines=8"]).id == load_workflow(CHAIN, ["first.lines=8"]).id


YAML = f"""\
workflow: mine
recipe_file: {FAKE_STEPS}
steps:
  first:
    type: write
    lines: 1e1
  second:
    type: write
    part:
      sources: [{{step: first}}]
"""


def test_yaml_record(tmp_path):
    path = tmp_path / "mine.yaml"
    path.write_text(YAML)
    assert load_workflow(str(path)).steps["first"].config.lines == 10  # type: ignore[attr-defined]


@pytest.mark.parametrize(
    ("old", "new", "message"),
    [
        ("lines: 1e1", "lnies: 1", ":6: first.lnies: unknown key 'lnies'; did you mean 'lines'?"),
        ("      sources", "      sizes", ":10: second.part.sizes: unknown key 'sizes'; did you mean 'size'?"),
        ("lines: 1e1", "lines: 1\n    lines: 2", ':7: found duplicate key "lines"'),
        ("  second:\n    type: write", "  second:\n    type: wirte", ":8: second.type: unknown step type 'wirte'"),
        ("workflow: mine", "workflw: mine", "a workflow record has the keys"),
        ("workflow: mine", "workflow: mine\nstep: 1", ":2: unknown key 'step'; did you mean 'steps'?"),
        ("lines: 1e1", "lines: [1", "not valid YAML"),
        ("lines: 1e1", "lines: \x07", "not valid YAML: unacceptable character #x0007"),
        ("  second:\n    type: write", "  second:\n    type: [write]", ":8: second.type: unknown step type ['write']"),
    ],
)
def test_mistakes_in_yaml_have_a_line(tmp_path, old, new, message):
    path = tmp_path / "c.yaml"
    path.write_text(YAML.replace(old, new, 1))
    with pytest.raises(ConfigError) as caught:
        load_workflow(str(path))
    assert message in str(caught.value)
    assert str(caught.value).startswith(str(path))


def test_functions_that_may_be_recipes_are_named_where_none_says_that_it_is(tmp_path):
    (tmp_path / "mine.py").write_text(
        "from lt2_workflows.graph import Workflow\n\n\ndef tiny():\n    return Workflow('w', {})\n"
    )
    with pytest.raises(ConfigError, match=r"mine\.py:NAME \(known: tiny\)"):
        load_workflow(str(tmp_path / "mine.py"))


def test_a_record_that_is_no_text_is_named(tmp_path):
    (tmp_path / "dag.json").write_bytes(b"\xff\xfe")
    with pytest.raises(ConfigError, match=r"dag\.json is not text in UTF-8 \(byte 0\)"):
        load_workflow(str(tmp_path / "dag.json"))


def test_a_file_of_ones_own_is_named_where_its_config_is_used(tmp_path):
    (tmp_path / "halved.py").write_text(
        "from typing import ClassVar, Literal\nfrom lt2.train.loss import next_token_objective\n"
        "from lt2.train.objectives import ObjectiveConfig\nclass Halved(ObjectiveConfig):\n"
        "    module: ClassVar[str] = 'halved'\n    type: Literal['halved'] = 'halved'\n"
        "def halved(config, train): return next_token_objective()\n"
    )
    recipe = tmp_path / "mine.py"
    recipe.write_text(
        f"from lt2.config import load_source\nobjective = load_source({str(tmp_path / 'halved.py')!r}).Halved()\n"
        "from lt2_workflows.recipes.quickstart import quickstart\ndef mine():\n    flow = quickstart()\n"
        "    train = flow.configs['pretrain'].train.model_copy(update={'objective': objective})\n"
        "    flow.configs['pretrain'] = flow.configs['pretrain'].model_copy(update={'train': train})\n    return flow\n"
    )
    where = rf"mine.py:mine: pretrain.train.objective: .*'halved'.*its source \({tmp_path / 'halved.py'}\)"
    with pytest.raises(ConfigError, match=where):
        load_workflow(f"{recipe}:mine")
    load_workflow(f"{recipe}:mine", [f"pretrain.train.objective.source={tmp_path / 'halved.py'}"])


def test_a_module_beside_a_recipe_is_no_part_of_it(tmp_path):
    (tmp_path / "beside.py").write_text("")
    (tmp_path / "mine.py").write_text("import beside\n")
    with pytest.raises(ConfigError, match=r"mine.py imports 'beside', .* its source, else install it"):
        load_workflow(f"{tmp_path / 'mine.py'}:mine")


@pytest.mark.parametrize(
    ("text", "told"),
    [
        ("import math\nimport nonexistent\n", ":2: No module named 'nonexistent'; correct the import"),
        ("from lt2.config import Nope\n", ":1: cannot import name 'Nope' from 'lt2.config'"),
        ("import broken_of_mine\n", r":1: cannot import name 'nope' from 'math' .*\(in .*/broken_of_mine.py:2\)"),
        ("\ndef mine(:\n", ":2: invalid syntax"),
    ],
)
def test_what_a_recipes_file_cannot_import_is_named_by_its_line(tmp_path, monkeypatch, text, told):
    monkeypatch.syspath_prepend(str(tmp_path / "installed"))
    (tmp_path / "installed").mkdir()
    (tmp_path / "installed" / "broken_of_mine.py").write_text("\nfrom math import nope\n")
    (tmp_path / "mine.py").write_text(text)
    with pytest.raises(ConfigError, match=f"^{tmp_path}/mine.py{told}"):
        load_workflow(f"{tmp_path}/mine.py:mine")


def test_another_error_in_a_recipes_file_is_shown_from_there(tmp_path, monkeypatch, capsys):
    (tmp_path / "mine.py").write_text("def mine():\n    return {}['x']\n")
    monkeypatch.setattr(sys, "argv", ["lt2", "plan", f"{tmp_path}/mine.py:mine"])
    with pytest.raises(SystemExit) as ended:
        main()
    first, second, *_ = capsys.readouterr().err.splitlines()
    assert ended.value.code == 1
    assert first.startswith("Traceback")
    assert second == f'  File "{tmp_path}/mine.py", line 2, in mine'
