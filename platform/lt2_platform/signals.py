"""Signals stay with who asked for them: Ray puts handlers of its own in place and leaves them there."""

from __future__ import annotations

import signal
import threading
from collections.abc import Iterator
from contextlib import contextmanager


@contextmanager
def kept(*numbers: signal.Signals) -> Iterator[None]:
    """After the block these signals have the handlers that they had before. Handlers belong to the main thread; in any
    other one nothing can change them.
    """
    before = {number: signal.getsignal(number) for number in numbers}
    try:
        yield
    finally:
        if threading.current_thread() is threading.main_thread():
            for number, handler in before.items():
                signal.signal(number, handler)
