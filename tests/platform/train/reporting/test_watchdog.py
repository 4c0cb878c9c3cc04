"""The watchdog names rank and step and shows where the threads are; slow but normal steps leave it quiet."""

import logging
import threading
import time

from lt2_platform.data.stream import PackedDataset
from lt2_platform.train import worker
from lt2_platform.train.reporting.watchdog import Watchdog
from tests.platform.train.packed import write_dataset
from tests.platform.train.test_worker import losses, open_run, pretrain_config


def wait_for(text, caplog):
    deadline = time.monotonic() + 60
    while text not in caplog.text:
        assert time.monotonic() < deadline, caplog.text
        time.sleep(0.02)


def test_a_stalled_data_iterator_is_shown_and_the_run_goes_on(tmp_path, monkeypatch, caplog):
    write_dataset(tmp_path / "data")
    release, original = threading.Event(), PackedDataset.batches

    def stalling(*args, **kwargs):
        for number, batch in enumerate(original(*args, **kwargs)):
            if number == 4:
                release.wait(60)
            yield batch

    monkeypatch.setattr(PackedDataset, "batches", stalling)
    spec = open_run(tmp_path, pretrain_config(hang_floor_s=1.0, hang_factor=1000.0))
    threading.Thread(target=lambda: (wait_for("rank 0: step 5 has been running", caplog), release.set())).start()
    # The factor alone would wait for minutes; only the first steps go by the floor.
    monkeypatch.setattr("lt2_platform.train.reporting.watchdog.Watchdog.limit_s", lambda self: self.floor_s)
    worker.run(spec)
    assert "in stalling" in caplog.text  # the stack says where
    assert "rank 0: step 5 resumed after" in caplog.text
    assert sorted(losses(tmp_path)) == [1, 2, 3, 4, 5, 6]
    assert not any(thread.name == "lt2-watchdog" for thread in threading.enumerate())


def test_the_limit_follows_the_median_above_the_floor():
    dog = Watchdog(rank=0, step=0, factor=10, floor_s=5)
    assert dog.limit_s() == 5
    dog.seconds.extend([2.0, 2.0])
    assert dog.limit_s() == 5  # too few to know
    dog.seconds.extend([2.0, 100.0])
    assert dog.limit_s() == 20


def test_steps_within_the_limit_leave_it_quiet_and_batches_pass_through(caplog):
    with caplog.at_level(logging.WARNING), Watchdog(rank=3, step=7, factor=2, floor_s=30, poll_s=0.001) as dog:
        assert list(dog.watch(iter("abc"), lambda: 7)) == ["a", "b", "c"]
        assert dog.step == 8
        time.sleep(0.05)
    assert caplog.text == ""


def test_it_barks_once_per_step_and_names_the_rank(caplog):
    with Watchdog(rank=3, step=7, factor=2, floor_s=0.05, poll_s=0.01) as dog:
        batches = dog.watch(iter("ab"), lambda: 7)
        next(batches)
        wait_for("rank 3: step 8 has been running", caplog)
        time.sleep(0.1)
    assert caplog.text.count("rank 3: step 8 has been running") == 1
    assert "test_it_barks_once_per_step" in caplog.text
