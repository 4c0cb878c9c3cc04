"""Runs that go on from another run: with its moments, random state and place in the data."""

import json
import shutil
from dataclasses import replace
from pathlib import Path

import pytest
import torch

from lt2.config import ConfigError, LinearRope, UniformLayout
from lt2.mixer_configs import FullConfig
from lt2.model import build
from lt2.train.loop import STOP, PreemptedError
from lt2_platform.results.store import ResultsStore
from lt2_platform.storage import Storage
from lt2_platform.train import worker
from lt2_platform.train.checkpoints import checkpoint, integrity
from lt2_platform.train.checkpoints.matching import check_continues, lineage
from lt2_platform.train.config import Sources
from tests.platform.train.packed import SEQ_LEN, TOKENIZER, checkpoints, model_config, train_config, write_dataset
from tests.platform.train.test_worker import losses, open_run, pretrain_config, weights

COOL = {"type": "wsd", "decay_steps": 3}


def trunk(root: Path, **train):
    """Four steps at a constant rate."""
    worker.run(open_run(root, pretrain_config(steps=4, schedule={"type": "constant"}, **train), "trunk"))


def branch(root: Path, place="trunk", name="branch", **train):
    sources = Sources(continue_from=str(root / place))
    return open_run(root, pretrain_config(steps=7, schedule=COOL, **train), name, sources=sources)


@pytest.fixture(scope="module")
def root(tmp_path_factory):
    root = tmp_path_factory.mktemp("continue")
    write_dataset(root / "data")
    trunk(root)
    worker.run(open_run(root, pretrain_config(steps=7, schedule=COOL), "whole"))
    summary = worker.run(branch(root))
    assert (summary["step"], summary["position"]) == (7, 56)
    return root


def same_end(root, name):
    expected = {step: loss for step, loss in losses(root, "whole").items() if step > 4}
    assert losses(root, name) == expected
    for key, value in weights(root / "whole").items():
        assert torch.equal(weights(root / name)[key], value), key


def test_a_branch_ends_as_the_run_that_never_stopped(root):
    same_end(root, "branch")
    assert checkpoints(root / "trunk") == ["step-00000002", "step-00000004"]  # it is only read


def test_momenta_of_muon_go_on_too(tmp_path):
    write_dataset(tmp_path / "data")
    trunk(tmp_path, optimizer={"type": "muon"})
    worker.run(open_run(tmp_path, pretrain_config(steps=7, schedule=COOL, optimizer={"type": "muon"}), "whole"))
    worker.run(branch(tmp_path, optimizer={"type": "muon"}))
    same_end(tmp_path, "branch")
    with pytest.raises(ConfigError, match=r"was trained with train.optimizer 'muon'; set that, or use `start`"):
        branch(tmp_path, name="other")


def test_workers_read_the_checkpoint_that_was_meant_when_the_run_began(root):
    assert branch(root, name="meant").sources == {"continue_from": str(root / "trunk/checkpoints/step-00000004")}


def test_an_interrupted_branch_goes_on_from_its_own_checkpoint(root):
    asked = []
    with pytest.raises(PreemptedError):
        worker.run(branch(root, name="stopped"), stop=lambda: asked.append(1) or STOP * (len(asked) == 2))
    assert checkpoints(root / "stopped") == ["step-00000006"]
    worker.run(branch(root, name="stopped"))
    same_end(root, "stopped")


def test_a_branch_of_another_checkpoint_is_another_run(root):
    with pytest.raises(ConfigError, match=r"holds a run with another config \(sources.continue_from '"):
        branch(root, place="trunk/checkpoints/step-00000002")


def test_a_damaged_trunk_is_refused(root, tmp_path):
    shutil.copytree(root / "trunk/checkpoints/step-00000004", tmp_path / "step-00000004")
    (shard,) = (tmp_path / "step-00000004").glob("*.distcp")
    shard.write_bytes(shard.read_bytes()[:-1])
    with pytest.raises(integrity.CheckpointError, match="damaged checkpoint"):
        worker.run(branch(root, place=tmp_path / "step-00000004", name="from-damaged"))
    assert checkpoints(root / "from-damaged") == []


def test_what_cannot_go_on_is_refused_before_anything_is_written(root):
    with pytest.raises(ConfigError, match=r"step-00000004 was trained with train.seed 5; set that, or use `start`"):
        branch(root, name="other", seed=6)
    assert not (root / "other").exists()


