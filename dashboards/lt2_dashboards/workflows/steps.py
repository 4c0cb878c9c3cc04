"""One step and its attempts, read from the records that the workflow engine leaves in storage.

steps/<step id>/spec.json                   {"name", "config", "needs": {step name: step id}}
steps/<step id>/attempts/<n>/{lease,state}.json, log
steps/<step id>/done.json
"""

from __future__ import annotations

from collections.abc import Iterable
from concurrent.futures import ThreadPoolExecutor
from typing import Any

from lt2_dashboards.workflows.records import NotThereError, Records, checked
from lt2_platform.results.tables import as_text, flatten
from lt2_platform.step_records import attempt_state
from lt2_platform.storage import Storage

LOG_TAIL = 200_000  # bytes of a log that one answer carries
MAX_ATTEMPTS = 50  # newest first on a step's page


def read_step(storage: Storage, step_id: str, now: float) -> dict[str, Any]:
    """One step: settings, every attempt, the result it left, and files that could not be read."""
    records = Records(storage)
    spec = records.required(spec_path(step_id), f"no step {step_id[:60]!r} in {storage.root}")
    done = records.read(_done_path(step_id))
    numbers = _attempts(storage, step_id)[-MAX_ATTEMPTS:]
    attempts = [{"attempt": n, **_attempt(records, step_id, n, now)} for n in reversed(numbers)]
    if _done_path(step_id) in records.skipped:  # an attempt's own word is not what the engine goes by
        attempts = [each | ({"state": "unreadable"} if each["state"] == "done" else {}) for each in attempts]
    result = (done or {}).get("result")
    return {
        "id": step_id,
        "name": spec.get("name", step_id),
        "config": {key: as_text(value) for key, value in sorted(flatten(spec.get("config", {})).items())},
        "needs": spec.get("needs", {}),
        "sweep": spec.get("config", {}).get("type") == "sweep",
        "done": done is not None,
        "result": {k: as_text(v) for k, v in flatten(result if isinstance(result, dict) else {}).items()},
        "attempts": attempts,
        "skipped": records.lines(),
    }


def read_log(storage: Storage, step_id: str, attempt: int) -> dict[str, Any]:
    """The end of an attempt's log. Undecodable bytes are shown as �; control characters are left to the page."""
    path = f"steps/{checked(step_id)}/attempts/{attempt}/log"
    if not 0 < attempt < 10**9:
        raise NotThereError(f"no attempt {str(attempt)[:20]} of {step_id}")
    try:
        with storage.open(path) as file:
            size = file.seek(0, 2)
            file.seek(max(0, size - LOG_TAIL))
            text = file.read().decode("utf-8", "replace")
    except (FileNotFoundError, NotADirectoryError):
        return {"text": None, "size": 0, "cut": 0}
    return {"text": text, "size": size, "cut": max(0, size - LOG_TAIL)}


def spec_path(step_id: str) -> str:
    """Where a step's settings are."""
    return f"steps/{checked(step_id)}/spec.json"


def step_states(records: Records, step_ids: Iterable[str], now: float) -> dict[str, dict[str, Any]]:
    """{"state", "attempt", "started", "ended", "error"} by id: each read once, for the trials of a sweep share steps.

    States are those of `attempt_state`, and "unreadable" where a record is damaged.
    """
    ids = list(dict.fromkeys(step_ids))
    with ThreadPoolExecutor(min(16, len(ids) or 1)) as pool:  # S3 answers in tens of ms
        return dict(zip(ids, pool.map(lambda step_id: _step_state(records, step_id, now), ids)))


def _done_path(step_id: str) -> str:
    return f"steps/{checked(step_id)}/done.json"


def _step_state(records: Records, step_id: str, now: float) -> dict[str, Any]:
    done = records.read(_done_path(step_id))
    numbers = _attempts(records.storage, step_id)
    attempt = ((done or {}).get("attempt") or numbers[-1]) if numbers else 0
    found = _attempt(records, step_id, attempt, now) if attempt else {"state": "waiting"}
    if done is not None:
        found |= {"state": "done", "ended": done.get("ended"), "error": None}
    elif line := records.skipped.get(_done_path(step_id)):
        found |= {"state": "unreadable", "error": line}
    elif found["state"] == "done" and not records.storage.is_file(_done_path(step_id)):
        found |= {"state": "waiting"}  # its record was removed, to run it again; one made since we looked is there
    return {key: found.get(key) for key in ("state", "started", "ended", "error")} | {"attempt": attempt}


def _attempt(records: Records, step_id: str, attempt: int, now: float) -> dict[str, Any]:
    paths = [f"steps/{step_id}/attempts/{attempt}/{name}.json" for name in ("state", "lease")]
    state, lease = records.read_all(paths)
    name = attempt_state(state, lease, now)
    broken = records.skipped.get(paths[0]) or (records.skipped.get(paths[1]) if name == "lost" else None)
    known = {key: (state or {}).get(key) for key in ("started", "ended", "error")}
    known |= {"state": name, "host": (lease or {}).get("host"), "provenance": (state or {}).get("provenance") or {}}
    return known | ({"state": "unreadable", "error": broken} if broken else {})


def _attempts(storage: Storage, step_id: str) -> list[int]:
    return sorted(int(n) for n in storage.list(f"steps/{step_id}/attempts") if n.isdigit() and len(n) < 9)
