"""What is recorded and said of trials as Ray Tune tells of them, and when a sweep that is to stop ends. Without Ray."""

from __future__ import annotations

import pickle
import signal
import subprocess
import sys
from types import SimpleNamespace

import pytest
from ray.tune.schedulers import FIFOScheduler

from lt2_platform.storage import Storage
from lt2_workflows.commands.sweeps import sweep_workflow
from lt2_workflows.engine.attempt import Interrupted
from lt2_workflows.engine.context import StepContext
from lt2_workflows.engine.endings import AT_ONCE
from lt2_workflows.sweeps import tune
from lt2_workflows.sweeps.asha import KeptAsha
from lt2_workflows.sweeps.tune import TrialRecords, _scheduler
from tests.workflows.conftest import FAKE_STEPS

FOLDER = "steps/sweep-1/out/trials"
DONE = {"state": "done", "error": None, "log": None, "run": "second-1", "metrics": {"speed": 2.5}}


class Sweep:
    """Two trials, lines-2 and lines-3, and what is said of them."""

    def __init__(self, root, *options):
        workflow = sweep_workflow(f"{FAKE_STEPS}:chain", list(options), ["second.lines=[2, 3]"], None, {})
        self.said, self.storage = [], Storage(str(root))
        self.context = StepContext(self.storage, workflow, workflow.steps["sweep"], self.said.append)
        self.config = self.context.step.config
        self.begin()

    def begin(self):
        self.records = TrialRecords(self.config, self.context, FOLDER)

    def record(self, name):
        return self.storage.read_json(f"{FOLDER}/{name}.json")

    def hear(self, name, event, *result, status="RUNNING", error_file=None):
        trial = SimpleNamespace(config={"trial": name}, status=status, error_file=error_file)
        getattr(self.records, f"on_trial_{event}")(1, [], trial, *result)

    def step(self, *running, ended=()):
        each = [(name, "RUNNING") for name in running] + [(name, "TERMINATED") for name in ended]
        trials = [SimpleNamespace(config={"trial": name}, status=status) for name, status in each]
        self.records.on_step_begin(1, trials)


@pytest.fixture
def sweep(tmp_path):
    return Sweep(tmp_path)


def test_a_sweep_begins_without_torch():
    code = "import sys, lt2_workflows.engine.attempt, lt2_workflows.sweeps.tune; assert 'torch' not in sys.modules"
    subprocess.run([sys.executable, "-c", code], check=True)


def test_a_trial_that_ends_is_recorded_and_counted(sweep, monkeypatch):
    monkeypatch.setattr(tune, "count", lambda trial, context, run: {"second-1": 7}[run])
    sweep.hear("lines-2", "result", {"of": "second", "step": 1500, "loss": 2.5, "logged": 1.25})
    sweep.hear("lines-2", "result", {"of": "second", "step": 2000, "loss": 2.25, "logged": 1.125})
    sweep.hear("lines-2", "result", {"outcome": DONE})
    sweep.hear("lines-2", "complete")
    found = sweep.record("lines-2")
    trial = sweep.config.expanded[0]
    assert found == DONE | {
        "name": "lines-2", "label": "lines=2", "group": "", "seed": None, "settings": {"second.lines": 2},
        "steps": {name: step.id for name, step in trial.workflow.steps.items()}, "parameters": 7,
        "last": {"step": 2000, "loss": 1.125},
    }  # fmt: skip
    counts = {"steps": 2, "counts": "trials ended"}
    assert sweep.said == [
        counts | {"step": 0, "message": "lines-2: second step 1,500, loss 1.2500"},
        counts | {"step": 0, "message": "lines-2: second step 2,000, loss 1.1250"},
        counts | {"step": 1, "message": "lines-2: done"},
    ]
    sweep.begin()  # a later attempt counts it
    sweep.hear("lines-3", "result", {"of": "second", "step": 1, "loss": 9.0, "logged": 9.0})
    assert sweep.said[-1]["step"] == 1


def test_what_ended_without_a_word_was_stopped_by_the_scheduler(sweep):
    sweep.hear("lines-3", "complete")
    found = sweep.record("lines-3")
    assert (found["state"], found["run"], found["last"], found["metrics"]) == ("stopped", None, None, {})


def test_a_trial_whose_process_is_lost_has_failed_unless_it_is_started_again(sweep, tmp_path):
    sweep.hear("lines-2", "error", status="PENDING")
    assert not sweep.storage.exists(FOLDER)
    (tmp_path / "error.txt").write_text("Traceback\n  File\nOutOfMemoryError: 2 GB\n\n")
    sweep.hear("lines-2", "error", status="ERROR", error_file=str(tmp_path / "error.txt"))
    sweep.hear("lines-3", "error", status="ERROR", error_file=str(tmp_path / "gone.txt"))
    found = [sweep.record(name) for name in ("lines-2", "lines-3")]
    assert [record["state"] for record in found] == ["failed", "failed"]
    assert [record["error"] for record in found] == ["OutOfMemoryError: 2 GB", "the trial's process was lost"]


def test_a_sweep_that_is_to_stop_ends_when_what_ran_then_has(sweep):
    sweep.step()
    sweep.context.stop.asked.set()
    sweep.step("lines-2")
    sweep.step("lines-2", "lines-3")  # Tune has started another meanwhile
    sweep.hear("lines-2", "result", {"outcome": DONE | {"state": "interrupted", "error": "pretrain: step 9 is saved"}})
    sweep.hear("lines-2", "complete")
    assert not sweep.storage.exists(FOLDER), "the next attempt goes on with it"
    with pytest.raises(Interrupted) as stopped:
        sweep.step("lines-3", ended=["lines-2"])
    assert str(stopped.value) == "stopped as asked; 0 of 2 trials have ended\nlines-2: pretrain: step 9 is saved"
    sweep.begin()
    with pytest.raises(Interrupted):
        sweep.step()  # nothing runs


def test_signals_stay_the_attempts_own_and_nothing_is_pickled(sweep):
    before = signal.signal(AT_ONCE, signal.SIG_IGN)
    try:
        sweep.begin()
        signal.signal(AT_ONCE, signal.SIG_DFL)  # as Tune does
        sweep.records.setup()
        assert signal.getsignal(AT_ONCE) == signal.SIG_IGN
    finally:
        signal.signal(AT_ONCE, before)
    assert vars(pickle.loads(pickle.dumps(sweep.records))) == {}


def test_schedulers(sweep, tmp_path):
    assert isinstance(_scheduler(sweep.config, {}, sweep.context), FIFOScheduler)
    options = {"type": "asha", "step": "second", "grace_steps": 4, "reduction": 5}
    other = Sweep(tmp_path, f"sweep.scheduler={options}")
    rungs = f"{other.context.step.folder}/out/rungs"
    other.storage.write_json(f"{rungs}/lines-2.json", [{"step": 4, "loss": 1.0, "went_on": True}])
    made = _scheduler(other.config, {"lines-3": {}}, other.context)
    assert isinstance(made, KeptAsha)
    assert (made.folder, made.running, list(made.reached)) == (rungs, {"lines-3"}, ["lines-2"])
