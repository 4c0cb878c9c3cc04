"""What a machine has, and from where on it is too little."""

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


@pytest.mark.parametrize(("size", "state"), [(64 * 2**20, "note"), (31 * GIB, "ok")])
def test_shared_memory(size, state):
    found = shared_memory(size, 100 * GIB)
    assert found.state == state
    assert ("--shm-size=30g" in found.said) == (state == "note")


@pytest.mark.parametrize(("used", "state"), [(94, "ok"), (96, "PROBLEM")])
def test_a_disk_that_is_nearly_full(used, state):
    found = disk("/tmp", 100 * GIB, used * GIB)
    assert found.state == state
    assert f"{100 - used} of 100 GiB free in /tmp" in found.said


@pytest.mark.parametrize(("limit", "state"), [(1024, "note"), (65536, "ok"), (resource.RLIM_INFINITY, "ok")])
def test_open_files(limit, state):
    assert open_files(limit).state == state
