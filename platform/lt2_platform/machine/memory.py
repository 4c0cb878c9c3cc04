"""How much of a machine's memory a process may use."""

from __future__ import annotations

import os
from collections.abc import Iterator
from pathlib import Path

from lt2_platform.machine import control_groups


def usable(root: Path = Path("/")) -> int:
    """Bytes: the machine's, or less where Docker, Kubernetes or Slurm set a limit.

    root: where /proc and /sys are.
    """
    return min([os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES"), *_limits(root)])


def _limits(root: Path) -> Iterator[int]:
    for folder in control_groups.folders("memory", root):
        for name in ("memory.max", "memory.limit_in_bytes"):  # versions 2 and 1
            if (file := folder / name).is_file() and (most := file.read_text().strip()) != "max":
                yield int(most)  # of version 1 without a limit, more than any machine has
