"""One attempt at one step, in a process of its own: claim, work under a heartbeat, record.

The driver starts `python -m lt2_workflows.engine.attempt` and writes one line of JSON to its stdin; the pipe then stays
open as a lifeline: when the driver dies, however it dies, the pipe ends and so does this process. Events go back as
JSON lines on stdout; all other output, that of child processes included, is captured in the attempt's log.
"""

from __future__ import annotations

import faulthandler
import json
import logging
import os
import signal
import sys
import threading
import time
import traceback
from collections.abc import Callable
from contextlib import suppress
from functools import partial
from typing import IO, TYPE_CHECKING, Any

from lt2.config import ConfigError, load_source
from lt2_platform.fence import FENCE, OvertakenError
from lt2_platform.storage_errors import patiently
from lt2_platform.train.on_ray.stopping import StopRequest
from lt2_workflows.engine.context import StepContext
from lt2_workflows.engine.endings import AT_ONCE, BAD_INPUT, BUSY, DONE, FAILED, INTERRUPTED, STATES, classify, said
from lt2_workflows.engine.hold import clear
from lt2_workflows.engine.live_metrics import publish_progress
from lt2_workflows.engine.local_ray import leave_ray
from lt2_workflows.engine.output import capture_output, end_process
from lt2_workflows.engine.records import Lease, json_bytes, read_done
from lt2_workflows.graph import STEP_TYPES, Workflow
from lt2_workflows.loading import workflow_from_record
from lt2_workflows.outside import note
from lt2_workflows.provenance import provenance

if TYPE_CHECKING:
    from lt2_platform.storage import Storage


class Interrupted(KeyboardInterrupt):
    """SIGTERM or SIGINT arrived: stop, release the lease, leave the rest for the next run.

    A KeyboardInterrupt because of Ray: when a signal arrives during ray.get, it passes on that one alone, as a new one.
    """

    run_state = "running"  # what the results store keeps saying of a run in this process: another attempt goes on


def run_attempt(
    storage: Storage, workflow: Workflow, name: str, number: int, ttl_s: float, emit: Callable[[dict[str, Any]], None]
) -> int:
    """Run attempt `number` of a step and return an exit code of endings.py. Redirects this process's output."""
    step = workflow.steps[name]
    lease = Lease(storage, step.folder, number, ttl_s, on_lost=end_process)
    if not patiently(lease.acquire):
        return BUSY
    os.environ[FENCE] = storage.join(lease.fence)
    patiently(lambda: clear(storage, step.folder))
    if patiently(lambda: read_done(storage, step)) is not None:  # another attempt finished before the claim succeeded
        patiently(lease.stop)
        patiently(lease.release)
        return DONE
    folder = f"{step.folder}/attempts/{number}"
    state: dict[str, Any] = {"state": "running", "started": time.time(), "provenance": provenance(), "error": None}
    patiently(lambda: storage.write_json(f"{folder}/state.json", state))
    emit({"event": "started", "attempt": number})
    lease.on_beat = save_log = capture_output(storage, f"{folder}/log")
    lease.on_lost = end = partial(end_process, last_words=partial(save_log, fenced=False), within_s=ttl_s / 6)

    def progress(values: dict[str, Any]) -> None:
        emit({"event": "progress", "values": values})
        publish_progress(workflow.id, name, values)

    def announce() -> None:
        _stop.asked.wait()
        emit({"event": "stopping"})

    threading.Thread(target=announce, name="stopping", daemon=True).start()
    code, error, made = _work(StepContext(storage, workflow, step, progress, _stop))

    # From here on nothing may interrupt, and no thread of ours may touch the records behind our back.
    _ignore_signals()
    leave_ray()
    if not patiently(lease.stop):
        end("another process took over this step")
    state |= {"state": STATES[code], "ended": time.time(), "error": error}
    try:
        if code == DONE:
            done = {"attempt": number, "ended": state["ended"], **made, "provenance": state["provenance"]}
            patiently(lambda: storage.create_exclusive(f"{step.folder}/done.json", json_bytes(done)))
        patiently(lambda: storage.write_json(f"{folder}/state.json", state))
        patiently(save_log)
        patiently(lease.release)
    except OvertakenError as overtaken:
        end(str(overtaken))
    emit({"event": STATES[code], "attempt": number, "error": error})
    return code


