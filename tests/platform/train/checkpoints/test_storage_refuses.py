"""Storage that takes no writes for a while: training goes on, the checkpoint comes later, and a limit ends it."""

import errno
import os
import time
from contextlib import contextmanager
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from botocore.exceptions import EndpointConnectionError
from s3fs.core import S3File, S3FileSystem

from lt2.train.loop import STOP, PreemptedError, TrainState
from lt2_platform.results.store import ResultsStore, RunWriter
from lt2_platform.storage import Storage
from lt2_platform.train import worker
from lt2_platform.train.callbacks import PROGRESS
from lt2_platform.train.checkpoints import checkpoint, saving, shards
from lt2_platform.train.checkpoints.integrity import complete
from lt2_platform.train.checkpoints.retention import stored_loss
from lt2_platform.train.checkpoints.shards import StorageRefusedError
from lt2_platform.train.ranks import on_rank_zero
from tests.platform.train.packed import checkpoints, model_config, train_config, write_dataset
from tests.platform.train.test_worker import losses, open_run, pretrain_config, weights
from tests.ranks import run_ranks

# Synchronous, so that what happens at a step is known at that step.
CONFIG = {"steps": 8, "checkpoint_every": 2, "async_save": False}


class Disk:
    """Full from the end of one step to the end of another, for what the worker writes; `refused` counts."""

    def __init__(self, monkeypatch, full_after, free_after=None, shards_only=False):
        self.full_after, self.free_after, self.full, self.refused = full_after, free_after, full_after == 0, 0
        writer, stream, disk = Storage.writer, shards.HashingFileSystem.create_stream, self

        def refuse(place):
            if disk.full and "checkpoints" in str(place):
                disk.refused += 1
                raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

        def refusing_writer(storage, path):
            refuse(storage.root)
            return writer(storage, path)

        def refusing_stream(files, path, mode):
            refuse(path if "w" in mode else "")
            return stream(files, path, mode)

        if not shards_only:
            monkeypatch.setattr(Storage, "writer", refusing_writer)
        monkeypatch.setattr(shards.HashingFileSystem, "create_stream", refusing_stream)

    def on_step(self, state, metrics):
        if state.step == self.full_after:
            self.full = True
        if state.step == self.free_after:
            self.full = False


class Clock:
    """A callback, and time as the saver reads it: each step takes 6 seconds, however busy the machine is."""

    now = 0.0
    perf_counter = staticmethod(time.perf_counter)

    def monotonic(self):
        return self.now

    def on_step(self, state, metrics):
        self.now = 6.0 * state.step


@pytest.fixture(autouse=True)
def no_waiting(monkeypatch):
    monkeypatch.setattr(saving, "FIRST_RETRY_SECONDS", 0.0)


@pytest.fixture(scope="module")
def undisturbed(tmp_path_factory):
    root = tmp_path_factory.mktemp("undisturbed")
    write_dataset(root / "data")
    worker.run(open_run(root, pretrain_config(**CONFIG)))
    return root


def test_training_goes_on_and_saves_as_soon_as_storage_is_back(tmp_path, undisturbed, monkeypatch, caplog):
    write_dataset(tmp_path / "data")
    disk, saved = Disk(monkeypatch, 2, 4), []

    class Look:
        def on_step(self, state, metrics):
            saved.append((state.step, checkpoints(tmp_path / "run")[-1:]))

    worker.run(open_run(tmp_path, pretrain_config(**CONFIG | {"checkpoint_every": 3})), callbacks=[disk, Look()])
    assert dict(saved)[4] == []  # due at 3, refused then and at 4
    assert dict(saved)[5] == ["step-00000005"]
    assert disk.refused >= 2
    assert checkpoints(tmp_path / "run") == ["step-00000006", "step-00000008"]
    assert sorted(path.name for path in (tmp_path / "run/checkpoints").iterdir()) == checkpoints(tmp_path / "run")
    assert losses(tmp_path) == losses(undisturbed)
    assert "CHECKPOINT NOT WRITTEN at step 3 (rank 0: [Errno 28] No space left on device" in caplog.text
    assert "step 5 is saved; storage accepts writes again" in caplog.text


def test_a_late_save_of_a_step_that_is_evaluated_knows_its_loss(tmp_path, monkeypatch):
    write_dataset(tmp_path / "data")
    config = pretrain_config(**CONFIG | {"steps": 4, "eval_every": 2})
    worker.run(open_run(tmp_path, config), callbacks=[Disk(monkeypatch, 1, 3)])
    assert stored_loss(str(tmp_path / "run/checkpoints/step-00000004")) is not None


