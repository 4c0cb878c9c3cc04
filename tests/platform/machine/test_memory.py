"""The memory that a process may use: the machine's, or what its control groups leave it."""

import os
import subprocess
import sys

import pytest

from lt2_platform.machine.memory import counted_by_ray, peak_resident, usable
from tests.platform.machine.test_cores import machine

GIB = 2**30
HERE = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")


@pytest.mark.parametrize(
    ("groups", "limits", "expected"),
    [
        ("0::/\n", {}, HERE),
        ("0::/\n", {"sys/fs/cgroup/memory.max": "max\n"}, HERE),
        ("0::/\n", {"sys/fs/cgroup/memory.max": f"{GIB}\n"}, GIB),
        ("0::/a/b\n", {"sys/fs/cgroup/a/memory.max": f"{GIB}\n", "sys/fs/cgroup/a/b/memory.max": "max\n"}, GIB),
        ("0::/a/b\n", {"sys/fs/cgroup/a/memory.max": f"{HERE * 2}\n"}, HERE),
        # Docker with version 1: what is mounted here is the named group itself; it writes a huge number for no limit.
        ("4:memory:/docker/f00\n3:cpu:/x\n", {"sys/fs/cgroup/memory/memory.limit_in_bytes": f"{GIB}\n"}, GIB),
        ("4:memory:/\n", {"sys/fs/cgroup/memory/memory.limit_in_bytes": f"{2**63 - 4096}\n"}, HERE),
        ("3:cpu:/x\n", {"sys/fs/cgroup/memory/memory.limit_in_bytes": f"{GIB}\n"}, HERE),
    ],
)
def test_the_least_limit_of_control_groups(tmp_path, groups, limits, expected):
    assert usable(machine(tmp_path, groups, limits)) == expected


@pytest.mark.parametrize(
    ("limits", "expected"),
    [
        ({"sys/fs/cgroup/slurm/job_7/memory.max": f"{GIB}\n"}, HERE),
        ({"sys/fs/cgroup/slurm/memory.max": f"{GIB}\n", "sys/fs/cgroup/memory.max": f"{2 * GIB}\n"}, 2 * GIB),
        ({"sys/fs/cgroup/memory.max": "max\n"}, HERE),
        ({"sys/fs/cgroup/memory/memory.limit_in_bytes": f"{GIB}\n"}, GIB),
        ({"sys/fs/cgroup/memory/memory.limit_in_bytes": f"{2**63 - 4096}\n"}, HERE),
    ],
)
def test_ray_sees_no_nested_limit(tmp_path, limits, expected):
    from ray._common.utils import get_system_memory

    root = machine(tmp_path, "0::/slurm/job_7\n", limits)
    files = (root / "sys/fs/cgroup" / name for name in ("memory/memory.limit_in_bytes", "memory.max"))
    assert counted_by_ray(root) == expected == get_system_memory(*map(str, files))


def test_it_is_known_without_ray():
    code = "import sys; from lt2_platform.machine.memory import usable; usable(); print('ray' in sys.modules)"
    paths = os.environ | {"PYTHONPATH": os.pathsep.join(path for path in sys.path if path)}
    answer = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True, env=paths)
    assert answer.stdout == "False\n"


def test_the_largest_resident_set_is_in_bytes():
    held = b"\1" * 50_000_000
    assert len(held) < peak_resident() < usable()
