"""What a workflow leaves in storage, and the lease that keeps two processes from running one step.

    steps/<name>-<fp8>/spec.json                  the step's config and fingerprint, created once
    steps/<name>-<fp8>/attempts/<n>/lease.json    who runs attempt n; rewritten by its holder as a heartbeat
    steps/<name>-<fp8>/attempts/<n>/state.json    how it went, and with which code and packages
    steps/<name>-<fp8>/attempts/<n>/log           everything it printed
    steps/<name>-<fp8>/done.json                  created exclusively when an attempt succeeds; holds its result
    steps/<name>-<fp8>/out/                       what it made
    steps/<name>-<fp8>/incomplete.json            while that is being deleted or copied (engine/hold.py)
    workflows/<id>/dag.json                       the resolved recipe, which can be replayed
    workflows/<id>/recipe.py                      the newest driver's recipe file, if it is not a shipped one
    workflows/<id>/files/<path>                   its Python files that configs name by this relative path
    workflows/<id>/events/<driver>.jsonl          what each driver saw happen

To hold attempt n is to have created its lease.json. S3 has no reliable compare-and-swap, so a lease is never
taken from its holder by overwriting it: whoever finds it released or stale creates the lease of attempt n + 1, and
exactly one can. The former holder, should it still live, sees that attempt on its next heartbeat and ends itself. Until
then it may compute but not write: that lease is its fence (`lt2_platform.fence`), looked for before each write.
"""

from __future__ import annotations

import json
import logging
import threading
import time
import uuid
from collections.abc import Callable
from dataclasses import dataclass, field
from datetime import datetime
from pathlib import Path
from typing import TYPE_CHECKING, Any

from lt2.config import ConfigError
from lt2_platform.source_files import is_inside, python_sources
from lt2_platform.step_records import ORPHAN_GRACE_S, attempt_state, is_stale, this_process
from lt2_platform.storage_errors import PATIENCE_SECONDS, STORAGE_ERRORS
from lt2_workflows.engine.record_files import UnreadableRecordError, read_record
from lt2_workflows.graph import Step, Workflow

if TYPE_CHECKING:
    from lt2_platform.storage import Storage

log = logging.getLogger(__name__)

TTL_S = 30.0
UNREADABLE = "unreadable"  # the state of a step with a damaged record


def write_workflow(storage: Storage, workflow: Workflow) -> None:
    """Record the resolved workflow and the spec of each of its steps, each once, and the user's files as they are."""
    ids = {name: step.id for name, step in workflow.steps.items()}
    record = workflow.record() | {"id": workflow.id, "name": workflow.name, "ids": ids}
    storage.create_exclusive(f"workflows/{workflow.id}/dag.json", json_bytes(record))
    if workflow.recipe_file:
        storage.write_bytes(f"workflows/{workflow.id}/recipe.py", Path(workflow.recipe_file).read_bytes())
    for source in dict.fromkeys(python_sources(record)):
        if is_inside(source):
            storage.write_bytes(f"workflows/{workflow.id}/files/{source}", Path(source).read_bytes())
    for step in workflow.steps.values():
        identities = {need: workflow.steps[need].fingerprint for need in step.needs}
        spec = {
            "name": step.name,
            "fingerprint": step.fingerprint,
            "identity": step.config.identity(identities),
            "config": step.config.model_dump(mode="json"),
            "needs": {need: workflow.steps[need].id for need in step.needs},
        }
        path = f"{step.folder}/spec.json"
        if not storage.create_exclusive(path, json_bytes(spec)):
            found = (read_record(storage, path) or {}).get("fingerprint")
            if found != step.fingerprint:
                raise RuntimeError(f"{storage.join(path)} has fingerprint {found}, expected {step.fingerprint}")


def lease_path(folder: str, attempt: int) -> str:
    return f"{folder}/attempts/{attempt}/lease.json"


def read_done(storage: Storage, step: Step) -> dict[str, Any] | None:
    """The done record {"attempt", "ended", "result", "read", "provenance"}, or None while the step is unfinished."""
    return read_record(storage, f"{step.folder}/done.json")


def read_state(storage: Storage, folder: str, attempt: int) -> dict[str, Any]:
    """How an attempt went: {"state": "running"|"done"|"failed"|"interrupted"|"infrastructure", …}."""
    return read_record(storage, f"{folder}/attempts/{attempt}/state.json") or {"state": "running"}


