"""The driver of a run on Ray, without Ray: what it hears of its workers, what it asks of them, and how it ends."""

from __future__ import annotations

import os
import signal
import threading
import time
from contextlib import contextmanager, nullcontext
from dataclasses import asdict
from types import SimpleNamespace

import pytest
from botocore.exceptions import EndpointConnectionError
from ray.train import ScalingConfig, WorkerGroupError

from lt2.config import ConfigError
from lt2.train.loop import STOP, NonFiniteLossError, PreemptedError
from lt2_platform import storage_errors
from lt2_platform.storage import Storage
from lt2_platform.train import run_folder, worker
from lt2_platform.train.config import TrainingEvaluation
from lt2_platform.train.on_ray import stopping, trainer
from lt2_platform.train.on_ray.stopping import STOP_FILE, StopRequest
from tests.platform.train.packed import write_dataset
from tests.platform.train.test_worker import open_run, pretrain_config

TOLD = threading.Event()  # of what waits for places
TOLD.set()


@pytest.fixture
def no_ray(monkeypatch):
    monkeypatch.setattr(trainer, "kept_waiting", lambda: None)
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
    with trainer._followed(Storage(str(tmp_path)), heard.append, TOLD):
        pass  # the look at the end is this thread's own
    assert heard == []


def test_where_training_goes_on_from_is_told_once_in_each_of_its_lives(tmp_path, monkeypatch):
    monkeypatch.setattr(trainer, "POLL_SECONDS", 0.002)
    storage, heard = Storage(str(tmp_path)), []
    storage.write_json("progress.json", {"began": 7, "step": 9, "steps": 10})  # an earlier attempt's
    lives = [(0, 1), (0, 2), (1000, 1001), (1000, 1002), (1000, 1001), (1000, 1003), (0, 4)]
    with trainer._followed(storage, heard.append, TOLD):
        assert not storage.exists("progress.json")
        for began, step in lives:
            count = len(heard)
            storage.write_json("progress.json", {"began": began, "step": step, "steps": 1200, "time": 1.0})
            while len(heard) == count or "notice" in heard[-1]:
                time.sleep(0.002)
    notice = {"notice": "resumes from step 1,000 of 1,200"}
    told = [[notice] if (began, step) == (1000, 1001) else [] for began, step in lives]
    assert heard == [
        each for (_, step), notices in zip(lives, told) for each in (*notices, {"step": step, "steps": 1200})
    ]


def test_workers_that_wait_for_places_say_so_once_and_not_after_they_began(tmp_path, monkeypatch):
    monkeypatch.setattr(trainer, "POLL_SECONDS", 0.002)
    looks = iter([None, None, "for 1 CPU"])
    monkeypatch.setattr(trainer, "kept_waiting", lambda: next(looks))
    storage, heard, waits = Storage(str(tmp_path)), [], threading.Event()

    def told(values):
        heard.append(values)
        waits.set()

    with trainer._followed(storage, told, waits):
        until(lambda: heard)
        time.sleep(0.02)
        storage.write_json("progress.json", {"began": 0, "step": 1, "steps": 9})
        until(lambda: len(heard) > 1)
    assert heard == [{"waiting": "for 1 CPU"}, {"step": 1, "steps": 9}]


def test_the_last_step_is_heard_of_however_seldom_anybody_looks(tmp_path):
    storage, heard = Storage(str(tmp_path)), []
    with trainer._followed(storage, heard.append, TOLD):
        storage.write_json("progress.json", {"began": 0, "step": 9, "steps": 9})
    assert heard == [{"step": 9, "steps": 9}]


@pytest.mark.parametrize(
    ("gpus", "use_gpu", "expected"), [(None, True, 1), (None, False, 0), (0.5, True, 0.5), (0, True, 0)]
)
def test_an_evaluation_takes_a_gpu_where_training_does(tmp_path, gpus, use_gpu, expected):
    write_dataset(tmp_path / "data")
    plan, scaling = TrainingEvaluation(every=2, gpus=gpus), ScalingConfig(use_gpu=use_gpu)
    assert trainer._evaluated(open_run(tmp_path, pretrain_config()), plan, scaling).gpus == expected


def until(condition):
    deadline = time.monotonic() + 20
    while not condition():
        assert time.monotonic() < deadline
        time.sleep(0.002)


def test_a_request_to_stop_gets_to_the_workers_once_it_is_made(tmp_path, monkeypatch, caplog):
    monkeypatch.setattr(stopping, "POLL_SECONDS", 0.01)
    storage, request, write = Storage(str(tmp_path)), StopRequest(), Storage.write_json
    storage.write_json(STOP_FILE, {"time": 0})  # an earlier attempt's
    read, written, looks = Storage.read_bytes, [], []

    def refusing(self, path, value):
        written.append(path)
        if len(written) == 1:
            raise EndpointConnectionError(endpoint_url="http://away")
        write(self, path, value)

    def reading(self, path):
        looks.append(path)
        if len(looks) < 3:
            raise EndpointConnectionError(endpoint_url="http://away")
        return read(self, path)

    monkeypatch.setattr(Storage, "write_json", refusing)
    monkeypatch.setattr(Storage, "read_bytes", reading)
    with stopping.conveyed(request, storage), stopping.requested(str(tmp_path)) as came:
        request.possible.set()
        assert not storage.exists(STOP_FILE)
        assert not came.is_set()
        request.asked.set()
        until(came.is_set)
        time.sleep(0.05)
        assert written == [STOP_FILE] * 2, "once more, and then it is there"
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


