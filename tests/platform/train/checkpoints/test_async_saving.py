"""Checkpoints written in the background: the loop goes on, one at a time, what was copied is what is saved."""

import errno
import logging
import os
import threading

import pytest
import torch

from lt2_platform import background
from lt2_platform.train import worker
from lt2_platform.train.checkpoints import checkpoint, integrity, saving, shards
from tests.platform.train.packed import checkpoints, write_dataset
from tests.platform.train.test_worker import open_run, pretrain_config, weights


class Slow:
    """Storage that holds back the shards of one checkpoint until `free` is set; refuses its first `refusals` tries."""

    def __init__(self, monkeypatch, name, refusals=0):
        self.free, self.refusals = threading.Event(), refusals
        stream, slow = shards.HashingFileSystem.create_stream, self

        def slow_stream(files, path, mode):
            if "w" in mode and name in str(path):
                assert slow.free.wait(120)
                if slow.refusals:
                    slow.refusals -= 1
                    raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
            return stream(files, path, mode)

        monkeypatch.setattr(shards.HashingFileSystem, "create_stream", slow_stream)


class FreeAt:
    def __init__(self, slow, step, out):
        self.slow, self.step, self.out, self.seen = slow, step, out, {}

    def on_step(self, state, metrics):
        self.seen[state.step] = (checkpoints(self.out), metrics["save_stall"])
        if state.step == self.step:
            self.slow.free.set()


@pytest.fixture(scope="module")
def synchronous(tmp_path_factory):
    root = tmp_path_factory.mktemp("synchronous")
    write_dataset(root / "data")
    worker.run(open_run(root, pretrain_config(steps=8, checkpoint_every=4, async_save=False)))
    return root


def test_steps_go_on_while_a_checkpoint_is_written_and_it_holds_what_was_when_it_began(
    tmp_path, synchronous, monkeypatch
):
    write_dataset(tmp_path / "data")
    slow, out = Slow(monkeypatch, "step-00000004"), tmp_path / "run"
    watching = FreeAt(slow, 7, out)
    worker.run(open_run(tmp_path, pretrain_config(steps=8, checkpoint_every=4)), callbacks=[watching])
    assert [watching.seen[step][0] for step in (4, 5, 6, 7)] == [[]] * 4
    assert watching.seen[5][1] > 0  # the copy that step 4 made
    assert checkpoints(out) == checkpoints(synchronous / "run") == ["step-00000004", "step-00000008"]
    for name in checkpoints(out):
        ours, theirs = (weights(root / "run/checkpoints" / name) for root in (tmp_path, synchronous))
        assert all(torch.equal(value, theirs[key]) for key, value in ours.items())
        assert integrity.damage(str(out / "checkpoints" / name)) == []


def test_one_save_at_a_time_the_next_waits_and_says_so(tmp_path, monkeypatch):
    write_dataset(tmp_path / "data")
    slow, messages = Slow(monkeypatch, "step-00000002"), []

    class Free(logging.Handler):
        def emit(self, record):
            messages.append(record.getMessage())
            slow.free.set()

    handler = Free(logging.WARNING)
    saving.log.addHandler(handler)
    try:
        worker.run(open_run(tmp_path, pretrain_config(steps=4)))
    finally:
        saving.log.removeHandler(handler)
    assert messages == [
        "step 4: the checkpoint of step 2 is still being written; waiting for it (storage is slower than "
        "train.checkpoint_every)"
    ]
    assert checkpoints(tmp_path / "run") == ["step-00000002", "step-00000004"]


def test_a_refusal_in_the_background_is_retried_with_the_state_of_then(tmp_path, monkeypatch, caplog):
    monkeypatch.setattr(saving, "FIRST_RETRY_SECONDS", 0.0)
    write_dataset(tmp_path / "data")
    slow = Slow(monkeypatch, "step-00000004", refusals=1)
    slow.free.set()
    worker.run(open_run(tmp_path, pretrain_config(steps=4, checkpoint_every=4)))
    assert "CHECKPOINT NOT WRITTEN at step 4 (rank 0: [Errno 28] No space left on device" in caplog.text
    assert "step 4 is saved; storage accepts writes again" in caplog.text
    assert checkpoints(tmp_path / "run") == ["step-00000004"]


def test_any_other_error_of_the_thread_ends_the_run(tmp_path, monkeypatch):
    write_dataset(tmp_path / "data")

    def broken(*args, **options):
        raise ZeroDivisionError("a bug")

    monkeypatch.setattr(checkpoint, "write", broken)
    with pytest.raises(ZeroDivisionError, match="a bug"):
        worker.run(open_run(tmp_path, pretrain_config(steps=4)))


def test_an_attempt_that_fails_leaves_no_thread_at_work(tmp_path, monkeypatch):
    write_dataset(tmp_path / "data")
    slow = Slow(monkeypatch, "step-00000002")
    wait = background.Background.wait

    def freeing(thread):
        slow.free.set()
        wait(thread)

    monkeypatch.setattr(background.Background, "wait", freeing)

    class Fail:
        def on_step(self, state, metrics):
            if state.step == 3:
                raise ZeroDivisionError

    with pytest.raises(ZeroDivisionError):
        worker.run(open_run(tmp_path, pretrain_config(steps=4)), callbacks=[Fail()])
    assert not [thread for thread in threading.enumerate() if thread.name == "lt2-save"]
    assert checkpoints(tmp_path / "run") == ["step-00000002"]
