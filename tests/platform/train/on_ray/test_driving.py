"""The driver of a run on Ray, without Ray: what it hears of its workers, what it asks of them, and how it ends."""

from __future__ import annotations

import time
from contextlib import contextmanager, nullcontext

import pytest
from botocore.exceptions import EndpointConnectionError

from lt2_platform import storage_errors
from lt2_platform.storage import Storage
from lt2_platform.train import worker
from lt2_platform.train.on_ray import stopping, trainer
from lt2_platform.train.on_ray.stopping import STOP_FILE, StopRequest
from tests.platform.train.packed import write_dataset
from tests.platform.train.test_worker import pretrain_config


@pytest.fixture
def no_ray(monkeypatch):
    monkeypatch.setattr(trainer, "some_ray", lambda parallelism: nullcontext())
    monkeypatch.setattr(trainer, "_scaling", lambda *more: None)


def run(root, config, **options):
    where = {"data": str(root / "data"), "out": str(root / "run"), "run_id": "run", "storage_root": str(root)}
    return trainer.pretrain(config, **where, **options)


def test_whoever_follows_progress_survives_a_store_that_is_away(tmp_path, monkeypatch):
    def away(storage, path):
        raise EndpointConnectionError(endpoint_url="http://away")

    heard = []
    monkeypatch.setattr(Storage, "read_json", away)
    with trainer._followed(Storage(str(tmp_path)), heard.append):
        pass  # the look at the end is this thread's own
    assert heard == []


def test_where_training_goes_on_from_is_told_once_in_each_of_its_lives(tmp_path, monkeypatch):
    monkeypatch.setattr(trainer, "POLL_SECONDS", 0.002)
    storage, heard = Storage(str(tmp_path)), []
    storage.write_json("progress.json", {"began": 7, "step": 9, "steps": 10})  # an earlier attempt's
    lives = [(0, 1), (0, 2), (1000, 1001), (1000, 1002), (1000, 1001), (1000, 1003), (0, 4)]
    with trainer._followed(storage, heard.append):
        for began, step in lives:
            count = len(heard)
            storage.write_json("progress.json", {"began": began, "step": step, "steps": 1200, "time": 1.0})
            while len(heard) == count or "notice" in heard[-1]:
                time.sleep(0.002)
    notice = {"notice": "goes on from step 1,000 of 1,200"}
    told = [[notice] if (began, step) == (1000, 1001) else [] for began, step in lives]
    assert heard == [
        each for (_, step), notices in zip(lives, told) for each in (*notices, {"step": step, "steps": 1200})
    ]


def until(condition):
    deadline = time.monotonic() + 20
    while not condition():
        assert time.monotonic() < deadline
        time.sleep(0.002)


def test_a_request_to_stop_gets_to_the_workers_once_it_is_made(tmp_path, monkeypatch, caplog):
    monkeypatch.setattr(stopping, "POLL_SECONDS", 0.01)
    storage, request, write = Storage(str(tmp_path)), StopRequest(), Storage.write_json
    storage.write_json(STOP_FILE, {"time": 0})  # an earlier attempt's
    refused = []

    def refusing(self, path, value):
        if not refused:
            refused.append(path)
            raise EndpointConnectionError(endpoint_url="http://away")
        write(self, path, value)

    monkeypatch.setattr(Storage, "write_json", refusing)
    with stopping.conveyed(request, storage), stopping.requested(str(tmp_path)) as came:
        request.possible.set()
        assert not storage.exists(STOP_FILE)
        assert not came.is_set()
        request.asked.set()
        until(came.is_set)
        assert refused == [STOP_FILE]
        assert "could not be asked to save and stop (Could not connect" in caplog.text
        with stopping.requested(str(tmp_path)) as again:  # workers that take the place of others
            assert again.is_set()
    assert not request.possible.is_set()
    with stopping.conveyed(StopRequest(), storage):
        pass
    time.sleep(0.05)
    assert not storage.exists(STOP_FILE)


def test_a_run_that_is_over_is_closed_when_the_store_is_back(tmp_path, monkeypatch, no_ray):
    write_dataset(tmp_path / "data")
    monkeypatch.setattr(storage_errors, "LONGEST_PAUSE_SECONDS", 0.0)
    exists, away = Storage.exists, []

    def asking(storage, path=""):
        if away and away.pop():
            raise EndpointConnectionError(endpoint_url="http://away")
        return exists(storage, path)

    def fit(trainer, settings, *more):
        result = worker.run(worker.WorkerSpec(**settings["spec"]))
        away.extend([True, True])
        return result

    monkeypatch.setattr(Storage, "exists", asking)
    monkeypatch.setattr(trainer, "_fit", fit)
    assert run(tmp_path, pretrain_config(steps=2))["step"] == 2
    assert away == []
    assert Storage(str(tmp_path / "run")).read_json("summary.json")["step"] == 2


def test_a_signal_while_evaluations_are_left_ends_them_at_once(tmp_path, monkeypatch, no_ray):
    """Nobody is there any more who saves when asked to."""
    write_dataset(tmp_path / "data")
    monkeypatch.setattr(trainer, "POLL_SECONDS", 0.01)
    possible, stop, heard = [], StopRequest(), []

    @contextmanager
    def evaluated(*more):
        yield
        while not heard or heard[-1]["step"] < 2:  # whoever follows may hear of the last step only now
            time.sleep(0.01)
        possible.append(stop.possible.is_set())

    def fit(trainer, settings, storage, *more):
        for step in (1, 2):
            storage.write_json("progress.json", {"step": step, "steps": 2, "began": 0})
            while step == 1 and not heard:
                time.sleep(0.01)
            possible.append(stop.possible.is_set())
        return {}

    monkeypatch.setattr(trainer, "_evaluated", evaluated)
    monkeypatch.setattr(trainer, "_fit", fit)
    monkeypatch.setattr(trainer, "close_run", lambda spec, result: {})
    assert run(tmp_path, pretrain_config(steps=2), stop=stop, progress=heard.append) == {}
    assert possible == [True, True, False]