def test_a_signal_while_workers_wait_for_places_ends_the_run_at_once(tmp_path, monkeypatch, no_ray):
    """There is nothing to save, and nobody to ask for it."""
    write_dataset(tmp_path / "data")
    possible, stop = [], StopRequest()

    def scaling(workers, progress):
        progress({"waiting": "for 1 CPU"})

    monkeypatch.setattr(trainer, "_scaling", scaling)
    monkeypatch.setattr(trainer, "_fit", lambda *more: possible.append(stop.possible.is_set()))
    monkeypatch.setattr(trainer, "close_run", lambda spec, result: {})
    run(tmp_path, pretrain_config(), stop=stop)
    assert possible == [False]


def test_a_run_that_was_saved_goes_on_unless_its_caller_asked_for_it(tmp_path, monkeypatch, no_ray):
    write_dataset(tmp_path / "data")
    ends, fitted, request = [PreemptedError("saved"), {}, PreemptedError("saved as asked")], [], StopRequest()

    def fit(trainer, *more):
        fitted.append(trainer)
        end = ends.pop(0)
        if isinstance(end, Exception):
            raise end
        return end

    monkeypatch.setattr(trainer, "_fit", fit)
    monkeypatch.setattr(trainer, "close_run", lambda spec, result: {"closed": True})
    assert run(tmp_path, pretrain_config()) == {"closed": True}
    request.asked.set()
    with pytest.raises(PreemptedError, match="saved as asked"):
        run(tmp_path, pretrain_config(), stop=request)
    # Who can ask has a handler of Ctrl-C of its own.
    assert fitted == [trainer.Trainer] * 2 + [trainer.CallersSignals]
    Storage(str(tmp_path / "run")).write_json("summary.json", {"step": 6})
    monkeypatch.setattr(run_folder.checkpoint, "resolve", lambda out: "newest")
    assert run(tmp_path, pretrain_config()) == {"step": 6, "checkpoint": "newest"}
    assert ends == []


@pytest.mark.parametrize(
    ("outcome", "error"),
    [
        ({"error": "diverged", "message": "step 2: loss nan"}, NonFiniteLossError("step 2: loss nan")),
        ({"error": "preempted", "message": "saved"}, PreemptedError("saved")),
        (ConfigError("shard 3 is damaged"), ConfigError("shard 3 is damaged")),
        (OSError("no space"), WorkerGroupError("workers failed", {1: OSError("no space")})),
    ],
)
def test_how_workers_ended_is_told_as_what_it_was(tmp_path, outcome, error):
    def fit():
        signal.signal(signal.SIGINT, signal.SIG_IGN)  # as Ray does
        if isinstance(outcome, Exception):
            raise WorkerGroupError("workers failed", {1: outcome})
        return SimpleNamespace(return_value=outcome)

    scaling, before = ScalingConfig(num_workers=1), signal.signal(signal.SIGINT, signal.SIG_DFL)
    try:
        with pytest.raises(type(error), match=str(error).splitlines()[0]):
            trainer._fit(lambda *_, **__: SimpleNamespace(fit=fit), {}, Storage(str(tmp_path)), scaling, 1, 0)
        assert signal.getsignal(signal.SIGINT) is signal.SIG_DFL
    finally:
        signal.signal(signal.SIGINT, before)


class TheirError(Exception):
    __module__ = "lt2_user_objective"  # Ray's controller cannot make one: it would take the worker for dead


ENDS = [None, PreemptedError("saved"), NonFiniteLossError("nan"), ConfigError("damaged"), TheirError("no title")]


@pytest.mark.parametrize("rank", [0, 1])
@pytest.mark.parametrize("end", ENDS)
def test_a_worker_returns_what_all_come_to_and_raises_what_may_be_its_own(tmp_path, monkeypatch, rank, end):
    monkeypatch.setattr(trainer, "ray_notice", lambda: lambda: 0)
    monkeypatch.setattr(trainer, "ray_sigterm", lambda: lambda: 0)
    monkeypatch.setattr(trainer.ray.train, "get_context", lambda: SimpleNamespace(get_world_rank=lambda: rank))
    write_dataset(tmp_path / "data")
    spec = open_run(tmp_path, pretrain_config())
    Storage(spec.out).write_json(STOP_FILE, {})
    given, sinks = {}, []
    monkeypatch.setattr(trainer, "WandbSink", lambda *arguments: sinks.append(arguments) or nullcontext())
    (tmp_path / "users").mkdir()
    monkeypatch.chdir(tmp_path)

    def train(spec, **more):
        given.update(more, stops=more["stop"](), folder=os.getcwd())
        if end is not None:
            raise end
        return {"step": 6}

    monkeypatch.setattr(worker, "run", train)
    settings = {"spec": asdict(spec), "data_reader": "direct", "wandb": "online", "folder": str(tmp_path / "users")}
    if isinstance(end, ConfigError | TheirError):
        kind, says = (
            (ConfigError, "damaged") if isinstance(end, ConfigError) else (RuntimeError, "TheirError: no title")
        )
        with pytest.raises(kind, match=says):
            trainer._work(settings)
        return
    said = {None: "summary", PreemptedError: "preempted", NonFiniteLossError: "diverged"}[end and type(end)]
    returned = trainer._work(settings)
    assert returned == ({"error": None, said: {"step": 6}} if end is None else {"error": said, "message": str(end)})
    # Rank 0 alone looks whether it is asked to stop, and talks to the world.
    assert (given["stops"], len(given["callbacks"])) == ((STOP, 2) if rank == 0 else (0, 0))
    assert sinks[0][3] == ("online" if rank == 0 else "off")
    assert (given["reader"], given["folder"]) == (None, str(tmp_path / "users"))
