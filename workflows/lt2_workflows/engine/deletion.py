"""Deletes what a step made and recorded, so that whoever runs it again begins anew, whenever the deletion is cut off.

    steps/<id>/deleting.json    while what the step made is being deleted; the next attempt ends that before it begins

What is left of a step is the lease that the deletion held: a process of an earlier attempt that everybody took for
dead, and that goes on one day, must still find its fence.
"""

from __future__ import annotations

import time
from collections.abc import Sequence
from typing import TYPE_CHECKING

from lt2.config import ConfigError
from lt2_platform.fence import OvertakenError
from lt2_platform.step_records import this_process
from lt2_workflows.engine.records import TTL_S, Lease, Watch, describe_holder, last_attempt

if TYPE_CHECKING:
    from lt2_platform.storage import Storage

DELETING = "deleting.json"


def check_idle(storage: Storage, step_ids: Sequence[str], pause_s: float = 1.0) -> None:
    """Return once no living process holds any of the steps; of one that died without a word, its time-to-live (30 s)
    tells. Raises ConfigError for one that is alive."""
    watches = {step_id: Watch(storage, f"steps/{step_id}") for step_id in step_ids}
    while watches:
        for step_id, watch in list(watches.items()):
            _, holder = watch.holder()
            if holder is None:
                del watches[step_id]
            elif watch.heard():
                raise ConfigError(
                    f"step {step_id} is being run by {describe_holder(holder)}; stop it first (Ctrl-C, `lt2 cancel`)"
                )
        if watches:
            time.sleep(pause_s)


def delete_step(storage: Storage, step_id: str, ttl_s: float = TTL_S) -> None:
    """Delete a step that is idle (`check_idle`) but for one lease. Raises ConfigError if another process begins to run
    it meanwhile."""
    folder = f"steps/{step_id}"
    attempt = last_attempt(storage, folder) + 1
    lost: list[str] = []
    lease = Lease(storage, folder, attempt, ttl_s, on_lost=lost.append)
    if not lease.acquire():
        raise ConfigError(
            f"step {step_id} is being run by another process since a moment ago; nothing of it is deleted"
        )
    storage.write_json(f"{folder}/{DELETING}", this_process())
    clear(storage, folder)
    for number in range(1, attempt):
        storage.delete(f"{folder}/attempts/{number}")
    storage.delete(f"{folder}/spec.json")
    if not lease.stop() or lost:
        raise OvertakenError(f"step {step_id}: another process took over while it was being deleted")
    lease.release()


def clear(storage: Storage, folder: str) -> None:
    """End a deletion that has begun in this step's folder, if any: first what says that the step is done goes, then
    what it made, and last what says that both are going."""
    if storage.is_file(f"{folder}/{DELETING}"):
        storage.delete(f"{folder}/done.json")
        storage.delete(f"{folder}/out")
        storage.delete(f"{folder}/{DELETING}")
