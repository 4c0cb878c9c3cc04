"""Keeps everybody from running a step while what it made is deleted or copied, by the same leases as attempts do.

    steps/<id>/incomplete.json    while its output is not whole; the next attempt deletes what there is before it begins

The lease stays when the rest of a step is gone: a process of an earlier attempt that everybody took for dead, and that
goes on one day, must still find its fence.
"""

from __future__ import annotations

import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import TYPE_CHECKING

from lt2.config import ConfigError
from lt2_platform.fence import OvertakenError
from lt2_platform.step_records import this_process
from lt2_workflows.engine.records import TTL_S, Lease, Watch, describe_holder, last_attempt

if TYPE_CHECKING:
    from lt2_platform.storage import Storage

INCOMPLETE = "incomplete.json"


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


@contextmanager
def hold(storage: Storage, step_id: str, ttl_s: float = TTL_S) -> Iterator[int]:
    """Hold the next attempt of an idle step (`check_idle`), whose number it gives, with its output marked incomplete.

    Who ends the block without an error has taken that mark away. Raises ConfigError if another process has begun to run
    the step meanwhile.
    """
    folder = f"steps/{step_id}"
    attempt, lost = last_attempt(storage, folder) + 1, []
    lease = Lease(storage, folder, attempt, ttl_s, on_lost=lost.append)
    if not lease.acquire():
        raise ConfigError(f"step {step_id} is being run by another process since a moment ago; try again later")
    try:
        storage.write_json(f"{folder}/{INCOMPLETE}", this_process())
        yield attempt
    finally:
        if ours := lease.stop():
            lease.release()
    if lost or not ours:
        raise OvertakenError(f"step {step_id}: another process took over")


def clear(storage: Storage, folder: str) -> None:
    """If a step's output is marked incomplete, delete it: first what says that the step is done, last the mark."""
    if storage.is_file(f"{folder}/{INCOMPLETE}"):
        storage.delete(f"{folder}/done.json")
        storage.delete(f"{folder}/out")
        storage.delete(f"{folder}/{INCOMPLETE}")
