"""Ctrl-C, SIGTERM and a second signal to a sweep, whose trials run in processes that no signal reaches."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import time
from pathlib import Path

import pytest
import torch

from lt2_platform.step_records import died_here
from lt2_workflows.commands.sweeps import sweep_workflow
from tests.platform.train.packed import write_dataset
from tests.workflows import fault_recipe
from tests.workflows.conftest import FAKE_STEPS, wait_until
from tests.workflows.sweeps.test_step import finish, records, start, sweep_folder
from tests.workflows.test_node_loss import undisturbed, weights_and_losses

RECIPE = f"{Path(fault_recipe.__file__)}:training"

pytestmark = [pytest.mark.ray, pytest.mark.timeout(1200)]


def interrupted(root: Path, driver: subprocess.Popen, number: int) -> str:
    """The output of a driver that was told to stop and did; it left the lease of the sweep's step behind in order."""
    output = finish(driver, {signal.SIGINT: 130, signal.SIGTERM: 143}[signal.Signals(number)])
    assert "Traceback" not in output
    attempt = max((sweep_folder(root) / "attempts").iterdir())
    assert json.loads((attempt / "lease.json").read_text())["released"]
    assert json.loads((attempt / "state.json").read_text())["state"] == "interrupted"
    return output


def test_running_trials_save_and_the_same_command_goes_on(tmp_path):
    data, root, gate = write_dataset(tmp_path / "data"), tmp_path / "storage", tmp_path / "gate"
    sets = [f"pretrain.data={data}", "pretrain.train.checkpoint_every=1000", "pretrain.resources.data_reader=direct"]
    sets += [f"pretrain.train.objective.{item}" for item in (f"gate={gate}", "hold=2", "hold_s=4")]
    grid = ["pretrain.train.lr=[0.01]"]  # several at a time: below
    arguments = [RECIPE, *(part for item in sets for part in ("--set", item)), "--grid", *grid]
    trials = sweep_workflow(RECIPE, sets, grid, None, {}).configs["sweep"].expanded
    folders = [root / trial.workflow.steps["pretrain"].folder for trial in trials]

    def checkpoints() -> list[list[str]]:
        return [[path.parent.name for path in folder.glob("out/checkpoints/*/COMPLETE")] for folder in folders]

    driver = start(root, *arguments)
    wait_until(lambda: all((folder / "out/progress.json").exists() for folder in folders), "the trial", 600)
    assert checkpoints() == [[]]
    os.killpg(driver.pid, signal.SIGTERM)  # of all that the driver started, none but itself is in its group
    began = time.monotonic()
    output = interrupted(root, driver, signal.SIGTERM)
    assert time.monotonic() - began < 60
    assert "sweep      saves a checkpoint and stops within 60 s; interrupt again to stop at once\n" in output
    assert "interrupted: stopped as asked; 0 of 1 trials have ended\n" in output
    saved = checkpoints()
    assert [len(names) for names in saved] == [1]
    for trial, names in zip(trials, saved):
        step = int(names[0].removeprefix("step-"))
        assert f"{trial.name}: pretrain: stopped as asked after step {step} of 40, which is saved\n" in output
    assert records(root) == {}

    gate.touch()
    output = finish(start(root, *arguments))
    assert {record["state"] for record in records(root).values()} == {"done"}
    for trial, folder, names in zip(trials, folders, saved):
        assert f"{names[0]} at step" in (folder / "attempts/2/log").read_text()
        found = weights_and_losses(str(folder / "out"), str(root), folder.name)
        expected = undisturbed(trial.workflow.configs["pretrain"], data, tmp_path / trial.name)
        assert found[1] == expected[1]
        assert all(torch.equal(found[0][name], value) for name, value in expected[0].items())


@pytest.mark.parametrize("other", ["no", "never"])
def test_what_waits_is_not_begun_and_a_second_signal_does_not_wait_for_saves(tmp_path, other):
    """Two of three trials at a time: when the signal comes, one saves, and the other cannot, or never does."""
    root, traces = tmp_path / "storage", {name: tmp_path / name for name in ("yes", other)}
    trials = ["{label: waiting, settings: {second.lines: 2}}"]
    for lines, (saves, trace) in enumerate(traces.items(), 4):
        trace.mkdir()
        own = f"second.saves: '{saves}', second.lines: {lines}, second.pause_s: 600, second.trace: '{trace}'"
        trials.insert(0, f"{{label: '{saves}', settings: {{{own}}}}}")
    sets = ["--set", f"sweep.trials=[{', '.join(trials)}]", "--concurrent", "2"]
    arguments = [f"{FAKE_STEPS}:chain", *sets, "--grid", "third.lines=[2]"]
    driver = start(root, *arguments)

    def attempts() -> list[dict]:
        return [json.loads(path.read_text()) for path in root.glob("steps/second-*/attempts/1/lease.json")]

    for name, trace in traces.items():
        mark = "second.line0" if name == "no" else "second.saves"
        wait_until((trace / mark).exists, "a trial's second step", 600)
    driver.send_signal(signal.SIGINT)
    if other == "never":
        wait_until(lambda: any(lease["released"] for lease in attempts()), "the trial that saves", 60)
        assert driver.poll() is None
        driver.send_signal(signal.SIGINT)
    output = interrupted(root, driver, signal.SIGINT)
    if other == "never":
        assert "sweep      interrupted: stopped by " in output  # SIGUSR1, or a signal, when Ray passes it on
        wait_until(lambda: all(died_here(lease) for lease in attempts()), "the trials' steps to end", 20)
    else:
        assert "sweep      interrupted: stopped as asked; 0 of 3 trials have ended\n" in output
        assert "yes-lines-2: second: stopped as asked after line 0, which is saved\n" in output
        assert "no-lines-2: second: stopped by SIGTERM\n" in output
        assert all(lease["released"] for lease in attempts())
    assert len(attempts()) == 2
    assert records(root) == {}
