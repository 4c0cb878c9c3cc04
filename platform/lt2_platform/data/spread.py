"""Independent work items over whatever Ray there is, through Ray Data's executor."""

from __future__ import annotations

import functools
import logging
import os
import pickle
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any


@contextmanager
def some_ray(num_cpus: int | None) -> Iterator[None]:
    """The Ray of this process, else the one in RAY_ADDRESS, else a local one that ends with the block."""
    import ray

    if ray.is_initialized():
        yield
        return
    if os.environ.get("RAY_ADDRESS"):
        ray.init(log_to_driver=False)
    else:
        # "local" because a bare init joins any Ray it finds on the machine, whoever owns it.
        ray.init(address="local", num_cpus=num_cpus, include_dashboard=False, log_to_driver=False)
    try:
        yield
    finally:
        ray.shutdown()


def spread(function: Callable[[Any, Any], Any], items: Sequence[Any], shared: Any, limit: int | None) -> Iterator[Any]:
    """function(item, shared) for every item, one CPU and one task each, at most `limit` at a time; as they finish.

    Tasks, not actors: a pool of actors holds its CPUs while idle and starves whatever feeds it. Only descriptions and
    results pass through Ray; the functions read and write storage themselves. A task whose worker dies runs again.
    """
    import ray.data

    if not items:
        return
    with _quiet():
        rows = [{"item": pickle.dumps(item)} for item in items]
        data = ray.data.from_items(rows, override_num_blocks=len(rows))
        data.context.enable_progress_bars = False
        compute = ray.data.TaskPoolStrategy(size=limit)
        call = pickle.dumps((function, shared))
        for row in data.map(functools.partial(_call, call), num_cpus=1, compute=compute).iter_rows():
            yield pickle.loads(row["result"])


def _call(call: bytes, row: dict[str, Any]) -> dict[str, Any]:
    function, shared = pickle.loads(call)
    return {"result": pickle.dumps(function(pickle.loads(row["item"]), shared))}


@contextmanager
def _quiet() -> Iterator[None]:
    log = logging.getLogger("ray.data")
    level = log.level
    log.setLevel(logging.WARNING)
    try:
        yield
    finally:
        log.setLevel(level)
