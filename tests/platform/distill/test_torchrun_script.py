"""scripts/train_torchrun.py with models to begin with or to learn from."""

import ast
import json
import re
import runpy
import sys

import pytest
import torch
from torch.distributed.run import get_args_parser

from lt2_platform.distill.measure import checkpoint_kl
from lt2_platform.distill.teacher import identity
from lt2_platform.results.store import ResultsStore
from lt2_platform.storage import Storage
from lt2_platform.train.config import PretrainConfig
from tests.platform.distill.stages import ALIGN, GDN, run_stage, weights, write_teacher
from tests.platform.train.packed import MODEL, train_config, write_dataset
from tests.platform.train.test_worker import losses
from tests.ranks import ROOT

TEACHER_MODEL = MODEL | {"layout": {"type": "uniform", "mixer": {"type": "full"}}}
TRAIN = train_config().model_dump(mode="json")
PRETRAIN = {"model": TEACHER_MODEL, "train": TRAIN}
STAGE_ONE = {"mixer": GDN, "train": TRAIN | {"objective": ALIGN}}


@pytest.fixture(scope="module")
def root(tmp_path_factory):
    """With the run `teacher`, and its data."""
    root = tmp_path_factory.mktemp("torchrun")
    write_teacher(root)
    return root


@pytest.fixture
def script(root, monkeypatch):
    """Call the script with a config and options; returns its exit code."""
    main = runpy.run_path(str(ROOT / "scripts/train_torchrun.py"))["main"]

    def call(config, *options, out):
        (root / "config.json").write_text(json.dumps(config))
        places = {"config": root / "config.json", "data": root / "data", "out": root / out, "storage": root}
        named = [part for name, place in places.items() for part in (f"--{name}", str(place))]
        monkeypatch.setattr(sys, "argv", ["train_torchrun.py", *named, "--wandb", "off", *map(str, options)])
        return main()

    return call


def test_it_begins_with_the_weights_of_another_run(root, script):
    assert script(PRETRAIN, "--start-from", root / "teacher", out="more") == 0
    recorded = json.loads((root / "more/pretrain.json").read_text())
    assert recorded["sources"] == {"start": identity(str(root / "teacher"))}
    first, went_on = losses(root, "teacher"), losses(root, "more")
    assert went_on[1] < first[4]  # it does not begin again where the teacher did


def test_a_stage_of_distillation_is_the_one_that_a_step_runs(root, script):
    expected = weights(run_stage(root, "align", ALIGN, teacher=str(root / "teacher")))
    assert script(STAGE_ONE, "--teacher", root / "teacher", out="aligned") == 0
    found = weights(str(root / "aligned"))
    assert found.keys() == expected.keys()
    assert all(torch.equal(found[name], value) for name, value in expected.items())


def test_a_stage_ends_with_its_distance_to_the_teacher(root, script, capsys):
    assert script(STAGE_ONE, "--teacher", root / "teacher", "--score-sequences", 3, out="measured") == 0
    data, teacher = str(root / "data"), str(root / "teacher")
    chosen_by, reported = checkpoint_kl(str(root / "measured"), teacher, data, max_sequences=3)
    printed = ast.literal_eval(capsys.readouterr().out.splitlines()[-1])
    assert printed["report_kl"] == reported["kl"] > 0
    assert (printed["kl"], printed["kl_loops"]) == (chosen_by["kl"], chosen_by["kl_loops"])
    rows = [row for run, _, row in ResultsStore(Storage(str(root))).index().evals if run == "measured"]
    found = {row["metric"]: row["value"] for row in rows}
    assert found.pop("teacher_kl") == reported["kl"]
    assert list(found.values()) == reported["kl_loops"]
    assert {(row["teacher"], row["step"], row["n"]) for row in rows} == {(teacher, TRAIN["steps"], reported["tokens"])}


def test_data_without_two_held_out_rows_is_refused_before_the_training(root, script, tmp_path, capsys):
    write_dataset(tmp_path / "few", validation=1)
    assert script(STAGE_ONE, "--teacher", root / "teacher", "--data", tmp_path / "few", out="few") == 2
    assert "one validation sequence has no halves" in capsys.readouterr().err
    assert not (root / "few").exists()


@pytest.mark.parametrize(
    ("config", "options", "message"),
    [
        (STAGE_ONE, ["--teacher", "teacher", "--start-from", "teacher"], "what a stage of distillation begins with"),
        (PRETRAIN, ["--student", "teacher"], "--student is for a stage of distillation; give its --teacher as well"),
        (PRETRAIN | {"train": TRAIN | {"objective": {"type": "distill"}}}, [], "objective distill needs a --teacher"),
        (STAGE_ONE, ["--teacher", "teacher", "--score-sequences=0"], "--score-sequences 0: give 1 or more"),
        ({"train": TRAIN}, ["--teacher", "teacher"], "give align (stage 1) or distill (stages 2 and 3)"),
        (PRETRAIN, ["--start-from", "nothing"], "nothing"),
        (PRETRAIN, ["--start-from", "teacher", "--continue-from", "teacher"], "give --start-from"),
        (PRETRAIN, ["--continue-from", "teacher"], "has 6 steps already; raise train.steps"),
        (STAGE_ONE, ["--teacher", "teacher", "--continue-from", "teacher"], "--continue-from is for pretraining"),
    ],
)
def test_what_does_not_fit_together_is_refused_before_anything_is_written(
    root, script, config, options, message, capsys
):
    placed = [option if option.startswith("--") else root / option for option in options]
    assert script(config, *placed, out="refused") == 2
    assert message in capsys.readouterr().err
    assert not (root / "refused").exists()


def test_the_config_in_the_documentation_is_one():
    (written,) = re.findall(r"```json\n(.*?)```", (ROOT / "docs/training.md").read_text(), re.DOTALL)
    PretrainConfig.model_validate_json(written)


def test_torchrun_takes_none_of_its_options_for_its_own():
    """argparse completes abbreviations, also of what follows the script: --start would be torchrun's --start-method."""
    options = re.findall(r'add_argument\(\s*"(--[\w-]+)"', (ROOT / "scripts/train_torchrun.py").read_text())
    assert "--start-from" in options
    given = [part for option in options for part in (option, "x")]
    assert get_args_parser().parse_args(["train_torchrun.py", *given]).training_script_args == given
