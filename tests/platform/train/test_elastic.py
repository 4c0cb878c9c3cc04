"""A number of workers within a range: a node that goes takes a worker with it, and the run goes on with fewer."""

import os
import threading
import time

import pytest
import ray
from ray.cluster_utils import Cluster

from lt2.config import ConfigError
from lt2_platform.train import checkpoint, run_folder
from tests.platform.train.packed import write_dataset
from tests.platform.train.test_trainer import STEPS, config, run
from tests.platform.train.test_worker import losses

pytestmark = [pytest.mark.ray, pytest.mark.timeout(600)]


@pytest.fixture
def two_nodes(monkeypatch):
    """One CPU each; the second can be taken away."""
    monkeypatch.setenv("RAY_TRAIN_WORKER_GROUP_START_TIMEOUT_S", "10")
    settings = {"include_dashboard": False, "_system_config": {"worker_niceness": 0}}
    temporary = f"/tmp/lt2-elastic-{os.getpid()}"
    cluster = Cluster(initialize_head=True, head_node_args={"num_cpus": 1, "temp_dir": temporary, **settings})
    second = cluster.add_node(num_cpus=1)
    ray.init(address=cluster.address, log_to_driver=False)
    yield cluster, second
    ray.shutdown()
    cluster.shutdown()


def test_a_lost_node_leaves_a_run_with_fewer_workers_and_the_same_losses(tmp_path, two_nodes):
    cluster, second = two_nodes
    write_dataset(tmp_path / "data")
    # A step of 20 ms or so leaves the time in which the node goes.
    settings, sizes = config(steps=STEPS, checkpoint_every=10), []

    def lose_the_node():
        folder = str(tmp_path / "run/checkpoints")
        while not (names := checkpoint.complete(folder)):
            time.sleep(0.005)
        sizes.append(ray.cluster_resources()["CPU"])
        cluster.remove_node(second, allow_graceful=False)
        sizes.append(names)

    thread = threading.Thread(target=lose_the_node, daemon=True)
    thread.start()
    summary = run(tmp_path, settings, num_workers=2, min_workers=1, cpus_per_worker=1, data_reader="direct")
    thread.join()
    assert summary["step"] == STEPS
    assert summary["position"] == 8 * STEPS
    assert sorted(losses(tmp_path)) == list(range(1, STEPS + 1))
    attempts = {checkpoint.Storage(str(tmp_path / "run/checkpoints" / name)).read_json("checkpoint.json")["world_size"]
                for name in checkpoint.complete(str(tmp_path / "run/checkpoints"))}  # fmt: skip
    assert attempts == {1}


def test_every_number_of_workers_in_the_range_must_divide_the_batch(tmp_path):
    write_dataset(tmp_path / "data")
    places = {"data": str(tmp_path / "data"), "out": str(tmp_path / "run"), "storage_root": str(tmp_path)}
    with pytest.raises(ConfigError, match="global_batch_size 8 is not divisible by 3 workers"):
        run_folder.open_run(config(), run_id="run", num_workers=4, min_workers=2, **places)
    with pytest.raises(ConfigError, match="train.shard_workers 4 does not divide 2 workers"):
        run_folder.open_run(config(shard_workers=4), run_id="run", num_workers=2, min_workers=1, **places)
    assert not (tmp_path / "run").exists()
