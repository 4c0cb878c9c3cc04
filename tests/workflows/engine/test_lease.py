"""Who holds a step: until when, seen by whom, and also where storage refuses its heartbeats (a full disk)."""

from __future__ import annotations

import errno
import os
import time
from pathlib import Path
from types import SimpleNamespace

import pytest

from lt2_platform.storage import Storage
from lt2_workflows.engine import records
from lt2_workflows.loading import load_workflow
from tests.workflows.conftest import FAKE_STEPS, wait_until

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


def test_who_holds_an_attempt_is_seen_until_it_lets_go(lease):
    storage, watch = lease.storage, records.Watch(lease.storage, lease.folder)
    storage.write_bytes(f"{lease.folder}/attempts/notes/text", b"somebody's")
    attempt, seen = watch.holder()
    assert (attempt, seen["token"]) == (1, lease.holder["token"])
    assert not records.Lease(storage, lease.folder, 1, TTL_S, on_lost=print).acquire()
    assert lease.stop(), "still ours"
    lease.release()
    assert watch.holder() == (1, None)
    storage.create_exclusive(lease.fence, b"{}")
    assert not lease.stop(), "somebody else's"


def test_patience_is_counted_from_the_last_heartbeat_and_each_brings_the_log_along(tmp_path, monkeypatch, lost):
    now, beats = [0.0], []
    monkeypatch.setattr(records, "time", SimpleNamespace(monotonic=lambda: now[0], time=time.time))

    def brought():
        beats.append(now[0])
        if len(beats) > 2:
            raise OSError("no log today")
        now[0] += 2 * records.PATIENCE_SECONDS

    held = records.Lease(Storage(str(tmp_path)), "steps/a-1", 1, TTL_S, lost.append, on_beat=brought)
    assert held.acquire()
    wait_until(lambda: len(beats) > 4, "heartbeats, whatever becomes of the log")
    assert held.stop()
    assert lost == []


def test_a_child_that_ended_without_a_word_is_released_for(tmp_path, monkeypatch):
    monkeypatch.setattr(records, "ORPHAN_GRACE_S", 0.0)
    storage, path = Storage(str(tmp_path)), records.lease_path("steps/a-1", 1)
    records.release_for(storage, "steps/a-1", 1)
    assert not storage.is_file(path)
    record = {"pid": 1, "host": "h", "beat": 0, "released": False, "time": 1.0, "ttl_s": 1.0, "machine": "m"}
    storage.write_json(path, record | {"start": "1"})
    records.release_for(storage, "steps/a-1", 1)
    assert storage.read_json(path) == record | {"start": "1", "released": True}


def test_a_step_of_another_fingerprint_is_not_written_over(tmp_path):
    workflow = load_workflow(f"{FAKE_STEPS}:chain")
    storage, step = Storage(str(tmp_path)), workflow.steps["first"]
    records.write_workflow(storage, workflow)
    assert storage.read_bytes(f"workflows/{workflow.id}/recipe.py") == Path(FAKE_STEPS).read_bytes()
    spec = storage.read_json(f"{step.folder}/spec.json")
    assert (spec["name"], spec["needs"], spec["fingerprint"]) == ("first", {}, step.fingerprint)
    records.write_workflow(storage, workflow)
    storage.write_json(f"{step.folder}/spec.json", spec | {"fingerprint": "0" * 64})
    with pytest.raises(RuntimeError, match=f"spec.json has fingerprint 0+, expected {step.fingerprint}"):
        records.write_workflow(storage, workflow)
