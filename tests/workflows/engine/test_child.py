"""What a driver hears of its attempt's process."""

from __future__ import annotations

import io
import json
import math
import queue
import threading
import time
from types import SimpleNamespace
from typing import Any

import pytest

from lt2_workflows.engine import child
from lt2_workflows.engine.endings import BUSY, DONE, FAILED, INTERRUPTED

IDLE = SimpleNamespace(stopping=threading.Event(), at_once=threading.Event())


def pipe(lines, wait_s):
    """Of a process that has ended; what it said comes only after a while, as on a busy machine."""
    time.sleep(wait_s)
    yield from lines
    if not lines:
        time.sleep(60)  # somebody else keeps it open


def ended(lines, wait_s=0.0):
    return SimpleNamespace(stdout=pipe(lines, wait_s), poll=lambda: 1)


def test_the_last_words_of_a_process_that_has_ended_are_heard():
    lines = ['{"event": "started", "attempt": 1}\n', '{"event": "failed", "error": "why"}\n']
    assert [event["event"] for event in child._events(IDLE, ended(lines, wait_s=0.5))] == ["started", "failed"]


def test_a_word_that_was_cut_off_is_left_out():
    """Killed while it wrote: a long line reaches the pipe in pieces."""
    lines = ['{"event": "started", "attempt": 1}\n', '{"event": "failed", "error": "Actor']
    assert [event["event"] for event in child._events(IDLE, ended(lines))] == ["started"]


def test_a_pipe_that_a_grandchild_keeps_open_is_not_listened_to_for_ever(monkeypatch):
    monkeypatch.setattr(child, "LAST_WORDS_S", 0.1)
    assert list(child._events(IDLE, ended([]))) == []


STARTED, WRONG = {"event": "started", "attempt": 1}, {"event": "failed", "attempt": 1, "error": "why"}


@pytest.mark.parametrize(
    ("events", "code", "is_done", "expected", "error"),
    [
        ([STARTED], DONE, False, FAILED, "the process ended with code 0 without reporting why"),  # os._exit(0)
        ([STARTED], BUSY, False, FAILED, "the process ended with code 3 without reporting why"),
        ([STARTED], DONE, True, DONE, "the process ended with code 0 without reporting why"),  # its words were lost
        ([], DONE, False, DONE, "the process ended with code 0 without reporting why"),  # another attempt was faster
        ([], BUSY, False, BUSY, "the process ended with code 3 without reporting why"),
        ([STARTED], INTERRUPTED, False, INTERRUPTED, "the process ended with code 4 without reporting why"),
        ([STARTED, WRONG], FAILED, False, FAILED, "why"),
        ([STARTED], -9, False, child.INFRASTRUCTURE, "the process was ended by SIGKILL"),
        ([STARTED], -11, False, FAILED, "the process was ended by SIGSEGV"),
    ],
)
def test_how_a_process_ended_is_what_it_said_or_else_its_exit_code(monkeypatch, events, code, is_done, expected, error):
    monkeypatch.setattr(child, "read_done", lambda storage, step: {"attempt": 1} if is_done else None)
    found, told, _ = ran(monkeypatch, events, code)
    assert (found[0], found[1]["error"], found[1]["progressed"]) == (expected, error, False)
    assert told == [("started", {"attempt": 1})] * (events != [])


@pytest.mark.parametrize("values", [{"step": 1}, {"waiting": "for GPUs"}])
def test_what_a_driver_is_told_and_what_counts_as_progress(monkeypatch, values):
    events = [STARTED, {"event": "progress", "values": values}, {"event": "stopping", "wait_s": 60.0}, WRONG]
    found, told, _ = ran(monkeypatch, events, FAILED)
    assert told == [("started", {"attempt": 1}), ("progress", {"values": values}), ("stopping", {"wait_s": 60.0})]
    assert found == (FAILED, {"attempt": 1, "error": "why", "progressed": "step" in values})


def test_a_process_has_its_share_of_the_cores_and_signals_of_its_own(monkeypatch):
    _, _, (given, how) = ran(monkeypatch, [], DONE)
    assert json.loads(given.removesuffix("\n")) == {
        "record": {}, "storage": "r", "step": "a", "attempt": 1, "ttl_s": 3.0,
    }  # fmt: skip
    assert given.endswith("\n")  # else it would be waited for
    assert how["env"] == {"HOME": "h", "LT2_CORES": "2", "OMP_NUM_THREADS": "2"}
    assert how["start_new_session"]


