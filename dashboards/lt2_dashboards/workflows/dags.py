"""Workflows, read from the records that the workflow engine leaves in storage.

workflows/<id>/dag.json                     {"id", "ids": {step name: step id}, "steps"…}; a trial's "part_of" a step id
"""

from __future__ import annotations

from collections import Counter
from typing import Any

from lt2_dashboards.workflows.records import Records, checked, is_name
from lt2_dashboards.workflows.steps import spec_path, step_states
from lt2_platform.storage import Storage

MAX_WORKFLOWS = 200  # newest first on the list
MAX_TRIALS = 1_000  # on the page of a sweep's step
# What needs attention first.
STATES = ("failed", "unreadable", "running", "lost", "interrupted", "infrastructure", "waiting", "done")


def read_workflows(storage: Storage, now: float) -> dict[str, Any]:
    """{"workflows", "trials", "left_out", "skipped"}: those with the latest activity, and how many are not among them.

    A sweep's trials are counted at its step and left to that step's page; one whose sweep is gone is listed itself.
    """
    records = Records(storage)
    dags = _dags(records)
    steps = {id_ for dag in dags.values() if not dag.get("part_of") for id_ in dag["ids"].values()}
    trials = Counter(dag["part_of"] for dag in dags.values() if dag.get("part_of") in steps and is_trial(dag))
    listed = {name: dag for name, dag in dags.items() if dag.get("part_of") not in steps}
    found = sorted(_summaries(records, listed, now), key=lambda workflow: -workflow["updated"])
    for workflow in found:
        ids = listed[workflow["id"]]["ids"].values()
        workflow["trials"] = {id_: trials[id_] for id_ in ids if id_ in trials}
    return {
        "workflows": found[:MAX_WORKFLOWS],
        "trials": trials.total(),
        "left_out": max(0, len(found) - MAX_WORKFLOWS),
        "skipped": records.lines(),
    }


def read_trials(storage: Storage, step_id: str, now: float) -> dict[str, Any]:
    """The workflows that a sweep's step runs, those that need attention first.

    {"trials", "states", "left_out", "skipped"}; "states" counts all of them, also those that "trials" leaves out. What
    the trials have in common is listed among them and not counted.
    """
    checked(step_id)
    records = Records(storage)
    dags = {name: dag for name, dag in _dags(records).items() if dag.get("part_of") == step_id}
    found = sorted(_summaries(records, dags, now), key=lambda trial: (STATES.index(trial["state"]), trial["id"]))
    return {
        "trials": found[:MAX_TRIALS],
        "states": Counter(trial["state"] for trial in found if is_trial(dags[trial["id"]])),
        "left_out": max(0, len(found) - MAX_TRIALS),
        "skipped": records.lines(),
    }


def read_workflow(storage: Storage, workflow_id: str, now: float) -> dict[str, Any]:
    """One workflow: steps in an order in which each comes after what it needs, edges, unreadable files."""
    records = Records(storage)
    absent = f"no workflow {workflow_id[:60]!r} in {storage.root}; it may have been deleted, its runs' numbers stay"
    dag = records.required(_dag_path(workflow_id), absent)
    ids = dag.get("ids", {})
    specs = [spec or {} for spec in records.read_all([spec_path(id_) for id_ in ids.values()])]
    states = step_states(records, ids.values(), now)
    steps = [
        {"name": name, "id": id_, "needs": sorted(spec.get("needs", {})), **states[id_]}
        for (name, id_), spec in zip(ids.items(), specs)
    ]
    return {
        "id": workflow_id,
        "part_of": dag.get("part_of"),
        "state": overall([step["state"] for step in steps]),
        "steps": in_order(steps),
        "skipped": records.lines(),
    }


def is_trial(dag: dict[str, Any]) -> bool:
    """Whether a workflow that is part of a sweep is one of its trials, not the steps that several of them share."""
    if "shared" in dag:
        return not dag["shared"]
    return not str(dag.get("workflow") or "").endswith("-shared")  # sweeps from before it was recorded


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


def _dags(records: Records) -> dict[str, dict[str, Any]]:
    names = [name for name in records.storage.list("workflows") if is_name(name)]
    found = zip(names, records.read_all([_dag_path(name) for name in names]))
    return {name: {"ids": {}} | dag for name, dag in found if dag is not None}


def _dag_path(workflow_id: str) -> str:
    return f"workflows/{checked(workflow_id)}/dag.json"


def _summaries(records: Records, dags: dict[str, dict[str, Any]], now: float) -> list[dict[str, Any]]:
    """A line of a list for each workflow; "error" is that of its first step that has one, after the step's name."""
    known = step_states(records, (id_ for dag in dags.values() for id_ in dag["ids"].values()), now)
    found = []
    for name, dag in dags.items():
        steps = [known[id_] for id_ in dag["ids"].values()]
        errors = (f"{step}: {known[id_]['error']}" for step, id_ in dag["ids"].items() if known[id_]["error"])
        states = [step["state"] for step in steps]
        found.append(
            {
                "id": name,
                "recipe": dag.get("workflow") or name,
                "states": states,
                "state": overall(states),
                "error": next(errors, None),
                "updated": max((step["ended"] or step["started"] or 0 for step in steps), default=0),
            }
        )
    return found
