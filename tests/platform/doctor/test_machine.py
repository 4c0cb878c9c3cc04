"""What a machine has, and from where on it is too little."""

import re
import resource

import pytest

from lt2_platform.doctor.machine import GIB, cores, disk, machine, open_files, shared_memory


def test_every_part_of_this_machine_is_looked_at():
    found = [finding.name for finding in machine()]
    assert found[:2] == ["cores", "memory"]
    assert {"temporary files", "open files"} <= set(found)


def test_cores_that_a_container_does_not_give():
    assert cores(8, 8).said == "8"
    assert cores(64, 4).said.startswith("4 of 64")


@pytest.mark.parametrize(
    ("size", "memory", "advice"),
    [
        (2**26, 100 * GIB, "9.3 GiB that Ray needs for objects: .*--shm-size=10g"),
        (9 * GIB, 100 * GIB, "--shm-size=10g"),
        (20 * GIB, 100 * GIB, None),  # Ray then takes 19 GiB
        (31 * GIB, 100 * GIB, None),
        (4 * GIB, 15 * GIB, "4.5 GiB that Ray needs .*--shm-size=5g"),
        (5 * GIB, 15 * GIB, None),
    ],
)
def test_shared_memory(monkeypatch, size, memory, advice):
    from ray._private import utils

    found = shared_memory(size, memory)
    assert found.state == ("note" if advice else "ok")
    assert re.search(advice or "", found.said)
    monkeypatch.setattr(utils, "get_shared_memory_bytes", lambda: size)
    in_files = utils.resolve_object_store_memory(memory) > size
    assert in_files == bool(advice)


@pytest.mark.parametrize(("used", "state"), [(94, "ok"), (96, "PROBLEM")])
def test_a_disk_that_is_nearly_full(used, state):
    found = disk("/tmp", 100 * GIB, used * GIB)
    assert found.state == state
    assert f"{100 - used} of 100 GiB free in /tmp" in found.said


@pytest.mark.parametrize(("limit", "state"), [(1024, "note"), (65536, "ok"), (resource.RLIM_INFINITY, "ok")])
def test_open_files(limit, state):
    assert open_files(limit).state == state
