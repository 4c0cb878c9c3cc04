"""What lies in a checkpoint folder, and getting rid of what a policy does not keep."""

from __future__ import annotations

from typing import Any

from lt2_platform.storage import Storage
from lt2_platform.train.checkpoints.integrity import CheckpointError, all_names, complete, damage, delete, step_of
from lt2_platform.train.checkpoints.retention import Keep, kept, read_best, stored_loss


def folder_of(uri: str) -> str:
    """The folder that holds the checkpoints of a run's folder, or `uri` if it is that folder itself."""
    storage = Storage(uri)
    for folder in (storage.root, storage.join("checkpoints")):
        if all_names(folder):
            return folder
    raise CheckpointError(f"{uri}: no checkpoint in it or in {storage.join('checkpoints')}")


def entries(folder: str, *, verify: bool = False) -> list[dict[str, Any]]:
    """One record per checkpoint, oldest first: checkpoint, step, bytes, complete, best, validation_loss, problems.

    problems is None unless `verify` reads every file (its size and sha256): then a list, empty when all is well.
    """
    storage, best = Storage(folder), read_best(folder) or {}
    whole = set(complete(folder))
    found = []
    for name in all_names(folder):
        problems = (damage(storage.join(name)) if name in whole else ["incomplete"]) if verify else None
        record = {"checkpoint": name, "step": step_of(name), "bytes": _size(storage, name), "complete": name in whole}
        record |= {
            "best": name == best.get("checkpoint"),
            "validation_loss": stored_loss(storage.join(name)),
        }
        found.append(record | {"problems": problems})
    return found


def prune(folder: str, policy: Keep, *, verified: list[dict[str, Any]] | None = None) -> list[str]:
    """Delete the complete checkpoints that `policy` does not keep; their names.

    `verified` (from `entries(verify=True)`): damaged ones are deleted and do not count as kept. Incomplete ones stay:
    a run may be writing them, and the next attempt cleans up. Raises CheckpointError if nothing intact would be left.
    """
    names = complete(folder)
    damaged = {record["checkpoint"] for record in verified or [] if record["problems"]}
    intact = [name for name in names if name not in damaged]
    if not intact:
        raise CheckpointError(f"{folder}: no intact checkpoint; nothing is pruned")
    stay = kept(intact, policy, (read_best(folder) or {}).get("checkpoint"))
    gone = [name for name in names if name not in stay]
    for name in gone:
        delete(folder, name)
    return gone


def _size(storage: Storage, name: str) -> int:
    return int(storage.fs.du(storage.join(name), total=True))
