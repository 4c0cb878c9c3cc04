"""The quickstart's real prepare and pretrain, small: after kill -9 of the driver and then of a training worker, every
bit is what two plain ranks without Ray give. Training is held to a step a second until both are dead."""

from __future__ import annotations

import os
import re
import signal
import subprocess
import sys
from contextlib import suppress
from functools import cache
from pathlib import Path

import psutil
import pytest
import torch

from lt2_platform.results.store import ResultsStore
from lt2_platform.storage import Storage
from lt2_platform.train import worker
from lt2_platform.train.checkpoints.checkpoint import load_model
from lt2_platform.train.config import PretrainConfig, Workers
from lt2_platform.train.run_folder import open_run
from lt2_workflows.loading import load_workflow
from tests.ranks import run_ranks
from tests.workflows import fault_recipe
from tests.workflows.conftest import as_at_a_terminal, wait_until

pytestmark = [pytest.mark.ray, pytest.mark.timeout(600)]

RECIPE, STEPS = f"{Path(fault_recipe.__file__)}:quickstart", 24
OVERRIDES = [
    "prepare.max_documents=40",
    "prepare.seq_len=32",
    f"pretrain.train.steps={STEPS}",
    "pretrain.train.warmup_steps=5",
    "pretrain.train.checkpoint_every=4",
    "pretrain.train.objective.hold=5",
    "pretrain.train.objective.hold_s=1",
    "pretrain.train.global_batch_size=4",
    "pretrain.model.dim=16",
    "pretrain.model.ffn_hidden=32",
    "pretrain.model.n_layers=2",
    "pretrain.model.n_loops=2",
    "pretrain.model.layout.ratio=1:1",
]


def overrides(root: Path) -> list[str]:
    return [*OVERRIDES, f"pretrain.train.objective.gate={root / 'gate'}"]


def start(root: Path) -> subprocess.Popen:
    sets = [part for item in overrides(root) for part in ("--set", item)]
    command = [sys.executable, "-m", "lt2_workflows.cli", "run", RECIPE, "--storage", str(root), *sets]
    return subprocess.Popen(
        command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, env=as_at_a_terminal()
    )


@cache  # asked every few milliseconds while a test waits
def pretrain_folder(root: Path) -> Path:
    return root / load_workflow(RECIPE, overrides(root)).steps["pretrain"].folder


def outcome(root: Path, out: Path) -> tuple[dict[str, torch.Tensor], list[tuple[int, float]]]:
    """(weights, loss of every step)"""
    model, _, _ = load_model(str(out))
    metrics = ResultsStore(Storage(str(root))).metrics(pretrain_folder(root).name, ["loss"]).to_pydict()
    return model.state_dict(), list(zip(metrics["step"], metrics["value"], strict=True))


def saved(root: Path) -> set[str]:
    return {path.parent.name for path in pretrain_folder(root).glob("out/checkpoints/step-*/COMPLETE")}


def wait_for_a_checkpoint(root: Path, after: str = "") -> None:
    wait_until(lambda: max(saved(root), default="") > after, "a checkpoint", timeout_s=300)
    assert not (pretrain_folder(root) / "done.json").exists(), "training ended before it could be killed"


def titles_of(pid: int) -> set[str]:
    """Of its descendants, among them ray::CLASS for each actor."""
    found = set()
    for child in psutil.Process(pid).children(recursive=True):
        with suppress(psutil.Error):  # it has just ended
            found.update(part.partition(".")[0] for part in child.cmdline())
    return found


def rank_run(data: str, root: str) -> None:
    step = load_workflow(RECIPE, overrides(Path(root))).configs["pretrain"]
    spec = open_run(
        PretrainConfig(model=step.model, train=step.train),
        data=data,
        out=f"{root}/out",
        run_id=pretrain_folder(Path(root)).name,
        storage_root=root,
        workers=Workers(num_workers=2),
    )
    worker.run(spec)


def test_the_driver_and_then_a_training_worker_are_killed(tmp_path):
    root, plain = tmp_path / "storage", tmp_path / "plain"
    driver = start(root)
    wait_for_a_checkpoint(root)
    driver.kill()
    driver.communicate()

    log = pretrain_folder(root) / "attempts" / "2" / "log"

    def logged(pattern: str) -> list[str]:
        return re.findall(pattern, log.read_text()) if log.exists() else []

    driver, second = start(root), r"pid=(\d+)\) world_rank=1"
    wait_until(lambda: logged(second), "the second attempt's workers", timeout_s=300)
    wait_for_a_checkpoint(root, after=max(saved(root)))
    titles = titles_of(driver.pid)
    assert "ray::RayTrainWorker" in titles
    assert not titles & {
        "ray::PreemptionWatcher",
        "ray::DatasetManager",
    }  # they cost as much as imports of Ray Train do
    os.kill(int(logged(second)[-1]), signal.SIGKILL)
    (root / "gate").touch()
    output, _ = driver.communicate(timeout=400)
    assert driver.returncode == 0, output
    assert not logged("PlacementGroupCleaner")  # it would fill the log, see trainer.Trainer
    first, *_, last = logged(r"resuming \S+step-(\d+)")
    assert 4 <= int(first) < int(last) < STEPS

    (data,) = root.glob("steps/prepare-*/out")
    plain.mkdir()
    (plain / "gate").touch()
    run_ranks(rank_run, 2, str(data), str(plain), timeout_s=400)
    weights, losses = outcome(root, pretrain_folder(root) / "out")
    expected_weights, expected_losses = outcome(plain, plain / "out")
    assert [step for step, _ in expected_losses] == list(range(1, STEPS + 1))
    assert losses == expected_losses
    assert weights.keys() == expected_weights.keys()
    assert all(torch.equal(weights[name], expected_weights[name]) for name in weights)