def test_after_the_limit_the_run_fails_with_the_reason_and_the_old_checkpoint(tmp_path, monkeypatch, caplog):
    write_dataset(tmp_path / "data")
    disk, clock = Disk(monkeypatch, 3), Clock()
    monkeypatch.setattr(saving, "time", clock)
    spec = open_run(tmp_path, pretrain_config(**CONFIG, save_patience_s=10))
    with pytest.raises(StorageRefusedError, match=r"no checkpoint could be written to .*for 12 s .*No space left"):
        worker.run(spec, callbacks=[disk, clock])
    disk.full = False
    assert checkpoints(tmp_path / "run") == ["step-00000002"]
    assert worker.run(spec)["step"] == 8


def test_the_end_and_a_preemption_wait_for_storage(tmp_path, undisturbed, monkeypatch):
    write_dataset(tmp_path / "data")
    disk, slept = Disk(monkeypatch, 0), []

    def sleep(seconds):
        slept.append(seconds)
        disk.full = len(slept) < 3

    monkeypatch.setattr(saving.time, "sleep", sleep)
    asked = iter([0, STOP] + [0] * 99)
    spec = open_run(tmp_path, pretrain_config(**CONFIG))
    with pytest.raises(PreemptedError, match="step 2 of 8, which is saved"):
        worker.run(spec, stop=lambda: next(asked))
    assert checkpoints(tmp_path / "run") == ["step-00000002"]
    assert len(slept) == 3
    slept.clear()
    disk.full_after = 7
    worker.run(spec, callbacks=[disk])
    assert len(slept) == 3
    assert checkpoints(tmp_path / "run")[-1] == "step-00000008"
    theirs = weights(undisturbed / "run")
    assert all(torch.equal(value, theirs[name]) for name, value in weights(tmp_path / "run").items())


def test_a_run_is_called_finished_only_once_its_last_checkpoint_is_there(tmp_path, monkeypatch):
    write_dataset(tmp_path / "data")
    disk, close, found = Disk(monkeypatch, 7), RunWriter.close, []

    def look(writer, *values, **more):
        found.append(checkpoints(tmp_path / "run"))
        close(writer, *values, **more)

    def sleep(seconds):
        disk.full = False

    monkeypatch.setattr(RunWriter, "close", look)
    monkeypatch.setattr(saving.time, "sleep", sleep)
    worker.run(open_run(tmp_path, pretrain_config(**CONFIG)), callbacks=[disk])
    assert found == [["step-00000006", "step-00000008"]]


def test_progress_that_cannot_be_written_costs_nothing_but_itself(tmp_path, undisturbed, monkeypatch, caplog):
    write_dataset(tmp_path / "data")
    write, tried = Storage.write_bytes, []

    def away(storage, path, data):
        if path == PROGRESS:
            tried.append(path)
            raise EndpointConnectionError(endpoint_url="http://away")
        write(storage, path, data)

    monkeypatch.setattr(Storage, "write_bytes", away)
    worker.run(open_run(tmp_path, pretrain_config(**CONFIG)))
    assert losses(tmp_path) == losses(undisturbed)
    assert "progress not written (Could not connect" in caplog.text
    assert len(tried) == 2  # the first step's and the last one's


def test_a_preemption_is_told_even_where_its_event_is_not_written(tmp_path, monkeypatch, caplog):
    def away(store, *_):
        raise EndpointConnectionError(endpoint_url="http://away")

    monkeypatch.setattr(ResultsStore, "log_event", away)
    write_dataset(tmp_path / "data")
    with pytest.raises(PreemptedError, match="step 1 of 8, which is saved"):
        worker.run(open_run(tmp_path, pretrain_config(**CONFIG)), stop=lambda: STOP)
    assert "the preemption of run is not among its events (Could not connect" in caplog.text


def refused_on_rank_one(root):
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(saving, "FIRST_RETRY_SECONDS", 0.0)
        disk = Disk(patch, 3, 5, shards_only=True)
        rank = dist.get_rank()
        worker.run(open_run(Path(root), pretrain_config(**CONFIG)), callbacks=[disk] if rank == 1 else [])
    with pytest.raises(StorageRefusedError if rank == 0 else OSError, match="rank 0: away"):
        on_rank_zero(fail)
    return disk.refused, complete(f"{root}/run/checkpoints")


