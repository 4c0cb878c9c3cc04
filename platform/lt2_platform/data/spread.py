"""Independent work items over whatever Ray there is."""

from __future__ import annotations

import itertools
import os
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

RETRIES = 5
IN_FLIGHT = 1024  # enough for any cluster, few enough to wait on
CANCEL_S = 30.0


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

    Plain tasks: on tasks of a fifth of a second Ray Data's executor kept one of two CPUs busy most of the time, and a
    pool of actors holds its CPUs while idle. Only descriptions and results pass through Ray; the functions read and
    write storage themselves. A task whose worker dies runs again.
    """
    import ray

    task = ray.remote(num_cpus=1, max_retries=RETRIES)(_call)
    call = ray.put((function, shared))
    waiting = iter(items)
    running = [task.remote(call, item) for item in itertools.islice(waiting, limit or IN_FLIGHT)]
    try:
        while running:
            (done,), running = ray.wait(running)
            running += [task.remote(call, item) for item in itertools.islice(waiting, 1)]
            yield ray.get(done)
    finally:  # an error, or nobody listens any more: no task may write after this
        for each in running:
            ray.cancel(each)
        if running:
            ray.wait(running, num_returns=len(running), timeout=CANCEL_S)


def _call(call: tuple[Callable[[Any, Any], Any], Any], item: Any) -> Any:
    function, shared = call
    return function(item, shared)