def last_attempt(storage: Storage, folder: str) -> int:
    """The number of the newest attempt, 0 before the first."""
    return max((int(name) for name in storage.list(f"{folder}/attempts") if name.isdigit()), default=0)


@dataclass
class Lease:
    """The right to run one attempt of a step, kept alive by a thread until `release`.

    `on_beat` is called with every heartbeat (the attempt's log is uploaded there). When the lease is lost, because
    another process took over or storage could not be written for as long as anything waits for it, `on_lost` is called
    from the thread; it must end the process, since the work must not go on. A holder whose heartbeats are refused looks
    dead to others before that; until one of them takes over nothing is lost, and from then on the fence holds.
    """

    storage: Storage
    folder: str
    attempt: int
    ttl_s: float
    on_lost: Callable[[str], None]
    on_beat: Callable[[], None] = lambda: None
    holder: dict[str, Any] = field(default_factory=dict)
    _stop: threading.Event = field(default_factory=threading.Event)
    _thread: threading.Thread | None = None

    @property
    def path(self) -> str:
        return lease_path(self.folder, self.attempt)

    @property
    def fence(self) -> str:
        """The path of the lease of the next attempt: once it exists, that attempt has taken over from this one."""
        return lease_path(self.folder, self.attempt + 1)

    def acquire(self) -> bool:
        """Claim the attempt and start the heartbeat; False if another process has claimed it."""
        self.holder = {**this_process(), "token": uuid.uuid4().hex, "ttl_s": self.ttl_s, "beat": 0, "released": False}
        if not self.storage.create_exclusive(self.path, json_bytes(self._content())):
            return False
        self._thread = threading.Thread(target=self._keep, name="lease", daemon=True)
        self._thread.start()
        return True

    def stop(self) -> bool:
        """End the heartbeat and wait for its thread; True if the lease was still ours afterwards."""
        self._stop.set()
        if self._thread is not None:
            self._thread.join()
        return not self._superseded()

    def release(self) -> None:
        """Let the next attempt start at once. Call after `stop`."""
        self.holder["released"] = True
        self.storage.write_bytes(self.path, json_bytes(self._content()))

    def _keep(self) -> None:
        written = time.monotonic()
        while not self._stop.wait(self.ttl_s / 6):
            try:
                if self._superseded():
                    self.on_lost("another process took over this step")
                self.holder["beat"] += 1
                self.storage.write_bytes(self.path, json_bytes(self._content()))
                written = time.monotonic()
                self.on_beat()
            except Exception as error:
                if time.monotonic() - written > PATIENCE_SECONDS:  # any storage may fail in any way for a while
                    self.on_lost(f"no heartbeat could be written: {error}")

    def _superseded(self) -> bool:
        return self.storage.is_file(self.fence)

    def _content(self) -> dict[str, Any]:
        return {**self.holder, "attempt": self.attempt, "time": time.time()}


@dataclass
class Watch:
    """Decides, by looking repeatedly, whether the newest attempt of a step still has a living holder."""

    storage: Storage
    folder: str
    _seen: tuple[int, int] | None = None
    _since: float = 0.0
    _beats: int = 0

    def holder(self) -> tuple[int, dict[str, Any] | None]:
        """(newest attempt, its lease or None if the next attempt may start)."""
        attempt = last_attempt(self.storage, self.folder)
        lease = read_record(self.storage, lease_path(self.folder, attempt)) if attempt else None
        if lease is None or lease["released"]:
            return attempt, None
        if self._seen != (attempt, lease["beat"]):
            self._beats += self._seen is not None
            self._seen, self._since = (attempt, lease["beat"]), time.monotonic()
        silent = time.monotonic() - self._since
        return attempt, None if is_stale(lease, silent) else lease

    def heard(self) -> bool:
        """True once a heartbeat arrived while we were looking: the holder is certainly alive."""
        return self._beats > 0


def release_for(storage: Storage, folder: str, attempt: int) -> None:
    """Release the lease of an attempt whose process, our child, ended without doing so; its Ray workers end first."""
    path = lease_path(folder, attempt)
    lease = read_record(storage, path)
    if lease is not None and not lease["released"]:
        time.sleep(ORPHAN_GRACE_S)
        storage.write_bytes(path, json_bytes({**lease, "released": True}))


def describe_holder(lease: dict[str, Any]) -> str:
    return f"process {lease['pid']} on {lease['host']}"


