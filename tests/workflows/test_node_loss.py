"""Nodes and drivers lost on a cluster of several raylets: what comes out is what an undisturbed run gives."""

from __future__ import annotations

import json
import os
import pickle
import shutil
import subprocess
import sys
import tempfile
from pathlib import Path

import pytest
import torch

from lt2_platform.evaluate.checkpoints import evaluate_checkpoint
from lt2_platform.evaluate.config import HarnessConfig
from lt2_platform.evaluate.harness.tasks import packs
from lt2_platform.results.store import ResultsStore
from lt2_platform.storage import Storage
from lt2_platform.train import worker
from lt2_platform.train.checkpoints.checkpoint import load_model
from lt2_workflows.commands.sweeps import sweep_workflow
from tests.platform.evaluate.items import arc, write
from tests.platform.evaluate.tiny import model, save
from tests.platform.train.packed import write_dataset
from tests.workflows.conftest import wait_until

pytestmark = [pytest.mark.ray, pytest.mark.timeout(1200)]

RECIPE = f"{Path(__file__).with_name('fault_recipe.py')}:trained"
# A lost node is noticed within seconds; on a busy machine a slow one is not taken for lost.
HEALTH = {"health_check_initial_delay_ms": 0, "health_check_period_ms": 500, "health_check_failure_threshold": 8}


@pytest.fixture(scope="module")
def head():
    """A head without CPUs, as a cluster's is, for the tests one after the other."""
    with pytest.MonkeyPatch.context() as patch:
        for name in [name for name in os.environ if name.startswith("RAY_")]:
            patch.delenv(name)
        patch.setenv("RAY_AUTH_MODE", "disabled")
        patch.setenv("RAY_USAGE_STATS_ENABLED", "0")
        patch.setenv("RAY_TRAIN_HEALTH_CHECK_INTERVAL_S", "0.5")
        patch.setenv("OMP_NUM_THREADS", "1")
        import ray
        from ray.cluster_utils import Cluster

        folder = tempfile.mkdtemp(prefix="lt2-c-")
        head = {"num_cpus": 0, "temp_dir": folder, "include_dashboard": False, "_system_config": HEALTH}
        made = Cluster(initialize_head=True, head_node_args=head)
        yield made
        ray.shutdown()
        made.shutdown()
        shutil.rmtree(folder, ignore_errors=True)


@pytest.fixture
def cluster(head):
    """Two nodes with one CPU each, beside the head."""
    while len(head.worker_nodes) < 2:
        head.add_node(num_cpus=1)
    return head


@pytest.fixture
def start(head, tmp_path):
    """Starts a driver on the cluster, with its output in `<tmp_path>/log`; it does not outlive its test."""
    drivers: list[subprocess.Popen] = []

    def start(*command: str) -> subprocess.Popen:
        environment = dict(os.environ) | {"RAY_ADDRESS": head.address}
        with (tmp_path / "log").open("a") as log:
            drivers.append(subprocess.Popen([sys.executable, *command], stdout=log, stderr=log, env=environment))
        return drivers[-1]

    yield start
    for driver in drivers:
        driver.kill()
        driver.wait()


def lose(cluster, node) -> None:
    """SIGKILL to the raylet and all of its workers."""
    cluster.remove_node(node, allow_graceful=False)


def undisturbed(config, data: str, out: Path):
    """(weights, losses) of the same training in this process, without Ray."""
    manifest = Storage(data).read_json("manifest.json")
    architecture = config.model.model_dump() | {"vocab_size": manifest["tokenizer"]["vocab_size"]}
    spec = worker.WorkerSpec(architecture, config.train.model_dump(), data, str(out / "run"), "r", str(out))
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        worker.run(spec)
    finally:
        torch.set_num_threads(threads)
    return weights_and_losses(str(out / "run"), str(out), "r")


def weights_and_losses(run_folder: str, root: str, run: str):
    metrics = ResultsStore(Storage(root)).metrics(run, ["loss"]).to_pydict()
    return load_model(run_folder)[0].state_dict(), dict(zip(metrics["step"], metrics["value"], strict=True))


