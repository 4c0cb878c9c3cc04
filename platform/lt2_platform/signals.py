"""Puts a process's own signal handlers back after Ray, which replaces them with its own and leaves these there."""

from __future__ import annotations

import signal
import threading
from collections.abc import Iterator
from contextlib import contextmanager


@contextmanager
def kept(*numbers: signal.Signals) -> Iterator[None]:
    """After the block these signals have the handlers that they had before it. A signal that ended the block is given
    to its handler too. Only the main thread can set handlers; in any other thread they are left as they are.
    """
    before = {number: signal.getsignal(number) for number in numbers}
    try:
        yield
    except SystemExit as stop:  # what Ray's handler raises, with the signal's number
        for number, handler in before.items():
            if number == stop.code and callable(handler):
                handler(number, None)
        raise
    finally:
        if threading.current_thread() is threading.main_thread():
            for number, handler in before.items():
                signal.signal(number, handler)
            # While Ray connects, its C++ library (absl) hears of signals first. It prints where the process is, hands
            # the signal on, and has an alarm abort the process 3 s later, in the middle of what the handler began.
            if signal.getsignal(signal.SIGALRM) is signal.SIG_DFL:
                signal.alarm(0)
