"""Room for training workers on a cluster. A worker fits on one node or nowhere: sums over nodes say nothing of it."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import ray
from ray._private.state import available_resources_per_node  # public ones sum over nodes, or ask a dashboard
from ray.util import placement_group_table

from lt2.config import ConfigError

Request = Mapping[str, float]
UNITS = 10_000  # Ray's own precision: 3 x 0.1 of a CPU fit into 0.3


def worker_request(num_workers: int, cpus_per_worker: float | None, use_gpu: bool) -> dict[str, float]:
    """What each worker asks of Ray; without `cpus_per_worker` a CPU, or half of one where CPUs are scarce."""
    gpu = {"GPU": 1.0} if use_gpu else {}
    if cpus_per_worker is not None:
        return {"CPU": cpus_per_worker} | gpu
    whole, half = {"CPU": 1.0} | gpu, {"CPU": 0.5} | gpu
    # Half a CPU on a small machine leaves room for the tasks of other steps.
    spare = sum(node["Resources"].get("CPU", 0) for node in _nodes()) > num_workers
    return whole if spare and places(whole) >= min(num_workers, places(half)) else half


def places(request: Request) -> int:
    """How many workers fit on the cluster's nodes when nothing else runs, if each asks for `request`."""
    return _room([node["Resources"] for node in _nodes()], request)


def check_places(least: int, request: Request, lower: str, *, per_worker: str = "cpus_per_worker") -> None:
    """Raise ConfigError unless `least` workers have places: Ray would wait for ever, without a word.

    lower: the setting that says how many workers there must be; per_worker: the one that says what CPUs each asks for.
    """
    found = places(request)
    if found >= least:
        return
    largest = max(_nodes(), key=lambda node: [node["Resources"].get(name, 0) for name in reversed(list(request))])
    has = {name: largest["Resources"].get(name, 0) for name in request}
    setting = per_worker if found == 0 and 0 < has["CPU"] < request["CPU"] else lower
    raise ConfigError(
        f"no room for {_counted(least, 'worker')} of {describe(request)}: the cluster has places for {found}; "
        f"its largest node, {largest.get('NodeManagerHostname') or largest['NodeID']}, has {describe(has)}; "
        f"lower {setting} or add nodes"
    )


def shortage(least: int, request: Request) -> str | None:
    """Why `least` workers must wait for others to end; None if nothing says that they must."""
    free = list(available_resources_per_node().values())
    room = _room(free, request)
    if room >= least:
        return None
    left = {name: sum(node.get(name, 0) for node in free) for name in request}
    why = f"waiting for {_counted(least, 'place')} of {describe(request)}: {describe(left)} free"
    if all(left[name] >= least * amount for name, amount in request.items()):
        return f"{why}, but in pieces: its nodes have room for {room}"
    return why


def kept_waiting() -> str | None:
    """Why workers that this process has asked Ray for do not begin: who asked at the same time came first. None while
    nothing says that they must wait.
    """
    job = ray.get_runtime_context().get_job_id()  # which a group's id ends with
    for key, group in placement_group_table().items():
        if key.endswith(job) and group["state"] == "PENDING" and group["stats"]["scheduling_state"] == "NO_RESOURCES":
            bundles = list(group["bundles"].values())
            return shortage(len(bundles), bundles[0])
    return None


def describe(amounts: Request) -> str:
    """'2 CPUs and 1 GPU'."""
    return " and ".join(_counted(amount, name) for name, amount in amounts.items())


def _nodes() -> list[dict[str, Any]]:
    return [node for node in ray.nodes() if node["Alive"]]


def _room(nodes: Sequence[Request], request: Request) -> int:
    return sum(min(_times(node, name, amount) for name, amount in request.items()) for node in nodes)


def _times(node: Request, name: str, amount: float) -> int:
    return round(node.get(name, 0) * UNITS) // max(1, round(amount * UNITS))


def _counted(amount: float, thing: str) -> str:
    return f"{amount:g} {thing}" if amount == 1 else f"{amount:g} {thing}s"