def _work(context: StepContext) -> tuple[int, str | None, dict[str, Any]]:
    """(exit code, error, result of the step's function and what it read)."""
    config = context.step.config
    try:
        read = note(context)  # before the step reads it: what changes meanwhile has changed since
        result = _storable(STEP_TYPES[config.type].run(config, context), context.step.name)
        return DONE, None, {"result": result, "read": read}
    except KeyboardInterrupt as stop:
        return INTERRUPTED, str(stop) or "stopped by a signal", {}
    except (Exception, SystemExit) as failure:
        # The boundary of user code: whatever it raises is recorded, and decides only this step's fate.
        if type(failure).__name__ == "PreemptedError":  # by name, as below
            return INTERRUPTED, str(failure), {}
        traceback.print_exc()
        code = classify(failure)
        return code, said(failure, code), {}


def _storable(result: Any, step: str) -> dict[str, Any]:
    """`result` if done.json can hold it, which others then rely on. Raises ConfigError."""
    reason = "" if isinstance(result, dict) else "it is not a dict"
    try:
        json.dumps(result)
    except (TypeError, ValueError) as error:
        reason = str(error)
    if reason:
        raise ConfigError(f"step {step!r} returned {result!r:.80} ({reason}); return a dict of plain values")
    return result


_stop = StopRequest()  # of this process, as signals are


def _interrupt(signum: int, frame: Any) -> None:
    # Once is enough: a cancelled job's processes are signalled by Ray and by our driver, and the second signal would
    # interrupt the orderly end.
    if signum != AT_ONCE and (_stop.asked.is_set() or _stop.possible.is_set()):
        _stop.asked.set()
        return
    _ignore_signals()
    raise Interrupted(f"stopped by {signal.Signals(signum).name}")


def _ignore_signals() -> None:
    for number in (signal.SIGTERM, signal.SIGINT, AT_ONCE):
        signal.signal(number, signal.SIG_IGN)


def _follow_lifeline(stdin: IO[bytes]) -> None:
    stdin.read()
    os.kill(os.getpid(), signal.SIGKILL)


def main() -> int:
    """Entry point of the child process."""
    faulthandler.enable()
    logging.basicConfig(level=logging.INFO, format="%(asctime)s %(name)s: %(message)s")
    for talker in ("aiobotocore.credentials", "botocore.credentials"):
        logging.getLogger(talker).setLevel(logging.WARNING)  # a line about where the keys are, in every log
    for number in (signal.SIGTERM, signal.SIGINT, AT_ONCE):
        signal.signal(number, _interrupt)
    stdin, events = sys.stdin.buffer, os.fdopen(os.dup(1), "w", buffering=1)
    os.dup2(2, 1)  # what recipes and files of one's own print while they are imported is no event
    job = json.loads(stdin.readline())
    threading.Thread(target=_follow_lifeline, args=(stdin,), name="lifeline", daemon=True).start()

    def emit(event: dict[str, Any]) -> None:
        with suppress(BrokenPipeError):
            events.write(json.dumps(event) + "\n")

    from lt2_platform.storage import Storage

    try:
        if job["record"]["recipe_file"]:
            load_source(job["record"]["recipe_file"])
        workflow = workflow_from_record(job["record"], source="recipe")
        return run_attempt(Storage(job["storage"]), workflow, job["step"], job["attempt"], job["ttl_s"], emit)
    except KeyboardInterrupt:
        return INTERRUPTED
    except OvertakenError as error:  # while it began or ended; a step's own is met before that
        end_process(str(error))
        raise
    except ConfigError as error:  # of the record: an attempt's own are in its end
        emit({"event": STATES[BAD_INPUT], "attempt": job["attempt"], "error": str(error)})
        return BAD_INPUT


if __name__ == "__main__":
    try:
        code = main()
    except Exception:  # the interpreter's own end would abort, because a thread is reading stdin
        traceback.print_exc()
        code = FAILED
    sys.stdout.flush()
    sys.stderr.flush()
    # Not sys.exit: a thread that a library left behind must not keep a finished step's process alive.
    os._exit(code)
