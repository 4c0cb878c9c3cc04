"""The log of an attempt's process: all that it prints, up to why it ended."""

from __future__ import annotations

import os
import signal
import sys
import tempfile
import threading
from collections.abc import Callable
from contextlib import suppress
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from lt2_platform.storage import Storage


def capture_output(storage: Storage, path: str) -> Callable[..., None]:
    """Send file descriptors 1 and 2 into the log; returns a function that brings the stored copy up to date.

    Locally the log is written in place, so that even a crash of the interpreter is on record. On S3 a spool file is
    uploaded with each heartbeat. What is asked for with `fenced=False` is written behind the fence too: an attempt's
    log is nobody else's, so it can take the place of nothing.
    """
    remote = "://" in storage.root
    # Both stay open as descriptors 1 and 2. The spool has no name: nothing of it is left, however the process ends.
    file: Any = tempfile.TemporaryFile(buffering=0) if remote else open(storage.join(path), "ab", buffering=0)  # noqa: SIM115
    sys.stdout.flush()
    os.dup2(file.fileno(), 1)
    os.dup2(file.fileno(), 2)
    uploaded = -1

    def upload(fenced: bool = True) -> None:
        nonlocal uploaded
        sys.stdout.flush()
        size = os.fstat(file.fileno()).st_size
        if not remote or size == uploaded:
            return
        text = os.pread(file.fileno(), size, 0)  # what is printed meanwhile goes on at the end
        if fenced:
            storage.write_bytes(path, text)
        else:
            storage.fs.pipe_file(storage.join(path), text)
        uploaded = size

    return upload


def end_process(reason: str, last_words: Callable[[], None] = lambda: None, within_s: float = 1.0) -> None:
    """Kill this process, from any of its threads, once `last_words` is done or `within_s` is over.

    The other threads go on working until then.
    """
    print(f"lt2: attempt ended: {reason}", file=sys.stderr, flush=True)
    killed = threading.Timer(within_s, os.kill, (os.getpid(), signal.SIGKILL))
    killed.daemon = True
    killed.start()
    with suppress(Exception):  # whatever storage does
        last_words()
    os.kill(os.getpid(), signal.SIGKILL)