def test_repeats_come_from_repeats(root, tmp_path):
    run = ResultsStore(Storage(str(root))).run("branch")
    config, info = run.config, checkpoint.read_info(checkpoint.resolve(str(root / "trunk")))
    assert run.info["tokens_before"] == info.state.tokens == 4 * 8 * SEQ_LEN
    assert run.info["models"] == {"continue_from": str(root / "trunk")}
    assert config["sources"] == {"continue_from": lineage(info)}
    assert checkpoint.read_info(checkpoint.resolve(str(root / "branch"))).sources == config["sources"]
    assert "sources" not in ResultsStore(Storage(str(root))).run("trunk").config

    reseeded = replace(info, train=info.train | {"seed": 6, "init_seed": 7}, uri="elsewhere")
    assert lineage(reseeded) == lineage(info)
    others = [
        replace(info, train=info.train | {"lr": 1.0}),
        replace(info, state=replace(info.state, step=3)),
        replace(info, data="e" * 64),
        replace(info, tokenizer=info.tokenizer | {"sha256": "1" * 64}),
        replace(info, model=model_config(n_loops=3)),
        replace(info, sources={"start": "0" * 12}),
    ]
    assert len({lineage(each) for each in [info, *others]}) == 1 + len(others)


def test_the_origin_that_older_runs_have_stored_is_still_that_of_their_checkpoints():
    golden = checkpoint.read_info(checkpoint.resolve(str(Path(__file__).parent / "golden")))
    assert lineage(golden) == "14d2f6d306e1"
    for younger in ({"rope_scaling": LinearRope(factor=2.0)}, {"layout": UniformLayout(mixer=FullConfig(bias="qkv"))}):
        changed = golden.model.model_copy(update=younger)
        assert lineage(replace(golden, model=changed)) != lineage(golden)


def test_what_a_checkpoint_can_be_gone_on_from(root):
    info = checkpoint.read_info(str(root / "trunk/checkpoints/step-00000004"))
    assert info.data == "f" * 64

    def told(found=info, model=None, data="f" * 64, live=False, **train):
        ours = (model_config() if model is None else model, train_config(**train))
        with pytest.raises(integrity.CheckpointError) as error:
            check_continues(found, *ours, TOKENIZER, data, live=live)
        return str(error.value)

    check_continues(info, model_config(), train_config(steps=5), TOKENIZER, "f" * 64)
    check_continues(info, model_config(), train_config(steps=5), TOKENIZER, None)
    check_continues(replace(info, data=None), model_config(), train_config(), TOKENIZER, "f" * 64)
    assert "has 4 steps already; raise train.steps" in told(steps=4)
    assert "was trained on another dataset" in told(data="e" * 64)
    check_continues(info, model_config(), train_config(global_batch_size=4), TOKENIZER, "f" * 64)
    assert "with train.global_batch_size 8; set that" in told(live=True, global_batch_size=4)
    assert "model differs in rope_theta; use `start` to take only its weights" in told(
        model=model_config(rope_theta=5e5)
    )
    assert "holds weights only" in told(replace(info, train={}))
    other = json.loads(json.dumps(info.train)) | {"objective": {"type": "exit_gate"}}
    assert "was trained with train.objective 'exit_gate'" in told(replace(info, train=other))
    older = {key: value for key, value in info.train.items() if key != "optimizer"}  # of before there was a choice
    check_continues(replace(info, train=older), model_config(), train_config(), TOKENIZER, "f" * 64)
    assert "was trained with train.optimizer 'adamw'" in told(optimizer={"type": "muon"})


@pytest.mark.parametrize(("init_seed", "expected"), [(None, 1), (5, 5), (0, 0)])
def test_weights_begin_by_their_own_seed_where_they_have_one(init_seed, expected):
    config = train_config(seed=1, init_seed=init_seed)
    made, _ = worker._build_model(model_config(), config, torch.device("cpu"), SEQ_LEN, keep=True, start=None)
    theirs = build(model_config(), seed=expected).state_dict()
    assert all(torch.equal(value, theirs[name]) for name, value in made.state_dict().items())
    assert not torch.equal(theirs["embed.weight"], build(model_config(), seed=9).embed.weight)
