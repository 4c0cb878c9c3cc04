"""Which share of a machine's cores a process may use: of what runs side by side, each its part.

More threads than cores are far worse than too few: PyTorch's wait by spinning, and two trainings with two threads each
took ten times as long on two cores as with one thread each.
"""

from __future__ import annotations

import os
from collections.abc import Mapping


def share(environment: Mapping[str, str], among: int) -> dict[str, str]:
    """Variables that give a process its part of the cores that `environment` has; an OMP_NUM_THREADS of the user's
    stays."""
    if "OMP_NUM_THREADS" in environment and "LT2_CORES" not in environment:
        return {"OMP_NUM_THREADS": environment["OMP_NUM_THREADS"]}
    cores = int(environment.get("LT2_CORES") or os.cpu_count() or 1)
    part = str(max(1, cores // among))
    return {"LT2_CORES": part, "OMP_NUM_THREADS": part}
