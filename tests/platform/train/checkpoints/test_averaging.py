"""The mean of a run's last checkpoints, as a run of its own."""

import shutil

import pytest
import torch

from lt2.config import ConfigError
from lt2_platform.distill.teacher import load_teacher
from lt2_platform.storage import Storage
from lt2_platform.train import worker
from lt2_platform.train.checkpoints import checkpoint
from lt2_platform.train.checkpoints.averaging import averaged, store_average
from lt2_platform.train.checkpoints.integrity import CheckpointError
from lt2_platform.train.checkpoints.matching import check_continues
from tests.platform.train.packed import TOKENIZER, train_config, write_dataset
from tests.platform.train.test_worker import open_run, pretrain_config


@pytest.fixture(scope="module")
def root(tmp_path_factory):
    """A run with checkpoints of steps 2, 4 and 6."""
    root = tmp_path_factory.mktemp("averaging")
    write_dataset(root / "data")
    worker.run(open_run(root, pretrain_config(steps=6, checkpoint_every=2, keep_checkpoints=5), "run"))
    return root


@pytest.mark.parametrize(("place", "steps"), [("run", (2, 4, 6)), ("run/checkpoints/step-00000004", (2, 4))])
def test_every_weight_is_the_mean_over_the_checkpoints_that_end_with_the_one_named(root, tmp_path, place, steps):
    out = str(tmp_path / "out")
    result = store_average(str(root / place), out, last=len(steps))
    newest = checkpoint.read_info(str(root / f"run/checkpoints/step-{steps[-1]:08d}"))
    assert result == {
        "step": steps[-1], "position": newest.state.position, "tokens": newest.state.tokens, "loss": None
    }  # fmt: skip
    mean, _, tokenizer = checkpoint.load_model(out)
    models = [checkpoint.load_model(str(root / f"run/checkpoints/step-{step:08d}"))[0] for step in steps]
    for name, parameter in mean.named_parameters():
        whole = torch.stack([dict(model.named_parameters())[name].double() for model in models])
        torch.testing.assert_close(parameter.double(), whole.mean(0), rtol=1e-6, atol=1e-8)
        assert not torch.equal(parameter, models[-1].get_parameter(name))
    assert tokenizer == TOKENIZER
    made = checkpoint.read_info(checkpoint.resolve(out)).train
    assert made == newest.train | {"averaged": list(steps)}
    assert Storage(out).read_json("summary.json")["checkpoint"] == checkpoint.resolve(out)
    assert store_average(str(root / "gone"), out, last=9) == result  # it is there
    assert load_teacher(out, train_config(), torch.device("cpu")).config == newest.model


def test_nothing_goes_on_from_a_mean_which_has_no_moments(root, tmp_path):
    store_average(str(root / "run"), str(tmp_path), last=3)
    info = checkpoint.read_info(checkpoint.resolve(str(tmp_path)))
    longer = train_config(**pretrain_config(steps=9).train.model_dump(mode="json"))
    with pytest.raises(CheckpointError, match="holds weights only; use `start` to take only its weights"):
        check_continues(info, info.model, longer, TOKENIZER, info.data)


def test_the_best_checkpoint_is_not_averaged_with_those_of_long_after(root, tmp_path):
    write_dataset(tmp_path / "data")
    worker.run(open_run(tmp_path, pretrain_config(steps=6, checkpoint_every=2, keep_checkpoints=2), "run"))
    folder = tmp_path / "run/checkpoints"
    shutil.copytree(root / "run/checkpoints/step-00000002", folder / "step-00000002")  # as the best stays
    with pytest.raises(ConfigError, match="has 2 checkpoints to average up to step-00000006, and 3 are asked for"):
        averaged(str(tmp_path / "run"), 3)
    assert [place.rpartition("/")[2] for place in averaged(str(tmp_path / "run"), 2)] == [
        "step-00000004",
        "step-00000006",
    ]


def test_what_cannot_be_averaged_is_told(root, tmp_path):
    with pytest.raises(ConfigError, match="has 3 checkpoints to average up to step-00000006, and 4 are asked for"):
        averaged(str(root / "run"), 4)
    shutil.copytree(root / "run", tmp_path / "run")
    (tmp_path / "run/checkpoints/step-00000004/.metadata").unlink()
    with pytest.raises(CheckpointError, match="step-00000004: damaged checkpoint"):
        store_average(str(tmp_path / "run"), str(tmp_path / "out"), last=3)
    assert not (tmp_path / "out").exists()
