"""Says where a worker hangs: when a step takes far longer than steps do, every thread's stack goes to the log.

It ends nothing. A stuck collective shows on every rank, and the rank whose stack differs is the one to look at.
"""

from __future__ import annotations

import faulthandler
import logging
import statistics
import tempfile
import threading
import time
from collections import deque
from collections.abc import Callable, Iterator
from typing import TypeVar

log = logging.getLogger(__name__)

Item = TypeVar("Item")


class Watchdog:
    """Watches one worker's steps from a thread, between `with` and its end; `watch(data)` tells it when steps begin.

    A step is stuck after `factor` times the median of the last 64 and at least `floor_s` seconds; before there are
    three, after `floor_s` alone, which must therefore cover compilation, an evaluation and a checkpoint.
    """

    def __init__(self, *, rank: int, step: int, factor: float, floor_s: float, poll_s: float = 5.0):
        self.rank, self.step, self.factor, self.floor_s = rank, step, factor, floor_s
        self.poll_s = min(poll_s, floor_s / 4)
        self.seconds: deque[float] = deque(maxlen=64)
        self.began: float | None = None
        self.barked = False
        self.ended = threading.Event()
        self.thread = threading.Thread(target=self._run, name="lt2-watchdog", daemon=True)

    def __enter__(self) -> Watchdog:
        self.thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self.ended.set()
        self.thread.join()

    def watch(self, data: Iterator[Item], step: Callable[[], int]) -> Iterator[Item]:
        """`data`, noting each request for a batch: the loop makes one per step. step(): optimizer steps done."""
        while True:
            self._begin(step())
            try:
                item = next(data)
            except StopIteration:
                return
            yield item

    def limit_s(self) -> float:
        """Seconds after which the present step counts as stuck."""
        usual = statistics.median(self.seconds) if len(self.seconds) >= 3 else 0.0
        return max(self.floor_s, self.factor * usual)

    def _begin(self, done: int) -> None:
        now = time.monotonic()
        if self.began is not None:
            if self.barked:
                log.warning("rank %d: step %d resumed after %.0f s", self.rank, self.step, now - self.began)
            self.seconds.append(now - self.began)
        self.step, self.began, self.barked = done + 1, now, False

    def _run(self) -> None:
        while not self.ended.wait(self.poll_s):
            began, step, limit = self.began, self.step, self.limit_s()
            if began is None or self.barked or time.monotonic() - began < limit:
                continue
            self.barked = True
            log.error(
                "rank %d: step %d has been running for %.0f s instead of the usual %.0f s; stacks of all threads:\n%s",
                self.rank, step, time.monotonic() - began, statistics.median(self.seconds or [0.0]), stacks(),
            )  # fmt: skip


def stacks() -> str:
    """The Python stack of every thread of this process, newest call first."""
    with tempfile.TemporaryFile("w+") as file:  # faulthandler writes to file descriptors only
        faulthandler.dump_traceback(file=file, all_threads=True)
        file.seek(0)
        return file.read()
