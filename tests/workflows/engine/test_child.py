"""What a driver hears of its attempt's process."""

from __future__ import annotations

import io
import threading
import time
from types import SimpleNamespace

import pytest

from lt2_workflows.engine import child
from lt2_workflows.engine.attempt import BUSY, DONE, FAILED, INTERRUPTED

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
        ([STARTED], DONE, False, FAILED, "the process ended with code 0 before it could say why"),  # os._exit(0)
        ([STARTED], BUSY, False, FAILED, "the process ended with code 3 before it could say why"),
        ([STARTED], DONE, True, DONE, "the process ended with code 0 before it could say why"),  # its words were lost
        ([], DONE, False, DONE, "the process ended with code 0 before it could say why"),  # another attempt was faster
        ([], BUSY, False, BUSY, "the process ended with code 3 before it could say why"),
        ([STARTED], INTERRUPTED, False, INTERRUPTED, "the process ended with code 4 before it could say why"),
        ([STARTED, WRONG], FAILED, False, FAILED, "why"),
        ([STARTED], -9, False, child.INFRASTRUCTURE, "the process was ended by SIGKILL"),
        ([STARTED], -11, False, FAILED, "the process was ended by SIGSEGV"),
    ],
)
def test_how_a_process_ended_is_what_it_said_or_else_its_exit_code(monkeypatch, events, code, is_done, expected, error):
    process = SimpleNamespace(stdin=io.StringIO(), wait=lambda: code)
    monkeypatch.setattr(child.subprocess, "Popen", lambda *of, **how: process)
    monkeypatch.setattr(child, "_events", lambda driver, process: iter([dict(event) for event in events]))
    monkeypatch.setattr(child, "read_done", lambda storage, step: {"attempt": 1} if is_done else None)
    told = []
    driver = SimpleNamespace(
        workflow=SimpleNamespace(record=dict), storage=SimpleNamespace(root="r"), ttl_s=3.0, environment={},
        side_by_side={"a": 1}, tell=lambda step, kind, **more: told.append(kind), ask=lambda question: question(),
    )  # fmt: skip
    found = child.run_child(driver, SimpleNamespace(name="a"), 1)  # type: ignore
    assert (found[0], found[1]["error"], found[1]["progressed"]) == (expected, error, False)
    assert told == ["started"] * (events != [])
