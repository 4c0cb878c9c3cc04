"""How much of a machine's memory a process may use, and has used."""

from __future__ import annotations

import os
import resource
import sys
from collections.abc import Iterable, Iterator
from pathlib import Path

from lt2_platform.machine import control_groups


def usable(root: Path = Path("/")) -> int:
    """Bytes: the machine's, or less where Docker, Kubernetes or Slurm set a limit.

    root: where /proc and /sys are.
    """
    return min([_machine(), *_limits(control_groups.folders("memory", root))])


def counted_by_ray(root: Path = Path("/")) -> int:
    """Bytes: what Ray goes by. It looks at the mounted group alone, a container's; limits of groups nested in it, as of
    Slurm or systemd, it does not see.
    """
    mounts = root / "sys/fs/cgroup"
    return min([_machine(), *_limits([mounts / "memory", mounts])])


def peak_resident() -> int:
    """Bytes: the largest resident set of this process so far."""
    unit = 1 if sys.platform == "darwin" else 1024  # macOS counts bytes, Linux KiB
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * unit


def _machine() -> int:
    return os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")


def _limits(folders: Iterable[Path]) -> Iterator[int]:
    for folder in folders:
        for name in ("memory.max", "memory.limit_in_bytes"):  # versions 2 and 1
            if (file := folder / name).is_file() and (most := file.read_text().strip()) != "max":
                yield int(most)  # of version 1 without a limit, more than any machine has
