"""How many of a machine's cores a process may use, and how processes that run side by side share them.

More threads than cores are far worse than too few: PyTorch's wait by spinning, and two trainings with two threads each
took ten times as long on two cores as with one thread each.
"""

from __future__ import annotations

import math
import os
from collections.abc import Iterator, Mapping
from pathlib import Path

from lt2_platform.machine import control_groups


def share(environment: Mapping[str, str], among: int) -> dict[str, str]:
    """Variables that give a process its part of the cores that `environment` has; an OMP_NUM_THREADS of the user's
    stays."""
    if "OMP_NUM_THREADS" in environment and "LT2_CORES" not in environment:
        return {"OMP_NUM_THREADS": environment["OMP_NUM_THREADS"]}
    cores = int(environment.get("LT2_CORES") or usable())
    part = str(max(1, cores // among))
    return {"LT2_CORES": part, "OMP_NUM_THREADS": part}


def usable() -> int:
    """Cores that this process may use. taskset, Slurm, Docker and Kubernetes leave it fewer than the machine has, which
    is what os.cpu_count() says."""
    allowed = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    return max(1, math.ceil(min(allowed, quota())))


def quota(root: Path = Path("/")) -> float:
    """Cores' worth of time that the control groups of this process (either version) allow; infinite without a limit.

    root: where /proc and /sys are.
    """
    return min(_limits(root), default=math.inf)


def _limits(root: Path) -> Iterator[float]:
    for folder in control_groups.folders("cpu", root):
        if (both := folder / "cpu.max").is_file():
            most, period = both.read_text().split()
        elif (first := folder / "cpu.cfs_quota_us").is_file():
            most, period = first.read_text(), (folder / "cpu.cfs_period_us").read_text()
        else:
            continue
        if most != "max" and int(most) > 0:  # -1: no limit
            yield int(most) / int(period)