class Pipe(io.StringIO):
    def close(self):
        """What was written can still be read."""


def ran(monkeypatch, events, code):
    """(what `run_child` returns, what the driver was told, (what the process read, how it was started))."""
    process, started, told = SimpleNamespace(stdin=Pipe(), wait=lambda: code), [], []
    monkeypatch.setattr(child.subprocess, "Popen", lambda *of, **how: started.append(how) or process)
    monkeypatch.setattr(child, "_events", lambda driver, process: iter([dict(event) for event in events]))
    driver: Any = SimpleNamespace(
        workflow=SimpleNamespace(record=dict), storage=SimpleNamespace(root="r"), ttl_s=3.0,
        environment={"HOME": "h", "LT2_CORES": "4"}, side_by_side={"a": 2, "b": 1},
        tell=lambda step, kind, **more: told.append((kind, more)), ask=lambda question: question(),
    )  # fmt: skip
    step: Any = SimpleNamespace(name="a")
    return child.run_child(driver, step, 1), told, (process.stdin.getvalue(), started[0])


class Stage:
    """A child and a driver on a clock of their own: what is said when, and the signals that the child gets."""

    def __init__(self, monkeypatch, said=(), stop_at=0.0, at_once_at=math.inf, ray_gone_at=math.inf, ends_by="KILL"):
        self.now, self.signals, self.ends_by = 0.0, [], ends_by
        self.said = [(at, json.dumps({"event": event}) + "\n") for at, event in said]
        monkeypatch.setattr(child, "time", SimpleNamespace(monotonic=lambda: self.now))
        lines = SimpleNamespace(put=lambda line: None, get=self.get)
        monkeypatch.setattr(child, "queue", SimpleNamespace(Queue=lambda: lines, Empty=queue.Empty))
        answers = {"head:1": lambda: "gone" * (self.now >= ray_gone_at), "": lambda: ""}
        monkeypatch.setattr(child, "unanswered", lambda address: answers[address]())
        self.driver: Any = SimpleNamespace(
            stopping=SimpleNamespace(is_set=lambda: self.now >= stop_at),
            at_once=SimpleNamespace(is_set=lambda: self.now >= at_once_at),
            environment={} if ray_gone_at == math.inf else {"RAY_ADDRESS": "head:1"},
        )
        self.child: Any = SimpleNamespace(
            stdout=iter(()), poll=lambda: None, terminate=lambda: self.sent("TERM"), kill=lambda: self.sent("KILL"),
            send_signal=lambda number: self.sent({child.AT_ONCE: "AT_ONCE"}[number]),
        )  # fmt: skip

    def sent(self, signal):
        self.signals.append((signal, round(self.now)))

    def get(self, timeout):
        if any(signal == self.ends_by for signal, _ in self.signals):
            return None
        if self.said and self.said[0][0] <= self.now:
            return self.said.pop(0)[1]
        self.now += timeout
        raise queue.Empty


@pytest.mark.parametrize(
    ("told", "signals"),
    [
        ({}, [("TERM", 0), ("KILL", 20)]),
        ({"ends_by": "TERM"}, [("TERM", 0)]),
        ({"said": [(0, "stopping")], "stop_at": 5}, [("TERM", 5), ("AT_ONCE", 65), ("KILL", 85)]),
        ({"said": [(3, "stopping")]}, [("TERM", 0), ("AT_ONCE", 63), ("KILL", 83)]),
        ({"said": [(3, "stopping")], "at_once_at": 8}, [("TERM", 0), ("AT_ONCE", 8), ("KILL", 28)]),
        ({"at_once_at": 8}, [("TERM", 0), ("KILL", 20)]),  # it does not save, so there is nothing to cut short
        ({"said": [(3, "stopping")], "ray_gone_at": 30}, [("TERM", 0), ("AT_ONCE", 35), ("KILL", 55)]),
        ({"said": [(3, "stopping")], "ray_gone_at": -1}, [("TERM", 0), ("AT_ONCE", 5), ("KILL", 25)]),
        ({"said": [(3, "stopping")], "stop_at": 40, "ends_by": "TERM"}, [("TERM", 40)]),  # it has all its time
    ],
)
def test_whoever_is_to_stop_is_asked_let_save_and_then_made_to(monkeypatch, told, signals):
    stage = Stage(monkeypatch, **told)
    events = list(child._events(stage.driver, stage.child))
    assert stage.signals == signals
    assert events == [{"event": "stopping", "wait_s": 60.0}] * len(told.get("said", ()))
