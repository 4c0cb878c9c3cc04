"""One attempt's process as its driver sees it: started, followed, and stopped in order.

The other end is lt2_workflows.engine.attempt.
"""

from __future__ import annotations

import json
import math
import queue
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from contextlib import suppress
from typing import TYPE_CHECKING, Any

from lt2_platform.machine.cores import share
from lt2_workflows.engine.endings import AT_ONCE, BUSY, DONE, FAILED, INFRASTRUCTURE
from lt2_workflows.engine.local_ray import unanswered
from lt2_workflows.engine.records import read_done
from lt2_workflows.graph import Step

if TYPE_CHECKING:
    from lt2_workflows.engine.executor import Driver

STOP_GRACE_S = 20.0
SAVE_GRACE_S = 60.0  # for a step that saves before it stops
RAY_GONE_S = 5.0  # without an answer from Ray: workers that were signalled too may yet save
LAST_WORDS_S = 5.0  # for what a child said last to come through its pipe
CRASHES = {signal.SIGSEGV, signal.SIGABRT, signal.SIGBUS, signal.SIGILL, signal.SIGFPE}


def run_child(driver: Driver, step: Step, number: int) -> tuple[int, dict[str, Any]]:
    """Run one attempt in a child process; (its exit code, see endings.py; its last event)."""
    job = {
        "record": driver.workflow.record(),
        "storage": driver.storage.root,
        "step": step.name,
        "attempt": number,
        "ttl_s": driver.ttl_s,
    }
    child = subprocess.Popen(
        [sys.executable, "-m", "lt2_workflows.engine.attempt"],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
        env={**driver.environment, **share(driver.environment, driver.side_by_side[step.name])},
        start_new_session=True,  # Ctrl-C reaches the driver alone, which then stops its children in order
    )
    assert child.stdin is not None
    with suppress(BrokenPipeError):
        child.stdin.write(json.dumps(job) + "\n")
        child.stdin.flush()
    last: dict[str, Any] = {}
    started = progressed = False
    for event in _events(driver, child):
        kind = event.pop("event")
        started |= kind == "started"
        progressed |= kind == "progress" and "waiting" not in event["values"]
        if kind in ("started", "progress", "stopping"):
            driver.tell(step, kind, **event)
        else:
            last = event
    code = child.wait()
    with suppress(BrokenPipeError):
        child.stdin.close()
    if code < 0:
        last = {"error": f"the process was ended by {signal.Signals(-code).name}"}
        code = FAILED if -code in CRASHES else INFRASTRUCTURE
    elif not last:
        last = {"error": f"the process ended with code {code} without reporting why"}
        # Code of the step's own that ends its process (os._exit, a library's exit) says nothing of the step.
        if started and code in (DONE, BUSY) and driver.ask(lambda: read_done(driver.storage, step)) is None:
            code = FAILED
    return code, last | {"progressed": progressed}


def _events(driver: Driver, child: subprocess.Popen[str]) -> Iterator[dict[str, Any]]:
    """The child's events until it ends. When the driver is stopping it asks the child to, lets it save if it says that
    it does, insists, and kills it. Whoever signals every process (systemd, `scancel --full`) has ended Ray as well:
    nobody then says that it is saved, and Ray's library would abort child and driver after a minute.
    """
    lines: queue.Queue[str | None] = queue.Queue()

    def read() -> None:
        assert child.stdout is not None
        for line in child.stdout:
            lines.put(line)
        lines.put(None)

    threading.Thread(target=read, daemon=True).start()
    deadline, saving, gone, answered = math.inf, False, math.inf, math.inf
    while True:
        if driver.stopping.is_set() and deadline == math.inf:
            child.terminate()
            deadline = time.monotonic() + (SAVE_GRACE_S if saving else STOP_GRACE_S)
            answered = time.monotonic()
        if saving and not unanswered(driver.environment.get("RAY_ADDRESS", "")):
            answered = time.monotonic()
        if saving and (driver.at_once.is_set() or time.monotonic() > min(deadline, answered + RAY_GONE_S)):
            child.send_signal(AT_ONCE)
            deadline, saving = time.monotonic() + STOP_GRACE_S, False
        if time.monotonic() > deadline:
            child.kill()
        try:
            line = lines.get(timeout=0.2)
        except queue.Empty:
            # A grandchild may keep the pipe open after the attempt itself has ended; its last words may still be in it.
            if gone == math.inf and child.poll() is not None:
                gone = time.monotonic() + LAST_WORDS_S
            if time.monotonic() > gone:
                return
            continue
        if line is None:
            return
        try:
            event = json.loads(line)
        except ValueError:  # killed while it wrote: its exit code says the rest
            continue
        if event["event"] == "stopping":
            saving, event["wait_s"] = True, SAVE_GRACE_S
            if deadline != math.inf:  # of a cancelled job, Ray may have told the child before we did
                deadline = time.monotonic() + SAVE_GRACE_S
        yield event
