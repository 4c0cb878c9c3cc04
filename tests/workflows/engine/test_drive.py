"""What a driver makes of how attempts end: when it tries again, after how long, when it gives up. No process runs."""

from __future__ import annotations

from types import SimpleNamespace

import pytest

from lt2.config import ConfigError
from lt2_platform.storage import Storage
from lt2_workflows.engine import executor
from lt2_workflows.engine.endings import BAD_INPUT, BUSY, DONE, FAILED, INFRASTRUCTURE, INTERRUPTED
from lt2_workflows.engine.executor import Driver, Outcome
from lt2_workflows.engine.records import Events
from lt2_workflows.loading import load_workflow
from lt2_workflows.provenance import provenance
from tests.workflows.conftest import FAKE_STEPS

LOST, LOST_AFTER_A_WHILE = (INFRASTRUCTURE, {"error": "lost"}), (INFRASTRUCTURE, {"error": "lost", "progressed": True})
WRONG, OVER = (FAILED, {"error": "wrong"}), (DONE, {})


@pytest.fixture
def drive(tmp_path, monkeypatch):
    """(outcome, what was said, seconds waited between attempts) of attempts that end so, one after another."""
    storage, released = Storage(str(tmp_path)), []
    monkeypatch.setattr(executor, "release_for", lambda storage, folder, attempt: released.append(attempt))

    def driven(*ends, retries=1, stop_at=None):
        workflow = load_workflow(f"{FAKE_STEPS}:chain", [f"first.resources.retries={retries}"])
        said, waited, made = [], [], []
        stopping = SimpleNamespace(is_set=lambda: stop_at == len(made), wait=waited.append)
        driver = Driver(storage, workflow, Events(storage, "w-1"), said.append, 3.0, True, {}, {}, stopping)  # type: ignore

        def ended(driver, step, number):
            assert number == len(made) + 1
            made.append(ends[len(made)])
            return made[-1]

        def done(storage, step):
            record = {"attempt": len(made), "provenance": provenance(), "result": {}}
            return record if made[-1:] == [OVER] else None

        monkeypatch.setattr(executor, "run_child", ended)
        monkeypatch.setattr(executor, "read_done", done)
        monkeypatch.setattr(executor, "_wait_for_turn", lambda driver, step, watch: len(made))
        outcome = executor._drive(driver, workflow.steps["first"])
        return outcome, [(event["event"], event.get("attempt")) for event in said], waited, released

    return driven


@pytest.mark.parametrize(
    ("ends", "state", "attempts", "waited"),
    [
        ([OVER], "done", 1, []),
        ([(BUSY, {}), OVER], "done", 2, []),
        ([WRONG, OVER], "done", 2, [1.0]),
        ([WRONG, WRONG, OVER], "failed", 2, [1.0]),
        ([LOST, WRONG, OVER], "done", 3, [1.0, 1.0]),
        ([LOST, LOST, LOST, OVER], "done", 4, [1.0, 2.0, 4.0]),
        ([LOST, LOST, LOST, LOST, OVER], "failed", 4, [1.0, 2.0, 4.0]),
        ([LOST, LOST, LOST, LOST_AFTER_A_WHILE, LOST, OVER], "done", 6, [1.0, 2.0, 4.0, 0.5, 1.0]),
        ([(INTERRUPTED, {}), OVER], "done", 2, [1.0]),  # by somebody else's signal
        ([LOST_AFTER_A_WHILE] * 5 + [OVER], "done", 6, [0.5] * 5),
        ([LOST_AFTER_A_WHILE] * 6 + [OVER], "failed", 6, [0.5] * 5),
        ([(BAD_INPUT, {"error": "no such file"}), OVER], "bad_input", 1, []),
    ],
)
def test_when_an_attempt_is_made_again(drive, monkeypatch, ends, state, attempts, waited):
    monkeypatch.setattr(executor, "MAX_LOST", 6)
    outcome, said, pauses, released = drive(*ends)
    assert (outcome.state, outcome.attempt, pauses, released) == (state, attempts, waited, [])
    assert said[-1] == ("done" if state == "done" else "failed", attempts)
    assert outcome.log.endswith(f"/attempts/{attempts}/log")
    assert [event for event, _ in said[:-1]] == ["retry"] * len(waited)
    assert outcome.error == (None if state == "done" else ends[attempts - 1][1]["error"])


def test_who_stops_begins_no_attempt(drive):
    outcome, said, _, _ = drive(OVER, stop_at=0)
    assert (outcome.state, said) == ("interrupted", [])


