"""A number of workers within a range: where there is room for fewer, a run that had more goes on with those."""

import os
from pathlib import Path

import pytest
import ray

from lt2.config import ConfigError
from lt2.train.loop import STOP, PreemptedError
from lt2_platform.storage import Storage
from lt2_platform.train import run_folder, worker
from lt2_platform.train.on_ray.trainer import pretrain
from tests.platform.train.on_ray.test_trainer import LOCAL
from tests.platform.train.packed import checkpoints, write_dataset
from tests.platform.train.test_worker import losses, open_run, pretrain_config
from tests.ranks import run_ranks

CONFIG = {"steps": 8, "checkpoint_every": 4}


@pytest.fixture
def room_for_one():
    # Unix sockets allow about 100 characters, so not pytest's own long folder.
    ray.init(_temp_dir=f"/tmp/lt2-elastic-{os.getpid()}", **LOCAL | {"num_cpus": 1})
    yield
    ray.shutdown()


def preempted(root):
    asked = iter([0, 0, STOP] + [0] * 9)
    with pytest.raises(PreemptedError):
        worker.run(open_run(Path(root), pretrain_config(**CONFIG)), stop=lambda: next(asked))


def world_size(out, name):
    return Storage(f"{out}/checkpoints/{name}").read_json("checkpoint.json")["world_size"]


@pytest.mark.ray
@pytest.mark.timeout(600)
def test_a_run_of_two_workers_goes_on_with_the_one_there_is_room_for(tmp_path, room_for_one):
    write_dataset(tmp_path / "data")
    worker.run(open_run(tmp_path, pretrain_config(**CONFIG), "undisturbed"))
    run_ranks(preempted, 2, str(tmp_path))
    (first,) = checkpoints(tmp_path / "run")
    assert world_size(tmp_path / "run", first) == 2
    summary = pretrain(
        pretrain_config(**CONFIG),
        data=str(tmp_path / "data"),
        out=str(tmp_path / "run"),
        run_id="run",
        storage_root=str(tmp_path),
        num_workers=2,
        min_workers=1,
        cpus_per_worker=1,
        data_reader="direct",
    )
    assert (summary["step"], summary["position"]) == (8, 64)
    assert world_size(tmp_path / "run", checkpoints(tmp_path / "run")[-1]) == 1
    assert losses(tmp_path) == pytest.approx(losses(tmp_path, "undisturbed"), rel=1e-5)


def test_every_number_of_workers_in_the_range_must_divide_the_batch(tmp_path):
    write_dataset(tmp_path / "data")
    places = {"data": str(tmp_path / "data"), "out": str(tmp_path / "run"), "storage_root": str(tmp_path)}
    with pytest.raises(ConfigError, match="global_batch_size 8 is not divisible by 3 workers"):
        run_folder.open_run(pretrain_config(), run_id="run", num_workers=4, min_workers=2, **places)
    with pytest.raises(ConfigError, match="train.shard_workers 4 does not divide 2 workers"):
        run_folder.open_run(pretrain_config(shard_workers=4), run_id="run", num_workers=2, min_workers=1, **places)
    assert not (tmp_path / "run").exists()