def test_a_sweep_loses_a_node_and_then_its_driver(cluster, start, tmp_path):
    """Two trials train side by side; one's node is lost, so it goes on on the other; then the driver is killed."""
    data, root = write_dataset(tmp_path / "data"), tmp_path / "storage"
    gate = tmp_path / "gate"
    sets = [f"pretrain.data={data}", f"evaluate.data={data}", f"pretrain.train.objective.gate={gate}"]
    grid = ["pretrain.train.lr=[0.01, 0.003]"]
    arguments = ["-m", "lt2_workflows.cli", "sweep", RECIPE, "--storage", str(root), "--lease-ttl", "3"]
    arguments += [part for item in sets for part in ("--set", item)] + ["--grid", *grid]
    trials = sweep_workflow(RECIPE, sets, grid, None, {}).configs["sweep"].expanded
    folders = [root / trial.workflow.steps["pretrain"].folder for trial in trials]

    def saved(folder: Path) -> bool:
        return bool(list(folder.glob("out/checkpoints/step-*/COMPLETE")))

    driver = start(*arguments)
    wait_until(lambda: all(map(saved, folders)), "a checkpoint of both trials", 300)
    lose(cluster, next(iter(cluster.worker_nodes)))
    gate.touch()
    wait_until(lambda: any((folder / "done.json").exists() for folder in folders), "the surviving trial", 300)
    ended = [folder for folder in folders if (folder / "done.json").exists()]
    assert len(ended) == 1, "both ended before the driver was killed"
    driver.kill()
    driver.wait()
    assert start(*arguments).wait(900) == 0, (tmp_path / "log").read_text()
    attempts = {folder.name: len(list((folder / "attempts").iterdir())) for folder in ended}
    for trial, folder in zip(trials, folders, strict=True):
        found = weights_and_losses(str(folder / "out"), str(root), folder.name)
        expected = undisturbed(trial.workflow.configs["pretrain"], data, tmp_path / trial.name)
        assert found[1] == expected[1]
        assert all(torch.equal(found[0][name], value) for name, value in expected[0].items())
    (record,) = {
        (record["state"], record["error"])
        for path in root.glob("steps/sweep-*/out/trials/*.json")
        if (record := json.loads(path.read_text()))
    }
    assert record == ("done", None)
    # What had ended before the driver was killed did not run again.
    assert attempts == {folder.name: 1 for folder in ended}


EVALUATE = """
import pickle, sys
import ray
from lt2_platform.evaluate.checkpoints import evaluate_checkpoint
with open(sys.argv[1], "rb") as file:
    checkpoint, config, out = pickle.load(file)
ray.init(log_to_driver=False)
rows = evaluate_checkpoint(checkpoint, [config], data=None, out=out, actors=2).rows
with open(sys.argv[1] + ".rows", "wb") as file:
    pickle.dump(rows, file)
"""


def test_an_evaluation_loses_a_node(cluster, start, tmp_path):
    """In a process of its own, as in life: actors of earlier Rays in this one have the same ids, and if their handles
    are collected late they take these along."""
    pack = str(tmp_path / "pack")
    packs.build(pack, write(tmp_path / "items", arc_easy=arc(40)))
    checkpoint = save(tmp_path / "run", model())
    config = HarnessConfig(pack=pack, tasks=("arc_easy",), batch_size=1, max_length=320)
    expected = evaluate_checkpoint(checkpoint, [config], data=None, out=str(tmp_path / "here"))
    job = tmp_path / "job"
    job.write_bytes(pickle.dumps((checkpoint, config, str(tmp_path / "out"))))
    driver = start("-c", EVALUATE, str(job))

    def answered() -> bool:
        assert driver.poll() is None, (tmp_path / "log").read_text()  # too early to be disturbed
        return len(list((tmp_path / "out").glob("**/batches/*/*.json"))) >= 2

    wait_until(answered, "the first answers", 200)
    lose(cluster, next(iter(cluster.worker_nodes)))
    assert driver.poll() is None, "the evaluation ended too early to be disturbed"
    cluster.add_node(num_cpus=1)
    assert driver.wait(300) == 0, (tmp_path / "log").read_text()
    assert pickle.loads((tmp_path / "job.rows").read_bytes()) == expected.rows
