"""Storage roots with workflows whose steps ended, made by hand."""

from __future__ import annotations

from lt2_workflows.engine import records

DONE = {"attempt": 1, "ended": 5.0, "result": {}, "provenance": {}}
LEASE = {
    "released": True,
    "beat": 3,
    "time": 4e9,
    "ttl_s": 30.0,
    "host": "h",
    "pid": 1,
    "machine": "other",
    "start": "1",
}


def step(storage, step_id, *, done=True, made=1000, **lease):
    """A step with one attempt that ended, `made` bytes of output."""
    folder = f"steps/{step_id}"
    storage.write_json(f"{folder}/spec.json", {"needs": {}, "config": {}})
    storage.write_json(records.lease_path(folder, 1), LEASE | lease)
    storage.write_json(f"{folder}/attempts/1/state.json", {"state": "done" if done else "failed"})
    storage.write_bytes(f"{folder}/out/made", b"x" * made)
    if done:
        storage.write_json(f"{folder}/done.json", DONE)


def workflow(storage, workflow_id, *ids, name=None, **fields):
    """Its record; a step that is not there yet is made."""
    for step_id in ids:
        if not storage.exists(f"steps/{step_id}"):
            step(storage, step_id)
    dag = {"workflow": name or workflow_id, "ids": {each.split("-")[0]: each for each in ids}, **fields}
    storage.write_bytes(f"workflows/{workflow_id}/dag.json", records.json_bytes(dag))  # in the recipe's order


def files(storage, folder):
    return sorted(storage.sizes(folder))
