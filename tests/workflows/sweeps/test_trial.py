"""What a trial tells Ray Tune, how it ends, and what trials share first. The engine is a stand-in; no Ray runs."""

from __future__ import annotations

import math
import threading
from dataclasses import replace
from types import SimpleNamespace

import pytest

from lt2.config import ConfigError
from lt2_platform.results.store import ResultsStore
from lt2_platform.storage import Storage
from lt2_workflows.engine.attempt import Interrupted
from lt2_workflows.engine.executor import Outcome
from lt2_workflows.loading import load_workflow
from lt2_workflows.sweeps import trial
from lt2_workflows.sweeps.step import run_shared
from lt2_workflows.sweeps.tune import TrialRecords
from tests.workflows.conftest import FAKE_STEPS

CHAIN = load_workflow(f"{FAKE_STEPS}:chain")
DONE = {name: Outcome("done", attempt=1) for name in CHAIN.configs}


@pytest.fixture
def drive(monkeypatch, tmp_path):
    """`trial.drive` over an engine that says `events` and returns, or raises, `outcome`; (what it returns, reports)."""
    monkeypatch.setattr(trial, "REPORT_SECONDS", 0)
    monkeypatch.setattr(
        trial, "read_done", lambda storage, step: {"result": {"run": step.name, "size": 7, "whole": True}}
    )

    def driven(outcome, events=()):
        def run(workflow, storage, *, ttl_s, say, stop):
            for event in events:
                say(event)
            if isinstance(outcome, BaseException):
                raise outcome
            return outcome

        reports: list = []
        monkeypatch.setattr("lt2_workflows.engine.executor.run", run)
        job = {"ttl_s": 1.0, "watch": ["second", "third"]}
        return trial.drive(CHAIN, Storage(str(tmp_path)), job, reports.append, threading.Event()), reports

    return driven


def progress(name, **values):
    return {"event": "progress", "step": name, "values": values}


def test_a_report_is_the_mean_of_the_last_ten_losses_of_the_step_that_is_watched(drive):
    losses = [float(number**2) for number in range(1, 13)]
    events = [progress("second", step=number, loss=loss) for number, loss in enumerate(losses, 1)]
    others = [progress("first", step=99, loss=99.0), progress("second", step=99), {"event": "done", "step": "second"}]
    again = progress("second", step=12, loss=0.0)  # a step that was reported is not reported again
    found, reports = drive(DONE, [*others, *events, again])
    assert reports == [
        {
            "of": "second",
            "step": number,
            "loss": pytest.approx(sum(losses[:number][-10:]) / min(number, 10)),
            "logged": loss,
        }
        for number, loss in enumerate(losses, 1)
    ]
    metrics = {f"{name}/size": 7 for name in CHAIN.configs}
    assert found == {"state": "done", "error": None, "log": None, "run": "third", "metrics": metrics}


def test_each_training_of_a_trial_is_reported_from_its_own_beginning(drive):
    events = [progress(name, step=step, loss=float(step)) for name in ("second", "third") for step in (30, 50)]
    _, reports = drive(DONE, events)
    assert [tuple(report.values()) for report in reports] == [
        ("second", 30, 30, 30), ("second", 50, 40, 50), ("third", 30, 30, 30), ("third", 50, 40, 50),
    ]  # fmt: skip


def test_the_mean_of_a_training_that_goes_on_is_of_what_it_logged_before_too(drive, tmp_path):
    with ResultsStore(Storage(str(tmp_path))).create_run(CHAIN.steps["second"].id, {"config": {}}) as writer:
        for step, loss in enumerate((100.0, 1.0, math.nan, 2.0, 50.0), 10):
            writer.log(step, {"loss": loss, "lr": 9.0})
    _, reports = drive(DONE, [progress("second", step=14, loss=3.0)])  # step 14 is done again
    assert [report["loss"] for report in reports] == [(100 + 1 + 2 + 3) / 4]


