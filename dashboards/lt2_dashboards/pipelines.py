"""Workflows and their steps, read from the records that the workflow engine leaves in storage.

workflows/<id>/dag.json                     {"id", "ids": {step name: step id}, "steps"…}
steps/<step id>/spec.json                   {"name", "config", "needs": {step name: step id}}
steps/<step id>/attempts/<n>/{lease,state}.json, log
steps/<step id>/done.json
"""

from __future__ import annotations

import json
import re
from collections import Counter
from collections.abc import Iterable
from concurrent.futures import ThreadPoolExecutor
from typing import Any

from lt2.config import ConfigError
from lt2_platform.results_parts import read_many
from lt2_platform.results_tables import as_text, flatten
from lt2_platform.storage import Storage

LOG_TAIL = 200_000  # bytes of a log that one answer carries
MAX_WORKFLOWS = 200  # newest first on the list
MAX_TRIALS = 1_000  # on the page of a sweep's step
MAX_ATTEMPTS = 50  # newest first on a step's page
SILENT_LEASES = 2.0  # a holder whose heartbeat is older than this many leases is gone

STATES = ("failed", "running", "lost", "interrupted", "infrastructure", "waiting", "done")  # what needs attention first

_NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]{0,127}")


def read_workflows(storage: Storage, now: float) -> dict[str, Any]:
    """{"workflows", "trials", "left_out"}: those with the latest activity, and how many are not among them.

    A sweep's trials are counted at its step and left to that step's page; one whose sweep is gone is listed itself.
    """
    dags = _dags(storage)
    steps = {id_ for dag in dags.values() if not dag.get("part_of") for id_ in dag.get("ids", {}).values()}
    trials = Counter(dag["part_of"] for dag in dags.values() if dag.get("part_of") in steps)
    listed = {name: dag for name, dag in dags.items() if dag.get("part_of") not in trials}
    found = sorted(_summaries(storage, listed, now), key=lambda workflow: -workflow["updated"])
    for workflow in found:
        ids = listed[workflow["id"]].get("ids", {}).values()
        workflow["trials"] = {id_: trials[id_] for id_ in ids if id_ in trials}
    return {
        "workflows": found[:MAX_WORKFLOWS],
        "trials": trials.total(),
        "left_out": max(0, len(found) - MAX_WORKFLOWS),
    }


def read_trials(storage: Storage, step_id: str, now: float) -> dict[str, Any]:
    """The workflows that a sweep's step runs, those that need attention first: {"trials", "states", "left_out"}.

    "states" counts all of them, also those that "trials" leaves out.
    """
    checked(step_id)
    dags = {name: dag for name, dag in _dags(storage).items() if dag.get("part_of") == step_id}
    found = sorted(_summaries(storage, dags, now), key=lambda trial: (STATES.index(trial["state"]), trial["id"]))
    return {
        "trials": found[:MAX_TRIALS],
        "states": Counter(trial["state"] for trial in found),
        "left_out": max(0, len(found) - MAX_TRIALS),
    }


def read_workflow(storage: Storage, workflow_id: str, now: float) -> dict[str, Any]:
    """One workflow: steps in an order in which each comes after what it needs, edges, and what happened."""
    dag = _json(_read(storage, f"workflows/{checked(workflow_id)}/dag.json"))
    if dag is None:
        raise ConfigError(f"no workflow {workflow_id[:60]!r} in {storage.root}")
    ids = dag.get("ids", {})
    specs = [_json(data) or {} for data in read_many(storage, [f"steps/{id_}/spec.json" for id_ in ids.values()])]
    states = _step_states(storage, ids.values(), now)
    steps = [
        {"name": name, "id": id_, "needs": sorted(spec.get("needs", {})), **states[id_]}
        for (name, id_), spec in zip(ids.items(), specs)
    ]
    return {
        "id": workflow_id,
        "part_of": dag.get("part_of"),
        "recipe": dag.get("workflow") or workflow_id,
        "state": overall([step["state"] for step in steps]),
        "steps": in_order(steps),
        "events": _events(storage, workflow_id),
    }


def read_step(storage: Storage, step_id: str, now: float) -> dict[str, Any]:
    """One step: settings, every attempt, and the result it left."""
    spec = _json(_read(storage, f"steps/{checked(step_id)}/spec.json"))
    if spec is None:
        raise ConfigError(f"no step {step_id[:60]!r} in {storage.root}")
    done = _json(_read(storage, f"steps/{step_id}/done.json"))
    numbers = _attempts(storage, step_id)[-MAX_ATTEMPTS:]
    attempts = [{"attempt": n, **_attempt(storage, step_id, n, now)} for n in reversed(numbers)]
    result = (done or {}).get("result")
    return {
        "id": step_id,
        "name": spec.get("name", step_id),
        "config": {key: as_text(value) for key, value in sorted(flatten(spec.get("config") or {}).items())},
        "needs": spec.get("needs", {}),
        "sweep": (spec.get("config") or {}).get("type") == "sweep",
        "done": done is not None,
        "result": {k: as_text(v) for k, v in flatten(result if isinstance(result, dict) else {}).items()},
        "attempts": attempts,
    }


def read_log(storage: Storage, step_id: str, attempt: int) -> dict[str, Any]:
    """The end of an attempt's log. Undecodable bytes are shown as �; control characters are left to the page."""
    path = f"steps/{checked(step_id)}/attempts/{attempt}/log"
    if not 0 < attempt < 10**9:
        raise ConfigError(f"no attempt {str(attempt)[:20]} of {step_id}")
    try:
        with storage.open(path) as file:
            size = file.seek(0, 2)
            file.seek(max(0, size - LOG_TAIL))
            text = file.read().decode("utf-8", "replace")
    except (FileNotFoundError, NotADirectoryError):
        return {"text": None, "size": 0, "cut": 0}
    return {"text": text, "size": size, "cut": max(0, size - LOG_TAIL)}


