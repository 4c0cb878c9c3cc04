"""What a driver hears of its attempt's process."""

from __future__ import annotations

import threading
import time
from types import SimpleNamespace

from lt2_workflows.engine import child

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