def test_what_is_said_of_a_trial_is_the_loss_it_logged(tmp_path):
    said: list = []
    context = SimpleNamespace(storage=Storage(str(tmp_path)), progress=said.append)
    records = TrialRecords(SimpleNamespace(expanded=[]), context, "out/trials")  # type: ignore[arg-type]
    a = SimpleNamespace(config={"trial": "a"})
    records.on_trial_result(1, [a], a, {"of": "stage2", "step": 1200, "loss": 6.5, "logged": 6.25})
    assert records.last == {"a": {"step": 1200, "loss": 6.25}}
    assert said[-1]["message"] == "a: stage2 step 1,200, loss 6.2500"


@pytest.mark.parametrize(
    ("outcome", "state", "error"),
    [
        (ConfigError("no such pack"), "failed", "no such pack"),
        (DONE | {"second": Outcome("failed", 3, "ran out", "log")}, "failed", "second, attempt 3: ran out"),
        (DONE | {"second": Outcome("bad_input", 1, "empty", "log")}, "failed", "second, attempt 1: empty"),
        (DONE | {"second": Outcome("interrupted", 2, "saved", "log")}, "interrupted", "second: saved"),
        (DONE | {"third": Outcome("interrupted")}, "interrupted", "third: stopped before it began"),
        (
            DONE | {"first": Outcome("interrupted", 1, "saved"), "third": Outcome("failed", 1, "no")},
            "failed",
            "third, attempt 1: no",
        ),
    ],
)
def test_how_a_trial_that_did_not_end_well_is_told(drive, outcome, state, error):
    found, _ = drive(outcome)
    assert (found["state"], found["error"], found["run"], found["metrics"]) == (state, error, None, {})
    assert found["log"] == ("log" if isinstance(outcome, dict) and outcome["second"].log else None)


def test_a_fault_of_ours_is_not_taken_for_a_trial_that_failed(drive):
    with pytest.raises(ZeroDivisionError):
        drive(ZeroDivisionError())


@pytest.fixture
def shared(monkeypatch, context):
    """The names of the steps that `run_shared` runs first, of a chain and chains with other `lines` of the steps given;
    its steps end as `outcomes` says."""

    def run(*changed, outcomes=None, told=()):
        ran: list = []

        def engine(workflow, storage, *, say, stop):
            ran.append(workflow)
            for values in told:
                say({"step": "first", "event": "progress", "values": values})
            return DONE | (outcomes or {})

        monkeypatch.setattr("lt2_workflows.engine.executor.run", engine)
        others = (load_workflow(f"{FAKE_STEPS}:chain", [f"{name}.lines=9"]) for name in changed)
        run_shared([replace(each, part_of="sweep-1") for each in (CHAIN, *others)], context)
        assert all((each.name, each.part_of, each.shared) == ("w-shared", "sweep-1", True) for each in ran)
        return [list(each.configs) for each in ran]

    return run


@pytest.fixture
def context(tmp_path):
    stop = SimpleNamespace(asked=threading.Event())
    workflow, heard = SimpleNamespace(name="w"), []
    storage = Storage(str(tmp_path))
    return SimpleNamespace(workflow=workflow, storage=storage, stop=stop, progress=heard.append, heard=heard)


def test_what_all_trials_have_in_common_runs_first(shared):
    assert shared("third") == [["first", "second"]]
    assert shared("third", "second") == shared("second", "third") == [["first"]]
    assert shared("first") == shared() == []


def test_what_runs_first_is_told_under_its_own_name(shared, context):
    shared("third", told=[{"notice": "resumes from step 5 of 9"}, {"step": 6, "steps": 9}])
    assert context.heard[0]["notice"] == "first: resumes from step 5 of 9"
    assert context.heard[1] == {"counts": "first step", "step": 6, "steps": 9}


@pytest.mark.parametrize(
    ("outcome", "kind", "message"),
    [
        (Outcome("failed", 3, "ran out", "its/log"), ConfigError, "first, which every .*: ran out \\(log: its/log\\)"),
        (Outcome("bad_input", 1, "empty", "its/log"), ConfigError, "first, which every trial needs: empty"),
        (Outcome("interrupted", 1, "saved"), Interrupted, "first, which every trial needs: saved"),
        (Outcome("interrupted"), Interrupted, "first, which every trial needs: stopped before it began"),
    ],
)
def test_what_is_needed_by_all_and_does_not_end_well_ends_the_sweep(shared, outcome, kind, message):
    with pytest.raises(kind, match=message):
        shared("third", outcomes={"first": outcome})
