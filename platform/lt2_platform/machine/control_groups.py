"""Where the limits of this process's control groups are written, of either version."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path, PurePosixPath


def folders(controller: str, root: Path = Path("/")) -> Iterator[Path]:
    """The folders of the groups by which `controller` ("cpu", "memory") may limit this process, its own first.

    root: where /proc and /sys are.
    """
    mounts = root / "sys/fs/cgroup"
    groups = root / "proc/self/cgroup"
    for line in groups.read_text().splitlines() if groups.is_file() else ():
        _, controllers, group = line.split(":", 2)
        if controllers and controller not in controllers.split(","):
            continue
        mount = mounts / controllers
        # A limit holds for the groups below it too. In a container the mount may be the group itself.
        for place in (PurePosixPath(group), *PurePosixPath(group).parents):
            yield mount / place.relative_to("/")