def fail():
    raise OSError("away")


def test_ranks_agree_when_one_of_them_is_refused(tmp_path, undisturbed):
    write_dataset(tmp_path / "data")
    (first, names), (second, _) = run_ranks(refused_on_rank_one, 2, str(tmp_path))
    assert (first, names) == (0, ["step-00000006", "step-00000008"])
    assert second >= 1
    assert losses(tmp_path) == pytest.approx(losses(undisturbed), rel=1e-5)


def test_waits_grow_and_are_bounded(monkeypatch):
    monkeypatch.undo()
    saver = saving.Saver("x", checkpoint.About(model_config(), {}), train_config(), None, dict, lambda: None)
    waits = []
    for _ in range(9):
        saver._refused(TrainState(), StorageRefusedError("no"))
        waits.append(saver.wait)
    assert waits == [1, 2, 4, 8, 16, 32, 60, 60, 60]


class _SmallDisk:
    """An open file on a disk with `room` bytes left; what fits the buffer fails only when flushed."""

    def __init__(self, raw, room, buffer):
        self.raw, self.room, self.buffer, self.pending = raw, room, buffer, 0

    def write(self, data):
        self.pending += len(memoryview(data).cast("B"))
        if self.pending >= self.buffer:
            self.flush()
        return self.raw.write(data)

    def flush(self):
        self.room[0], self.pending = self.room[0] - self.pending, 0
        if self.room[0] < 0:
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
        self.raw.flush()

    def __getattr__(self, name):
        return getattr(self.raw, name)


@pytest.mark.parametrize("buffer", [1, 8192])
def test_wherever_in_a_file_the_disk_is_full_it_is_a_refusal(tmp_path, monkeypatch, buffer):
    tensors = {"model": {f"w{i}": torch.randn(40, 30) for i in range(3)}, "optimizer": {"a": torch.randn(7)}}
    storage, room = Storage(str(tmp_path)), [10**9]
    stream = shards.FileSystem.create_stream

    @contextmanager
    def limited(files, path, mode):
        with stream(files, path, mode) as raw:
            yield _SmallDisk(raw, room, buffer) if "w" in mode else raw

    monkeypatch.setattr(shards.FileSystem, "create_stream", limited)
    written = shards.save_shards(tensors, storage, "whole")
    needed = sum(record["bytes"] for record in written.values())
    for left in [*range(0, needed - buffer, 577), needed - buffer - 1]:
        room[0] = left
        with pytest.raises(StorageRefusedError, match="No space left"):
            shards.save_shards(tensors, storage, f"at-{left}")


def _failing_requests(monkeypatch):
    """(requests to S3 that write, a list with the number of those that succeed); the others find no server."""
    asked, good = [], [10**9]
    of_files, of_filesystem = S3File._call_s3, S3FileSystem._call_s3

    def note(method):
        asked.append(method)
        if len(asked) > good[0]:
            raise EndpointConnectionError(endpoint_url="http://away")

    def by_file(file, method, *more, **options):
        note(method)
        return of_files(file, method, *more, **options)

    async def by_filesystem(files, method, *more, **options):
        if method in ("copy_object", "delete_objects"):
            note(method)
        return await of_filesystem(files, method, *more, **options)

    monkeypatch.setattr(S3File, "_call_s3", by_file)
    monkeypatch.setattr(S3FileSystem, "_call_s3", by_filesystem)
    monkeypatch.setattr(S3FileSystem, "default_block_size", 5 * 2**20)  # the least that S3 takes as a part
    return asked, good


@pytest.mark.parametrize("size", [300, 2_000_000])  # one request for the file, and many
def test_whichever_request_to_s3_fails_it_is_a_refusal(s3_root, monkeypatch, size):
    tensors, storage = {"model": {f"w{i}": torch.zeros(size) for i in range(2)}}, Storage(s3_root)
    asked, good = _failing_requests(monkeypatch)
    shards.save_shards(tensors, storage, "whole")
    requests = list(asked)
    assert ("upload_part" in requests) == (size > 300)
    for good[0] in range(len(requests)):
        asked.clear()
        with pytest.raises(StorageRefusedError, match="Could not connect"):
            shards.save_shards(tensors, storage, f"at-{good[0]}")