@pytest.mark.parametrize(("end", "released"), [((INTERRUPTED, {}), []), (LOST, [1]), (WRONG, [1])])
def test_the_lease_of_who_was_stopped_is_released_for_it_if_need_be(drive, end, released):
    outcome, said, waited, freed = drive(end, OVER, stop_at=1)
    assert (outcome.state, outcome.attempt, said) == ("interrupted", 1, [("interrupted", 1)])
    assert (waited, freed) == ([], released)


def test_a_pause_is_half_a_minute_at_most(drive):
    assert drive(*[WRONG] * 8, OVER, retries=8)[2] == [1.0, 2.0, 4.0, 8.0, 16.0, 32.0, 32.0, 32.0]


def test_what_another_driver_finished_meanwhile_is_skipped(monkeypatch):
    """While one waited for its turn."""
    turns = [None]
    monkeypatch.setattr(
        executor, "_finished", lambda driver, step, done, ran: Outcome("skipped" if not ran else "done")
    )
    monkeypatch.setattr(executor, "read_done", lambda *of: None if turns else {"attempt": 3})
    monkeypatch.setattr(executor, "_wait_for_turn", lambda *of: turns.pop())
    driver = SimpleNamespace(storage=None, ask=lambda question: question())
    step = SimpleNamespace(folder="steps/a-1")
    assert executor._drive(driver, step).state == "skipped"  # type: ignore


def test_a_graph_is_run_in_order_and_past_its_failures(monkeypatch):
    needs = {"root": (), "left": ("root",), "right": ("root",), "leaf": ("right", "left"), "end": ("leaf",)}
    steps = {name: SimpleNamespace(name=name, needs=each) for name, each in needs.items()}
    steps["alone"] = SimpleNamespace(name="alone", needs=("finished before",))
    began, said = [], []

    def drive(driver, step):
        began.append(step.name)
        return Outcome({"root": "skipped", "left": "failed"}.get(step.name, "done"))

    monkeypatch.setattr(executor, "_drive", drive)
    driver = SimpleNamespace(
        stopping=SimpleNamespace(is_set=lambda: False),
        tell=lambda step, event, error: said.append((step.name, event, error)),
    )
    outcomes = executor._run_graph(driver, steps)  # type: ignore
    assert {name: outcome.state for name, outcome in outcomes.items()} == {
        "root": "skipped", "left": "failed", "right": "done", "leaf": "blocked", "end": "blocked", "alone": "done",
    }  # fmt: skip
    assert sorted(began) == ["alone", "left", "right", "root"]
    assert began.index("root") < min(began.index("left"), began.index("right"))
    assert said == [("leaf", "blocked", "needs left"), ("end", "blocked", "needs leaf")]


@pytest.fixture
def turn(monkeypatch):
    """(the newest attempt, what was said, pauses) of waiting while attempt 3 looks so, one look after another."""

    def waited(*looks, done_at=None, stop_at=None, heard=False, wait_for_others=True):
        held, said, pauses, asked, look = {"pid": 7, "host": "other", "ttl_s": 30.0}, [], [], [], iter(looks)
        monkeypatch.setattr(executor, "read_done", lambda *of: asked.append(of) or (len(asked) == done_at or None))
        driver = SimpleNamespace(
            stopping=SimpleNamespace(is_set=lambda: len(pauses) == stop_at, wait=pauses.append),
            ask=lambda question: question(),
            storage=None,
            wait_for_others=wait_for_others,
            ttl_s=5.0,
            tell=lambda step, event, **details: said.append((event, details["attempt"], details["holder"])),
        )
        watch = SimpleNamespace(holder=lambda: (3, held if next(look) else None), heard=lambda: heard)
        return executor._wait_for_turn(driver, SimpleNamespace(name="a"), watch), said, pauses  # type: ignore

    return waited


def test_a_turn_is_waited_for_and_said_once(turn):
    said = [("waiting", 3, "process 7 on other")]
    assert turn(False) == (3, [], [])
    assert turn(True, True, False) == (3, said, [0.5, 0.5])
    assert turn(True, True, True, done_at=2) == (None, said, [0.5])  # whoever held it has finished
    assert turn(True, True, True, stop_at=2) == (0, said, [0.5, 0.5])
    assert turn(True, False, wait_for_others=False) == (3, said, [0.5])  # whether it lives is not known yet


def test_who_does_not_wait_for_others_says_whom(turn):
    assert turn(True, False, heard=True)[0] == 3
    with pytest.raises(ConfigError, match=r"^step a is being run by process 7 on other; wait for it or run without --"):
        turn(True, heard=True, wait_for_others=False)
