"""Cores, memory, files and cards of this machine, as far as a process here may use them."""

from __future__ import annotations

import math
import os
import resource
import shutil
import tempfile
from collections.abc import Iterator
from pathlib import Path

import torch

from lt2_platform.doctor.finding import Finding
from lt2_platform.machine import memory
from lt2_platform.machine.cores import usable

PART = "machine"
GIB = 2**30
SHARED_MEMORY = Path("/dev/shm")
# Ray takes 0.3 of the memory for objects, or as much of /dev/shm as there is from ten billion bytes on: what is smaller
# than both is too small.
OBJECT_STORE, ENOUGH = 0.3, 10**10
FILES = 8192
RAY_STOPS_AT = 0.95  # of a disk: Ray refuses to write objects there


def machine() -> Iterator[Finding]:
    yield cores(os.cpu_count() or 1, usable())
    yield Finding(PART, "memory", "ok", f"{memory.usable() / GIB:.0f} GiB")
    if SHARED_MEMORY.is_dir():
        yield shared_memory(shutil.disk_usage(SHARED_MEMORY).total, memory.counted_by_ray())
    yield disk(tempfile.gettempdir(), *shutil.disk_usage(tempfile.gettempdir())[:2])
    yield open_files(resource.getrlimit(resource.RLIMIT_NOFILE)[1])
    for index in range(torch.cuda.device_count() if torch.cuda.is_available() else 0):
        yield card(index)


def cores(there: int, ours: int) -> Finding:
    if ours == there:
        return Finding(PART, "cores", "ok", f"{ours}")
    return Finding(PART, "cores", "ok", f"{ours} of {there} may be used here (affinity or a container's quota)")


def shared_memory(size: int, memory: int) -> Finding:
    """Whether /dev/shm has room for Ray's objects. size: of it, memory: the machine's as Ray counts it; in bytes."""
    said = f"{size / GIB:.1f} GiB in {SHARED_MEMORY}"
    needed = min(OBJECT_STORE * memory, ENOUGH)
    if size >= needed:
        return Finding(PART, "shared memory", "ok", said)
    said += (
        f", less than the {needed / GIB:.1f} GiB that Ray needs for objects: it uses files instead, which are slower; "
        f"give the container more (docker run --shm-size={math.ceil(needed / GIB)}g, an emptyDir of medium Memory)"
    )
    return Finding(PART, "shared memory", "note", said)


def disk(folder: str, total: int, used: int) -> Finding:
    """Whether Ray can write to the disk of `folder`, where its logs and spilled objects go; sizes in bytes."""
    said = f"{(total - used) / GIB:.0f} of {total / GIB:.0f} GiB free in {folder}"
    if used < RAY_STOPS_AT * total:
        return Finding(PART, "temporary files", "ok", said)
    said += (
        f"; Ray writes no objects to a disk that is {RAY_STOPS_AT:.0%} full: free some, or set TMPDIR to another disk"
    )
    return Finding(PART, "temporary files", "PROBLEM", said)


def open_files(limit: int) -> Finding:
    if limit == resource.RLIM_INFINITY or limit >= FILES:
        return Finding(PART, "open files", "ok", "no limit" if limit == resource.RLIM_INFINITY else f"{limit:,}")
    said = f"a process may open {limit:,}; Ray on many cores or nodes needs more: ulimit -n 65536"
    return Finding(PART, "open files", "note", said)


def card(index: int) -> Finding:
    found = torch.cuda.get_device_properties(index)
    free, _ = torch.cuda.mem_get_info(index)
    said = f"{found.name}, {free / GIB:.0f} of {found.total_memory / GIB:.0f} GiB free, sm_{found.major}{found.minor}"
    if found.major < 8:
        return Finding(PART, f"card {index}", "note", f"{said}; it emulates bf16; try train.precision=fp32")
    return Finding(PART, f"card {index}", "ok", said)
