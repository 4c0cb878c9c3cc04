"""Stopping a run on Ray in order: its driver asks, all ranks save at the next step, and the run ends.

The request is a file in the run's folder: the driver has no handle of Ray Train's workers, and workers that took the
place of others find it too.
"""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field

from lt2_platform.storage import Storage
from lt2_platform.storage_errors import STORAGE_ERRORS

log = logging.getLogger(__name__)

STOP_FILE = "stop.json"
POLL_SECONDS = 1.0


@dataclass(frozen=True)
class StopRequest:
    """`asked` makes the request, from a signal handler too. Only while `possible` is set, because steps are being made,
    is there anybody to see it, and anything to save.
    """

    possible: threading.Event = field(default_factory=threading.Event)
    asked: threading.Event = field(default_factory=threading.Event)


@contextmanager
def conveyed(request: StopRequest, out: Storage) -> Iterator[None]:
    """While the block runs, the request gets to the workers once it is made."""
    out.delete(STOP_FILE)  # an earlier attempt's
    over = threading.Event()

    def convey() -> None:
        while not over.is_set():
            if not request.asked.wait(0.2):
                continue
            try:
                out.write_json(STOP_FILE, {"time": time.time()})
                return
            except STORAGE_ERRORS as error:
                log.error("the workers could not be asked to save and stop (%s); trying again", error)
                over.wait(POLL_SECONDS)

    thread = threading.Thread(target=convey, name="lt2-stop", daemon=True)
    thread.start()
    try:
        yield
    finally:
        request.possible.clear()
        over.set()
        thread.join()


@contextmanager
def requested(out: str) -> Iterator[threading.Event]:
    """For a worker: an event that is set once the file is there. A thread looks, so the loop waits for no storage."""
    storage, came, over = Storage(out), threading.Event(), threading.Event()

    def look() -> None:
        with suppress(*STORAGE_ERRORS):  # it is not there, or storage is away for a while: nobody asks
            storage.read_bytes(STOP_FILE)
            came.set()

    def keep_looking() -> None:
        while not (came.is_set() or over.wait(POLL_SECONDS)):
            look()

    look()
    threading.Thread(target=keep_looking, name="lt2-stop", daemon=True).start()
    try:
        yield came
    finally:
        over.set()
