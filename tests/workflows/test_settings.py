"""What `lt2 recipes RECIPE` lists."""

import pytest

from lt2_workflows.cli import main
from lt2_workflows.loading import load_workflow, shipped_recipes
from lt2_workflows.settings import describe_settings
from lt2_workflows.steps.evaluate import EvaluateStep


def settings(recipe: str, *overrides: str, step: str | None = None) -> dict[str, tuple[str, str]]:
    """key -> (value, other values it takes), as printed."""
    found = {}
    for line in describe_settings(load_workflow(recipe, overrides), step).splitlines():
        if line.startswith("  "):
            key, _, rest = line.strip().partition("=")
            value, _, others = rest.partition("  or ")
            found[key] = (value.strip(), others)
    return found


def test_every_key_is_listed_with_its_value_and_what_else_it_takes():
    found = settings("quickstart", "pretrain.train.lr=5e-4")
    assert found["pretrain.train.lr"][0] == "0.0005"
    assert found["prepare.tokenize"] == ("ahead", "on_the_fly")
    assert found["pretrain.model.layout.type"] == ("hybrid", "uniform, loops, random, kept")
    mixer, others = found["pretrain.model.layout.mixer.type"]
    assert mixer == "gdn"
    assert {"kda", "window"} <= set(others.split(", "))
    assert "gdn" not in others.split(", ")
    assert found["pretrain.train.activation_checkpoint"] == ("false", "true, selective, loop")
    assert found["pretrain.train.keep_gathered"] == ("true", "false, auto")
    assert "pretrain.model.layout.mixer.conv_size" in found
    assert "pretrain.type" not in found  # a step stays what it is


def test_what_is_listed_is_what_set_takes():
    listed = {key: value for key, (value, _) in settings("quickstart").items()}
    again = load_workflow("quickstart", [f"{key}={value}" for key, value in listed.items()])
    assert again.configs == load_workflow("quickstart").configs


def test_a_sweep_lists_the_settings_of_its_trials():
    found = settings("sweep_pattern", "sweep.retry=1")
    assert (found["sweep.retry"][0], found["pretrain.train.steps"][0]) == ("1", "60")
    assert found["pretrain.model.layout.mixer.type"][0] == "gdn"
    assert "sweep.steps" not in found


def test_a_steps_first_sentence_is_shown_whole(monkeypatch):
    monkeypatch.setattr(EvaluateStep, "__doc__", "Tasks on a model,\n    at its depth. More.\n\n    loops: others.")
    shown = describe_settings(load_workflow("quickstart", []), "evaluate")
    assert shown.splitlines()[0] == "evaluate (evaluate): Tasks on a model, at its depth"


@pytest.mark.parametrize("recipe", sorted(shipped_recipes()))
def test_every_shipped_recipe_can_be_listed(recipe):
    assert settings(recipe)


def test_the_command_lists_one_step_and_names_a_mistyped_one(capsys, monkeypatch):
    monkeypatch.setattr("sys.argv", ["lt2", "recipes", "quickstart", "prepare"])
    with pytest.raises(SystemExit) as ended:
        main()
    assert ended.value.code in (0, None)
    out = capsys.readouterr().out
    assert "prepare.seq_len=256" in out
    assert "pretrain." not in out
    monkeypatch.setattr("sys.argv", ["lt2", "recipes", "quickstart", "prepair"])
    with pytest.raises(SystemExit) as ended:
        main()
    assert ended.value.code == 2
    assert "quickstart has no step 'prepair'; did you mean 'prepare'?" in capsys.readouterr().err
