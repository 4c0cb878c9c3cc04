"""Signals stay with who asked for them: Ray puts handlers of its own in place and leaves them there."""

from __future__ import annotations

import signal
import threading
from collections.abc import Iterator
from contextlib import contextmanager


@contextmanager
def kept(*numbers: signal.Signals) -> Iterator[None]:
    """After the block these signals have the handlers that they had before, which also hear of one that ended it.
    Handlers belong to the main thread; in any other one nothing can change them.
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
