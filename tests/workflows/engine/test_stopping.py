"""A driver whose store fails while it stops: what saves is not cut short. Or while it looks back: it waits."""

from __future__ import annotations

import threading
import time
from dataclasses import replace
from types import SimpleNamespace

import pytest
from botocore.exceptions import EndpointConnectionError

from lt2_platform import storage_errors
from lt2_platform.storage import Storage
from lt2_workflows.engine import executor
from lt2_workflows.engine.executor import Driver, Outcome
from lt2_workflows.engine.records import Events
from lt2_workflows.graph import STEP_TYPES
from lt2_workflows.loading import load_workflow
from lt2_workflows.provenance import provenance
from tests.workflows.conftest import FAKE_STEPS

AWAY = EndpointConnectionError(endpoint_url="http://away")


def away(*arguments):
    raise AWAY


@pytest.fixture
def driver():
    told = lambda step, event, **details: None  # noqa: E731
    return SimpleNamespace(stopping=threading.Event(), at_once=threading.Event(), tell=told, storage=None)


@pytest.mark.parametrize(("error", "cut"), [(AWAY, False), (KeyboardInterrupt(), True)])
def test_only_who_asks_again_cuts_a_save_short(driver, monkeypatch, error, cut):
    steps = {name: SimpleNamespace(name=name, needs=()) for name in ("fails", "saves")}
    seen = []

    def drive(driver, step):
        driver.stopping.wait(10)
        if step.name == "fails":
            raise error
        seen.append(driver.at_once.wait(0.3))
        return Outcome("interrupted")

    monkeypatch.setattr(executor, "_drive", drive)
    threading.Timer(0.1, driver.stopping.set).start()
    with pytest.raises(type(error)):
        executor._run_graph(driver, steps)
    assert seen == [cut]


def test_a_lease_that_cannot_be_released_is_left_to_others(driver, monkeypatch, caplog):
    monkeypatch.setattr(executor, "release_for", away)
    executor._release(driver, SimpleNamespace(name="a", folder="steps/a-1"), 3)
    assert "a: the lease of attempt 3 is not released (Could not connect" in caplog.text


def test_steps_that_have_not_begun_are_not_begun(driver, monkeypatch):
    began = []

    def drive(driver, step):
        began.append(step.name)
        driver.stopping.set()
        time.sleep(0.05)
        return Outcome("done")

    monkeypatch.setattr(executor, "_drive", drive)
    steps = {"a": SimpleNamespace(name="a", needs=()), "b": SimpleNamespace(name="b", needs=("a",))}
    outcomes = executor._run_graph(driver, steps)
    assert began == ["a"]
    assert {name: outcome.state for name, outcome in outcomes.items()} == {"a": "done", "b": "interrupted"}


def test_what_has_changed_since_a_step_finished_is_asked_for_patiently(tmp_path, monkeypatch):
    monkeypatch.setattr(storage_errors, "LONGEST_PAUSE_SECONDS", 0.0)
    storage, workflow, said, asked = Storage(str(tmp_path)), load_workflow(f"{FAKE_STEPS}:chain"), [], []

    def outdated(config, context):
        asked.append(context.step.name)
        return "THE CORPUS HAS CHANGED" if len(asked) > 1 else away()

    monkeypatch.setitem(STEP_TYPES, "write", replace(STEP_TYPES["write"], outdated=outdated))
    driver = Driver(
        storage, workflow, Events(storage, workflow.id), said.append, 3.0, True, {}, {}, stopping=threading.Event()
    )
    done = {"attempt": 2, "provenance": provenance(), "result": {}}
    assert executor._finished(driver, workflow.steps["first"], done, ran=False).state == "skipped"
    assert (asked, said[0]["stale"]) == (["first"] * 2, "THE CORPUS HAS CHANGED")
