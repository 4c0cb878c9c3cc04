"""Somebody wants this machine back: SIGTERM, Ctrl-C, or Ray's notice that a node is about to go."""

from __future__ import annotations

import logging
import signal
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

from lt2.train.loop import SAVE, STOP

log = logging.getLogger(__name__)

_terminated = threading.Event()  # this process got SIGTERM; signals are a matter of the process, so is this


@contextmanager
def on_signals() -> Iterator[Callable[[], int]]:
    """What `lt2.train.loop.train` takes as `stop`: asks to stop once SIGTERM or SIGINT (Ctrl-C) has come; another one
    of the same ends the process.

    Signals belong to the main thread; in any other one this never asks.
    """
    if threading.current_thread() is not threading.main_thread():
        yield lambda: 0
        return
    came = threading.Event()
    before = {number: _note_first(came, number) for number in (signal.SIGTERM, signal.SIGINT)}
    try:
        yield lambda: STOP if came.is_set() else 0
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)


def ray_sigterm() -> Callable[[], int]:
    """For a worker of Ray Train: asks to stop once this very process has got SIGTERM.

    The loop runs in a thread and a signal belongs to the main one, which is where tasks of the worker's actor run.
    """
    import ray

    _terminated.clear()
    worker = ray.get_runtime_context().current_actor
    worker.__ray_call__.remote(_note_sigterm)  # not waited for: it comes in turn, after what starts this thread
    return lambda: STOP if _terminated.is_set() else 0


def _note_sigterm(actor: Any) -> None:
    _note_first(_terminated, signal.SIGTERM)


def _note_first(came: threading.Event, number: signal.Signals) -> Any:
    """Have the first such signal set `came`, and a second one do what it does now; the handler that is there now."""
    before = signal.getsignal(number)

    def note(signum: int, frame: Any) -> None:
        came.set()
        signal.signal(number, before)

    signal.signal(number, note)
    return before


def ray_notice() -> Callable[[], int]:
    """For a worker of Ray Train: asks for one checkpoint whenever Ray announces that nodes will go.

    Not to stop: Ray itself ends the workers when the time is over and starts others, and counts that as a preemption
    only then. `ray.train.get_preemption_info` is a barrier; the loop's own all-reduce agrees without one.
    """
    from ray.train.v2._internal.execution.context import get_train_context

    seen: Any = None

    def ask() -> int:
        nonlocal seen
        notice = get_train_context().preemption_context.preemption_info
        if notice is None or notice == seen:
            return 0
        seen = notice
        log.warning("nodes of this run are to be preempted (%s): saving a checkpoint", notice)
        return SAVE

    return ask
