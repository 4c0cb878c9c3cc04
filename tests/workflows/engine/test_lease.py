"""A holder whose heartbeats storage refuses (a full disk) goes on until somebody takes over or patience ends."""

from __future__ import annotations

import errno
import os
import time

import pytest

from lt2_platform.storage import Storage
from lt2_workflows.engine import records
from tests.workflows.conftest import wait_until

TTL_S = 0.3


@pytest.fixture
def full():
    """While it holds anything, the disk is full."""
    return []


@pytest.fixture
def lost():
    """Why the lease was lost."""
    return []


@pytest.fixture
def lease(tmp_path, monkeypatch, full, lost):
    write = Storage.write_bytes

    def refuse(storage, path, data):
        if full:
            full.append(path)
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
        write(storage, path, data)

    monkeypatch.setattr(Storage, "write_bytes", refuse)
    held = records.Lease(Storage(str(tmp_path)), "steps/a-1", 1, TTL_S, on_lost=lost.append)
    assert held.acquire()
    yield held
    held.stop()


def beat(lease):
    return lease.storage.read_json(lease.path)["beat"]


def test_it_is_not_lost_for_a_while_longer_than_others_wait(lease, full, lost):
    full.append("now")
    before = beat(lease)
    time.sleep(3 * TTL_S)
    wait_until(lambda: len(full) > 3, "heartbeats that are refused")
    assert beat(lease) == before
    full.clear()
    wait_until(lambda: beat(lease) > before, "the next heartbeat")
    assert lost == []


def test_it_ends_when_another_takes_over(lease, full, lost):
    full.append("now")
    lease.storage.create_exclusive(records.lease_path("steps/a-1", 2), b"{}")
    wait_until(lambda: lost, "the end")
    assert lost[0] == "another process took over this step"


def test_it_ends_with_everybodys_patience(lease, full, lost, monkeypatch):
    monkeypatch.setattr(records, "PATIENCE_SECONDS", TTL_S)
    full.append("now")
    wait_until(lambda: lost, "the end")
    assert lost[0] == "no heartbeat could be written: [Errno 28] No space left on device"


def test_who_waits_sees_heartbeats_and_silence_by_its_own_clock(tmp_path, monkeypatch):
    storage, now = Storage(str(tmp_path)), [1000.0]
    monkeypatch.setattr(records.time, "monotonic", lambda: now[0])
    watch = records.Watch(storage, "steps/a-1")
    assert watch.holder() == (0, None)
    elsewhere = {"released": False, "time": 4e9, "ttl_s": 30.0, "host": "h", "pid": 1, "machine": "other", "start": "1"}

    def beats(attempt, beat, **fields):
        lease = elsewhere | {"beat": beat} | fields
        storage.write_json(records.lease_path("steps/a-1", attempt), lease)
        return attempt, lease

    first = beats(9, 0)
    assert watch.holder() == watch.holder() == first
    assert not watch.heard()
    now[0] += 29
    alive = beats(9, 1)
    assert watch.holder() == alive
    assert watch.heard()
    now[0] += 30
    assert watch.holder() == alive
    now[0] += 1
    assert watch.holder() == (9, None)  # silent for longer than its time to live
    assert watch.holder() == (9, None)
    newer = beats(10, 0)  # somebody else took over
    assert watch.holder() == newer
    beats(10, 1, released=True)
    assert watch.holder() == (10, None)
