"""Sweeps on a real Ray Tune, over the engine's fake steps. Over real training, with kills: test_node_loss.py."""

from __future__ import annotations

import json
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import pytest

from lt2.config import ConfigError
from lt2_platform.step_records import died_here
from lt2_platform.storage import Storage
from lt2_workflows.commands.sweeps import sweep_workflow
from lt2_workflows.engine.context import StepContext
from lt2_workflows.sweeps.step import _workflow, run_shared, run_trials
from tests.workflows.conftest import FAKE_STEPS, as_at_a_terminal, wait_until

pytestmark = [pytest.mark.ray, pytest.mark.timeout(900)]


def start(root: Path, *arguments: str) -> subprocess.Popen:
    command = [sys.executable, "-m", "lt2_workflows.cli", "sweep", *arguments, "--storage", str(root)]
    return subprocess.Popen(
        command,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        env=as_at_a_terminal(),
        start_new_session=True,  # so that its process group can be signalled
    )


def finish(driver: subprocess.Popen, code: int = 0) -> str:
    output, _ = driver.communicate(timeout=800)
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


def test_failing_and_worse_trials(tmp_path):
    """Of three trials one ends, one fails, and one does worse from the start, so ASHA stops it with its processes; all
    the same when the driver is killed once the first has ended: the others are compared with it.
    """
    root, trace = tmp_path / "storage", tmp_path / "trace"
    good = "{label: good, settings: {second.lines: 60}}"
    failing = "{label: failing, settings: {second.lines: 60, third.fail: error}}"
    worse = "{label: worse, settings: {second.lines: 4000, second.loss: 9.0}}"  # ends in minutes, if it is not stopped
    sets = ["second.pause_s=0.05", "third.resources.retries=0", f"sweep.trials=[{good}, {failing}, {worse}]"]
    sets += ["sweep.scheduler.step=second", "sweep.scheduler.reduction=4"]
    arguments = [f"{FAKE_STEPS}:chain", *settings(trace, *sets), "--grid", "third.lines=[2]"]
    arguments += ["--concurrent", "1", "--asha", "4"]
    driver = start(root, *arguments)
    wait_until(lambda: list(root.glob("steps/sweep-*/out/trials/good-*.json")), "the first trial's end", 300)
    driver.kill()
    driver.communicate()
    output = finish(start(root, *arguments))
    found = records(root)
    assert {name: record["state"] for name, record in found.items()} == {
        "good-lines-2": "done",
        "failing-lines-2": "failed",
        "worse-lines-2": "stopped",
    }
    assert "failing-lines-2 failed: third, attempt 1: ValueError: this step fails (log:" in output
    assert "worse-lines-2 stopped by the scheduler at step" in output
    stopped = found["worse-lines-2"]
    assert 4 <= stopped["last"]["step"] < 4000
    second = root / "steps" / stopped["steps"]["second"]
    assert not (second / "done.json").exists()
    lease = json.loads((second / "attempts/1/lease.json").read_text())
    wait_until(lambda: died_here(lease), "the end of the stopped trial's step")
    # What all trials share ran once.
    assert [path.name for path in trace.glob("first.attempt*")] == ["first.attempt1"]
    table = (sweep_folder(root) / "out/table.txt").read_text()
    assert "failing lines=2" in table
    assert "stopped early  failed" in table
    assert table in output
    assert "Failed to fetch" not in (sweep_folder(root) / "attempts/2/log").read_text()


@pytest.mark.parametrize("retries", [(1,), (3,), (1, 2)])
def test_a_retry_takes_over_what_ended_and_the_schedulers_newest_results(retries, tmp_path, monkeypatch):
    storage, started, begun = Storage(str(tmp_path)), [], []

    def context_of(retry):
        options = [f"sweep.retry={retry}", "sweep.scheduler={type: asha, step: second, grace_steps: 4}"]
        workflow = sweep_workflow(f"{FAKE_STEPS}:chain", options, ["second.lines=[2, 3, 4]"], None, {})
        return StepContext(storage, workflow, workflow.steps["sweep"])

    def rungs(context):
        folder = f"{context.step.folder}/out/rungs"
        return [storage.read_json(f"{folder}/{name}")[0]["loss"] for name in storage.list(folder)]

    def tune(config, jobs, context, folder):
        started.append(list(jobs))
        begun.append(rungs(context))
        assert {tuple(job["watch"]) for job in jobs.values()} == {("second",)}
        again = ["done" if config.retry == retries[-1] else "failed"]
        for name, state in zip(jobs, again if config.retry else ["done", "failed", "stopped"]):
            storage.write_json(f"{folder}/{name}.json", {"name": name, "state": state, "run": None, "metrics": {}})
            storage.write_json(f"{context.step.folder}/out/rungs/{name}.json", [{"step": 4, "loss": config.retry}])

    monkeypatch.setattr("lt2_workflows.sweeps.tune.tune_trials", tune)
    for number in (0, *retries):
        context = context_of(number)
        config = context.step.config
        workflows = {trial.name: trial.workflow for trial in config.expanded}
        records = run_trials(config, workflows, context, {})
    assert started == [["lines-2", "lines-3", "lines-4"], *[["lines-3"]] * len(retries)]
    assert begun == [[], *([0, before, 0] for before in (0, *retries[:-1]))]
    assert [record["state"] for record in records] == ["done", "done", "stopped"]
    assert rungs(context) == [0, retries[-1], 0]


def test_a_bad_shared_step_fails_once_and_by_name(tmp_path):
    trace, sets = tmp_path / "trace", ["first.fail=bad_input"]
    trace.mkdir()
    sets += [f"{name}.trace={trace}" for name in ("first", "second", "third")]
    workflow = sweep_workflow(f"{FAKE_STEPS}:chain", sets, ["second.lines=[2, 3]"], None, {})
    context = StepContext(Storage(str(tmp_path / "storage")), workflow, workflow.steps["sweep"], lambda values: None)
    config = workflow.configs["sweep"]
    trials = [replace(_workflow(trial, context), recipe_file=FAKE_STEPS) for trial in config.expanded]
    message = r"first, which every trial needs: the corpus is empty; give a source with text \(log: "
    with pytest.raises(ConfigError, match=message):
        run_shared(trials, context)
    assert [path.name for path in trace.iterdir()] == ["first.attempt1"]
    (record,) = context.storage.glob("workflows/*/dag.json")
    found = context.storage.read_json(record)
    assert (found["part_of"], found["shared"]) == (context.step.id, True)
