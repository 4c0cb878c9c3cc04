"""The quickstart's real prepare and pretrain, small: after kill -9 of the driver or of a training worker, every bit is
what two plain ranks without Ray give."""

from __future__ import annotations

import os
import re
import shutil
import signal
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from lt2_platform.results.store import ResultsStore
from lt2_platform.storage import Storage
from lt2_platform.train import worker
from lt2_platform.train.checkpoints.checkpoint import load_model
from lt2_platform.train.config import PretrainConfig
from lt2_platform.train.run_folder import open_run
from lt2_workflows.loading import load_workflow
from tests.ranks import run_ranks
from tests.workflows.conftest import wait_until

pytestmark = [pytest.mark.ray, pytest.mark.timeout(600)]

OVERRIDES = [
    "prepare.max_documents=40",
    "prepare.seq_len=32",
    "pretrain.train.steps=60",
    "pretrain.train.warmup_steps=5",
    "pretrain.train.checkpoint_every=4",
    "pretrain.train.global_batch_size=4",
    "pretrain.model.dim=16",
    "pretrain.model.ffn_hidden=32",
    "pretrain.model.n_layers=2",
    "pretrain.model.n_loops=2",
    "pretrain.model.layout.ratio=1:1",
]


def start(root: Path, step: str) -> subprocess.Popen:
    sets = [part for item in OVERRIDES for part in ("--set", item)]
    command = [sys.executable, "-m", "lt2_workflows.cli", "step", "quickstart", step, "--storage", str(root), *sets]
    environment = {key: value for key, value in os.environ.items() if not key.startswith("RAY_")}
    environment |= {"OMP_NUM_THREADS": "1", "RAY_USAGE_STATS_ENABLED": "0"}
    return subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, env=environment)


def finish(driver: subprocess.Popen) -> str:
    output, _ = driver.communicate(timeout=400)
    assert driver.returncode == 0, output
    return output


def pretrain_folder(root: Path) -> Path:
    return root / load_workflow("quickstart", OVERRIDES).steps["pretrain"].folder


def outcome(root: Path) -> tuple[dict[str, torch.Tensor], list[tuple[int, float]]]:
    """(weights, loss of every step)"""
    folder = pretrain_folder(root)
    model, _, _ = load_model(str(folder / "out"))
    metrics = ResultsStore(Storage(str(root))).metrics(folder.name, ["loss"]).to_pydict()
    return model.state_dict(), list(zip(metrics["step"], metrics["value"], strict=True))


def assert_same(root: Path, undisturbed: Path) -> None:
    weights, losses = outcome(root)
    expected_weights, expected_losses = outcome(undisturbed)
    assert [step for step, _ in expected_losses] == list(range(1, 61))
    assert losses == expected_losses
    assert weights.keys() == expected_weights.keys()
    assert all(torch.equal(weights[name], expected_weights[name]) for name in weights)


def wait_for_checkpoint(root: Path) -> None:
    checkpoints = pretrain_folder(root) / "out" / "checkpoints"
    wait_until(lambda: list(checkpoints.glob("step-*/COMPLETE")), "a checkpoint", timeout_s=300)
    assert not (pretrain_folder(root) / "done.json").exists(), "training ended before it could be killed"


@pytest.fixture(scope="module")
def prepared(tmp_path_factory):
    root = tmp_path_factory.mktemp("prepared") / "storage"
    finish(start(root, "prepare"))
    return root


@pytest.fixture(scope="module")
def undisturbed(prepared):
    root = prepared.with_name("undisturbed")
    shutil.copytree(prepared, root)
    run_ranks(rank_run, 2, str(root), timeout_s=400)
    return root


def rank_run(root):
    workflow, folder = load_workflow("quickstart", OVERRIDES), pretrain_folder(Path(root))
    step = workflow.configs["pretrain"]
    spec = open_run(
        PretrainConfig(model=step.model, train=step.train),
        data=f"{root}/{workflow.steps['prepare'].folder}/out",
        out=f"{folder}/out",
        run_id=folder.name,
        storage_root=root,
        num_workers=2,
    )
    worker.run(spec)


def test_driver_killed_while_training(prepared, undisturbed, tmp_path):
    root = tmp_path / "storage"
    shutil.copytree(prepared, root)
    driver = start(root, "pretrain")
    wait_for_checkpoint(root)
    driver.kill()
    driver.communicate()
    finish(start(root, "pretrain"))
    assert (pretrain_folder(root) / "attempts" / "2" / "log").exists()
    assert_same(root, undisturbed)


def test_training_worker_killed(prepared, undisturbed, tmp_path):
    root = tmp_path / "storage"
    shutil.copytree(prepared, root)
    driver = start(root, "pretrain")
    wait_for_checkpoint(root)
    log = (pretrain_folder(root) / "attempts" / "1" / "log").read_text()
    assert "PlacementGroupCleaner" not in log  # it would fill the log, see trainer.Trainer
    os.kill(int(re.findall(r"pid=(\d+)\) world_rank=1", log)[-1]), signal.SIGKILL)
    finish(driver)
    assert "resuming" in (pretrain_folder(root) / "attempts" / "1" / "log").read_text()
    assert_same(root, undisturbed)