@dataclass
class Events:
    """This driver's history of a workflow. Each driver owns one file, since S3 cannot append.

    Each event is written with all before it. So one that storage refuses, because it is full or away for a while, comes
    with the next, and need not end the steps that run.
    """

    storage: Storage
    workflow_id: str
    lines: list[str] = field(default_factory=list)
    driver: str = field(default_factory=lambda: f"{datetime.now():%Y%m%dT%H%M%S.%f}-{uuid.uuid4().hex[:6]}")  # in order
    _lock: threading.Lock = field(default_factory=threading.Lock)

    def add(self, event: dict[str, Any]) -> None:
        with self._lock:
            self.lines.append(json.dumps({"time": time.time(), **event}))
            path, text = f"workflows/{self.workflow_id}/events/{self.driver}.jsonl", "\n".join(self.lines) + "\n"
            try:
                self.storage.write_bytes(path, text.encode())
            except STORAGE_ERRORS as error:
                log.warning("%s could not be written (%s); its next event brings this one along", path, error)


def step_state(storage: Storage, folder: str) -> dict[str, Any]:
    """What `lt2 status` says of a step: {"state", "attempt", "error", "log", "ended"}; states as of `attempt_state`.

    A lost one ended with its last sign of life.
    """
    attempt = last_attempt(storage, folder)
    log = storage.join(folder, f"attempts/{attempt}/log") if attempt else None
    done = read_record(storage, f"{folder}/done.json")
    if done is not None:
        log = storage.join(folder, f"attempts/{done['attempt']}/log")
        return {"state": "done", "attempt": done["attempt"], "ended": done["ended"], "error": None, "log": log}
    if not attempt:
        return {"state": "waiting", "attempt": 0, "ended": None, "error": None, "log": None}
    # In this order: a lease is released after the last word on how the attempt went.
    lease = read_record(storage, lease_path(folder, attempt))
    state = read_record(storage, f"{folder}/attempts/{attempt}/state.json")
    known = {key: (state or {}).get(key) for key in ("ended", "error")}
    shown = attempt_state(state, lease, time.time())
    if shown == "done":  # done.json comes before: it was made since we looked, or removed to run the step again
        if storage.is_file(f"{folder}/done.json"):
            return step_state(storage, folder)
        shown = "waiting"
    if shown == "lost" and lease is not None:  # nobody wrote down when
        known["ended"] = lease["time"]
    return {"state": shown, "attempt": attempt, **known, "log": log}


def list_workflows(storage: Storage, wanted: str | None = None) -> list[dict[str, Any]]:
    """[{"id", "name", "steps": [{"name", "id", "needs"} + `step_state`]}] of all workflows, or of those `wanted`.

    A sweep's trial also has "part_of", the id of the sweep's step. A step with a damaged record has the state
    "unreadable"; a workflow with one has, among all of them, no steps but an "error". Asked for itself, it raises.
    """
    found = []
    for workflow_id in storage.list("workflows"):
        try:
            record = read_record(storage, f"workflows/{workflow_id}/dag.json")
        except UnreadableRecordError as error:
            if wanted in (workflow_id, workflow_id.rpartition("-")[0]):
                raise
            if wanted is None:
                found.append({"id": workflow_id, "name": workflow_id, "steps": [], "error": str(error)})
            continue
        if record is None or wanted not in (None, workflow_id, record["workflow"]):
            continue
        steps = [_listed(storage, name, step_id) for name, step_id in record["ids"].items()]
        part_of = {"part_of": record["part_of"]} if record.get("part_of") else {}
        found.append({"id": workflow_id, "name": record["workflow"], **part_of, "steps": steps})
    if wanted is not None and not found:
        raise ConfigError(f"no workflow {wanted!r} in {storage.root}; `lt2 status` lists them")
    return found


def _listed(storage: Storage, name: str, step_id: str) -> dict[str, Any]:
    needs: list[str] = []
    try:
        needs = list((read_record(storage, f"steps/{step_id}/spec.json") or {"needs": {}})["needs"])
        state = step_state(storage, f"steps/{step_id}")
    except UnreadableRecordError as error:
        state = {"state": UNREADABLE, "attempt": None, "ended": None, "error": str(error), "log": None}
    return {"name": name, "id": step_id, "needs": needs, **state}


def json_bytes(value: Any) -> bytes:
    return (json.dumps(value, indent=2) + "\n").encode()
