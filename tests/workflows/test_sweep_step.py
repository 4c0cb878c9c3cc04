"""Sweeps on a real Ray Tune, over the engine's fake steps: failures, kills, early stopping; then over real training."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from lt2_platform.results import ResultsStore
from lt2_platform.storage import Storage
from lt2_workflows.loading import load_workflow
from lt2_workflows.records import died_here
from lt2_workflows.sweep_trial import replayed
from tests.workflows.conftest import FAKE_STEPS, wait_until

pytestmark = [pytest.mark.ray, pytest.mark.timeout(300)]


def start(root: Path, *arguments: str) -> subprocess.Popen:
    environment = {key: value for key, value in os.environ.items() if not key.startswith("RAY_")}
    environment |= {"OMP_NUM_THREADS": "1", "RAY_USAGE_STATS_ENABLED": "0"}
    command = [sys.executable, "-m", "lt2_workflows.cli", "sweep", *arguments, "--storage", str(root)]
    return subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, env=environment)


def finish(driver: subprocess.Popen, code: int = 0) -> str:
    output, _ = driver.communicate(timeout=280)
    assert driver.returncode == code, output
    return output


def sweep_folder(root: Path) -> Path:
    (folder,) = (root / "steps").glob("sweep-*")
    return folder


def records(root: Path) -> dict[str, dict]:
    return {path.stem: json.loads(path.read_text()) for path in sweep_folder(root).glob("out/trials/*.json")}


def settings(trace: Path, *more: str) -> list[str]:
    """Arguments: leave traces, and `more` settings."""
    trace.mkdir(exist_ok=True)
    items = [f"{name}.trace={trace}" for name in ("first", "second", "third")]
    return [part for item in (*items, *more) for part in ("--set", item)]


def attempts(root: Path, step: str) -> int:
    return len(list((root / "steps" / step / "attempts").iterdir()))


def test_driver_killed_and_a_failing_trial(tmp_path):
    """The driver is killed after the first of two trials has ended; only the second, which must fail, runs then."""
    root, trace = tmp_path / "storage", tmp_path / "trace"
    arguments = [f"{FAKE_STEPS}:chain", *settings(trace, "second.pause_s=0.3", "third.resources.retries=0")]
    arguments += ["--grid", "third.fail=['no', error]", "--grid", "second.lines=[3]", "--concurrent", "1"]
    driver = start(root, *arguments)
    wait_until(lambda: list((root / "steps").glob("sweep-*/out/trials/*.json")), "a trial", 200)
    driver.kill()
    driver.communicate()
    before = records(root)
    assert [record["state"] for record in before.values()] == ["done"]
    output = finish(start(root, *arguments))
    found = records(root)
    assert {name: record["state"] for name, record in found.items()} == {
        "fail-no-lines-3": "done",
        "fail-error-lines-3": "failed",
    }
    assert "fail-error-lines-3 failed: third, attempt 1: ValueError: this step fails (log:" in output
    assert before["fail-no-lines-3"] == found["fail-no-lines-3"]
    assert [attempts(root, step) for step in found["fail-no-lines-3"]["steps"].values()] == [1, 1, 1]
    # What all trials share ran once, whatever happened.
    assert [path.name for path in trace.glob("first.attempt*")] == ["first.attempt1"]
    table = (sweep_folder(root) / "out/table.txt").read_text()
    assert "fail=error lines=3" in table
    assert table in output


def test_asha_stops_the_worse_trial_with_its_processes(tmp_path):
    root, trace = tmp_path / "storage", tmp_path / "trace"
    arguments = [f"{FAKE_STEPS}:chain", *settings(trace, "second.lines=100", "second.pause_s=0.04")]
    arguments += ["--grid", "second.loss=[1.0, 5.0]", "--concurrent", "1", "--asha", "4"]
    arguments += ["--set", "sweep.scheduler.step=second", "--set", "sweep.scheduler.reduction=2"]
    output = finish(start(root, *arguments))
    found = records(root)
    assert (found["loss-1-0"]["state"], found["loss-5-0"]["state"]) == ("done", "stopped")
    assert 4 <= found["loss-5-0"]["last"]["step"] < 100
    assert "loss-5-0 stopped by the scheduler at step" in output
    stopped = root / "steps" / found["loss-5-0"]["steps"]["second"]
    assert not (stopped / "done.json").exists()
    lease = json.loads((stopped / "attempts/1/lease.json").read_text())
    wait_until(lambda: died_here(lease), "the end of the stopped trial's step")


def test_a_bad_shared_step_fails_once(tmp_path):
    root, trace = tmp_path / "storage", tmp_path / "trace"
    arguments = [f"{FAKE_STEPS}:chain", *settings(trace, "first.fail=bad_input"), "--grid", "second.lines=[2, 3]"]
    output = finish(start(root, *arguments), code=2)
    assert "first, which every trial needs: the corpus is empty; give a source with text (log:" in output
    assert [path.name for path in trace.iterdir()] == ["first.attempt1"]


def test_a_restored_scheduler_sees_the_stored_curve(tmp_path):
    storage = Storage(str(tmp_path))
    workflow = load_workflow(f"{FAKE_STEPS}:chain")
    assert list(replayed(storage, workflow, "second")) == []
    with ResultsStore(storage).create_run(workflow.steps["second"].id, {"config": {}}) as run:
        for step in range(1, 201):
            run.log(step, {"loss": float(step)})
    points = list(replayed(storage, workflow, "second"))
    assert [point["step"] for point in points] == list(range(4, 201, 4))
    assert points[-1]["loss"] == 195.5  # the mean of the last ten
    assert points[0]["loss"] == 2.5
