"""The cores that a process may use, and shares of them: the user's word goes before."""

import math
import os
import subprocess
import sys
from pathlib import Path

import pytest

from lt2_platform.machine import cores
from lt2_platform.machine.cores import quota, share, usable


def test_shares_of_the_cores(monkeypatch):
    monkeypatch.setattr(cores, "usable", lambda: 8)
    assert share({}, 1) == {"LT2_CORES": "8", "OMP_NUM_THREADS": "8"}
    assert share({}, 3) == {"LT2_CORES": "2", "OMP_NUM_THREADS": "2"}
    assert share({}, 100) == {"LT2_CORES": "1", "OMP_NUM_THREADS": "1"}
    # A sweep's trial divides its own part further.
    assert share(share({}, 2), 2) == {"LT2_CORES": "2", "OMP_NUM_THREADS": "2"}
    assert share({"OMP_NUM_THREADS": "5", "HOME": "/"}, 2) == {"OMP_NUM_THREADS": "5"}


def test_a_process_held_to_one_core_uses_one():
    one = min(os.sched_getaffinity(0))
    hold = (
        f"import os; os.sched_setaffinity(0, {{{one}}}); from lt2_platform.machine.cores import usable; print(usable())"
    )
    answer = subprocess.run([sys.executable, "-c", hold], capture_output=True, text=True, check=True, env=_paths())
    assert answer.stdout == "1\n"


def _paths() -> dict[str, str]:
    return dict(os.environ) | {"PYTHONPATH": os.pathsep.join(path for path in sys.path if path)}


@pytest.mark.parametrize(("limit", "expected"), [(math.inf, 64), (4.0, 4), (2.5, 3), (0.2, 1), (100.0, 64)])
def test_a_quota_is_rounded_up(monkeypatch, limit, expected):
    monkeypatch.setattr(os, "sched_getaffinity", lambda pid: set(range(64)))
    monkeypatch.setattr(cores, "quota", lambda: limit)
    assert usable() == expected


def machine(root: Path, groups: str, limits: dict[str, str]) -> Path:
    for path, text in {"proc/self/cgroup": groups, **limits}.items():
        (root / path).parent.mkdir(parents=True, exist_ok=True)
        (root / path).write_text(text)
    return root


@pytest.mark.parametrize(
    ("groups", "limits", "expected"),
    [
        ("0::/\n", {"sys/fs/cgroup/cpu.max": "max 100000\n"}, math.inf),
        ("0::/\n", {"sys/fs/cgroup/cpu.max": "350000 100000\n"}, 3.5),
        # Slurm and systemd: the limit of an outer group holds too, and the smallest of all.
        (
            "0::/a/b/c\n",
            {"sys/fs/cgroup/a/cpu.max": "400000 100000", "sys/fs/cgroup/a/b/c/cpu.max": "600000 100000"},
            4.0,
        ),
        # Docker with version 1: the named group is the host's path, and what is mounted here is that very group.
        (
            "5:cpu,cpuacct:/docker/f00\n4:memory:/docker/f00\n0::/docker/f00\n",
            {
                "sys/fs/cgroup/cpu,cpuacct/cpu.cfs_quota_us": "150000\n",
                "sys/fs/cgroup/cpu,cpuacct/cpu.cfs_period_us": "100000\n",
            },
            1.5,
        ),
        (
            "5:cpu:/\n",
            {"sys/fs/cgroup/cpu/cpu.cfs_quota_us": "-1\n", "sys/fs/cgroup/cpu/cpu.cfs_period_us": "100000\n"},
            math.inf,
        ),
        ("4:memory:/\n", {}, math.inf),
    ],
)
def test_the_quota_of_control_groups(tmp_path, groups, limits, expected):
    assert quota(machine(tmp_path, groups, limits)) == expected


def test_no_control_groups_no_limit(tmp_path):
    assert quota(tmp_path) == math.inf
