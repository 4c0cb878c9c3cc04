"""Independent work items over whatever Ray there is, through Ray Data's executor."""

from __future__ import annotations

import functools
import logging
import os
import pickle
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

from lt2_platform.failures import as_value
from lt2_platform.fence import FENCE


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


def spread(
    function: Callable[[Any, Any], Any], items: Sequence[Any], shared: Any, limit: int | None, *, num_gpus: float = 0
) -> Iterator[Any]:
    """function(item, shared) for every item, on one CPU each, at most `limit` at a time; as they finish.

    num_gpus: what each task asks for beside its CPU. Many items share a task, fewer towards the end: Ray Data leaves a
    CPU idle for about 0.2 s between two tasks, a third of the time where an item takes as long as one of prepare's.

    Tasks, not actors: a pool of actors holds its CPUs while idle and starves whatever feeds it. Only descriptions and
    results pass through Ray; the functions read and write storage themselves. A task whose worker dies runs again; an
    exception of the function is raised here, and no task runs on after it.
    """
    import ray
    import ray.data
    from ray import cloudpickle

    if not items:
        return
    with quiet():
        lanes = int(ray.cluster_resources().get("CPU", 1))
        groups = [items[start:stop] for start, stop in grouped(len(items), min(limit or lanes, lanes))]
        rows = [{"items": pickle.dumps(group)} for group in groups]
        data = ray.data.from_items(rows, override_num_blocks=len(rows))
        data.context.enable_progress_bars = False
        # The reservation keeps half of the CPUs for other operators. There is one, and on a small machine it would run
        # its tasks one at a time: two tasks overlapped 0 % of the time with it on two CPUs, 96 % without.
        data.context.op_resource_reservation_enabled = False
        # Results are records of a few hundred bytes, and whoever asked for them takes them at once. This policy still
        # came to run one task at a time, from the middle of a corpus to its end, on two CPUs.
        data.context.downstream_capacity_backpressure_ratio = None
        compute = ray.data.TaskPoolStrategy(size=min(limit or len(rows), len(rows)))
        fence = os.environ.get(FENCE)  # they write, and work on while this process is stopped
        call = cloudpickle.dumps((function, shared, fence))  # pyright: ignore[reportPrivateImportUsage, reportAttributeAccessIssue]
        results = data.map(functools.partial(_call, call), num_cpus=1, num_gpus=num_gpus or None, compute=compute)
        for row in results.iter_rows():
            failure, found = pickle.loads(row["results"])
            yield from found
            if failure is not None:
                raise failure


MOST_PER_TASK, TASKS_LEFT = 8, 4


def grouped(count: int, lanes: int) -> Iterator[tuple[int, int]]:
    """Cuts `count` items into [start, stop): at most MOST_PER_TASK, and few enough that what is left of them always
    makes TASKS_LEFT tasks for each of `lanes`, down to one item."""
    start = 0
    while start < count:
        stop = start + max(1, min(MOST_PER_TASK, (count - start) // (TASKS_LEFT * lanes)))
        yield start, stop
        start = stop


def _call(call: bytes, row: dict[str, Any]) -> dict[str, Any]:
    function, shared, fence = pickle.loads(call)
    if fence is not None:
        os.environ[FENCE] = fence  # of this worker, which is of our job alone
    found, failure = [], None
    try:
        for item in pickle.loads(row["items"]):
            found.append(function(item, shared))
    except Exception as error:
        failure = as_value(error)
    return {"results": pickle.dumps((failure, found))}


@contextmanager
def quiet() -> Iterator[None]:
    """Ray Data's log without its plans and progress."""
    log = logging.getLogger("ray.data")
    level = log.level
    log.setLevel(logging.WARNING)
    try:
        yield
    finally:
        log.setLevel(level)
