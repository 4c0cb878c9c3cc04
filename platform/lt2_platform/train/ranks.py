"""Agreement among training workers; in a single process every function is trivial. All take the default group, or one
of their own: a thread that talks while training does needs another group than training."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch.distributed as dist

from lt2_platform.storage_errors import STORAGE_ERRORS
from lt2_platform.train.checkpoints.shards import StorageRefusedError

Group = dist.ProcessGroup | None


def rank() -> int:
    return dist.get_rank() if dist.is_initialized() else 0


def world_size() -> int:
    return dist.get_world_size() if dist.is_initialized() else 1


def is_rank_zero() -> bool:
    return rank() == 0


def background_group() -> Group:
    """A group of all ranks on gloo, whatever they train with; None in a single process. Collective."""
    if not dist.is_initialized():
        return None
    group = dist.new_group(backend="gloo")
    assert isinstance(group, dist.ProcessGroup)  # every rank belongs to it
    return group


def on_rank_zero(function: Callable[[], None], group: Group = None) -> None:
    """Call it on rank 0; if it fails every rank raises, StorageRefusedError where storage is why. Collective."""
    caught: Exception | None = None
    if rank() == 0:
        try:
            function()
        except Exception as error:  # noqa: BLE001  the other ranks would wait for ever
            caught = error
    refused, text = from_rank_zero((isinstance(caught, STORAGE_ERRORS), caught and str(caught)), group)
    if refused:
        raise StorageRefusedError(f"rank 0: {text}") from caught
    if caught is not None:
        raise caught
    if text is not None:
        raise RuntimeError(f"rank 0 failed: {text}")


def from_rank_zero(value: Any, group: Group = None) -> Any:
    """Rank 0's `value`, on every rank. Collective."""
    return gather(value, group)[0]


def gather(value: Any, group: Group = None) -> list[Any]:
    """Every rank's `value`, on every rank, by rank. Collective."""
    if not dist.is_initialized():
        return [value]
    values: list[Any] = [None] * world_size()
    dist.all_gather_object(values, value, group=group)
    return values