def in_order(steps: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """Steps by level (0 needs nothing; otherwise one more than the highest it needs), each with its "level" and, in
    "edges", those of its needs that no other need implies: what a drawing has to show.
    """
    by_name = {step["name"]: step for step in steps}
    levels: dict[str, int] = {}

    def level(name: str, above: tuple[str, ...] = ()) -> int:
        if name not in levels:
            needs = [need for need in by_name[name]["needs"] if need in by_name and need not in above]
            levels[name] = max((level(need, (*above, name)) + 1 for need in needs), default=0)
        return levels[name]

    ordered = sorted(({**step, "level": level(step["name"])} for step in steps), key=lambda step: step["level"])
    before: dict[str, set[str]] = {}
    for step in ordered:
        implied = set().union(*(before.get(need, ()) for need in step["needs"]))
        before[step["name"]] = implied.union(step["needs"])
        step["edges"] = [need for need in step["needs"] if need not in implied]
    return ordered


def overall(states: list[str]) -> str:
    """One word for a workflow: the first of STATES that one of its steps is in."""
    return next((state for state in STATES if state in states), "done")


def checked(name: str) -> str:
    """`name` if it can be a folder of ours. Raises ConfigError: nothing else is ever joined to a path."""
    if not _NAME.fullmatch(name):
        raise ConfigError(f"{name[:60]!r} is no name of a workflow or step")
    return name


def _dags(storage: Storage) -> dict[str, dict[str, Any]]:
    names = [name for name in storage.list("workflows") if _NAME.fullmatch(name)]
    found = zip(names, map(_json, read_many(storage, [f"workflows/{name}/dag.json" for name in names])))
    return {name: dag for name, dag in found if dag is not None}


def _summaries(storage: Storage, dags: dict[str, dict[str, Any]], now: float) -> list[dict[str, Any]]:
    """A line of a list for each workflow; "error" is that of its first step that has one."""
    known = _step_states(storage, (id_ for dag in dags.values() for id_ in dag.get("ids", {}).values()), now)
    found = []
    for name, dag in dags.items():
        steps = [known[id_] for id_ in dag.get("ids", {}).values()]
        states = [step["state"] for step in steps]
        found.append(
            {
                "id": name,
                "recipe": dag.get("workflow") or name,
                "states": states,
                "state": overall(states),
                "error": next((step["error"] for step in steps if step["error"]), None),
                "updated": max((step["ended"] or step["started"] or 0 for step in steps), default=0),
            }
        )
    return found


def _step_states(storage: Storage, step_ids: Iterable[str], now: float) -> dict[str, dict[str, Any]]:
    """By id; each once, for the trials of a sweep share steps, and in parallel, because S3 answers in tens of ms."""
    ids = list(dict.fromkeys(step_ids))
    with ThreadPoolExecutor(min(16, len(ids) or 1)) as pool:
        return dict(zip(ids, pool.map(lambda step_id: _step_state(storage, step_id, now), ids)))


def _step_state(storage: Storage, step_id: str, now: float) -> dict[str, Any]:
    """{"state", "attempt", "started", "ended", "error"}; "lost" is a step whose process ended without a word."""
    done = _json(_read(storage, f"steps/{checked(step_id)}/done.json"))
    numbers = _attempts(storage, step_id)
    if not numbers:
        state = "done" if done is not None else "waiting"
        return {"state": state, "attempt": 0, "started": None, "ended": (done or {}).get("ended"), "error": None}
    attempt = (done or {}).get("attempt") or numbers[-1]
    found = {"attempt": attempt, **_attempt(storage, step_id, attempt, now)}
    if done is not None:
        found |= {"state": "done", "ended": done.get("ended"), "error": None}
    return {key: found.get(key) for key in ("state", "attempt", "started", "ended", "error")}


def _attempt(storage: Storage, step_id: str, attempt: int, now: float) -> dict[str, Any]:
    folder = f"steps/{step_id}/attempts/{attempt}"
    data = read_many(storage, [f"{folder}/state.json", f"{folder}/lease.json"])
    state, lease = (_json(item) for item in data)
    state, lease = state or {"state": "running"}, lease or {}
    name = state.get("state", "running")
    silent = now - lease.get("time", 0) > SILENT_LEASES * lease.get("ttl_s", 30.0)
    if name == "running" and (silent or lease.get("released")):
        name = "lost"
    known = {key: state.get(key) for key in ("started", "ended", "error", "progress")}
    return known | {"state": name, "host": lease.get("host"), "provenance": state.get("provenance") or {}}


def _attempts(storage: Storage, step_id: str) -> list[int]:
    return sorted(int(n) for n in storage.list(f"steps/{step_id}/attempts") if n.isdigit() and len(n) < 9)


def _events(storage: Storage, workflow_id: str) -> list[dict[str, Any]]:
    folder = f"workflows/{workflow_id}/events"
    names = [name for name in storage.list(folder) if name.endswith(".jsonl")][-20:]
    lines = [
        line for data in read_many(storage, [f"{folder}/{n}" for n in names]) for line in (data or b"").splitlines()
    ]
    events = [event for line in lines if (event := _json(line)) is not None]
    return sorted(events, key=lambda event: event.get("time") or 0)[-200:]


def _read(storage: Storage, path: str) -> bytes | None:
    return read_many(storage, [path])[0]


def _json(data: bytes | None) -> dict[str, Any] | None:
    """The object in `data`; None for a missing or damaged file, which a reader of a live store has to expect."""
    try:
        value = json.loads(data) if data is not None else None
    except ValueError:
        return None
    return value if isinstance(value, dict) else None
