"""Pretraining through Ray Train: equal to the same worker on plain gloo ranks, whoever is told to stop.

With kills of workers and drivers: tests/workflows/test_kill_resume.py.
"""

import os
import shutil
import signal
import threading
import time
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from ray.train import ScalingConfig
from ray.train.v2._internal.callbacks.datasets import DatasetsCallback
from ray.train.v2._internal.callbacks.placement_group_callback import PlacementGroupCleanerCallback

from lt2.config import ConfigError
from lt2.train.loop import STOP, NonFiniteLossError, PreemptedError
from lt2_platform.fence import FENCE
from lt2_platform.machine import cores
from lt2_platform.results.parts import list_parts
from lt2_platform.results.store import ResultsStore
from lt2_platform.storage import Storage
from lt2_platform.train import worker
from lt2_platform.train.checkpoints import checkpoint, integrity
from lt2_platform.train.config import PretrainConfig, Workers
from lt2_platform.train.on_ray import trainer
from lt2_platform.train.on_ray.names import new_name
from lt2_platform.train.on_ray.stopping import StopRequest
from lt2_platform.train.on_ray.trainer import pretrain
from tests.platform.one_ray import one_ray
from tests.platform.train.packed import MODEL, checkpoints, train_config, write_dataset
from tests.platform.train.test_worker import losses, open_run, pretrain_config
from tests.ranks import run_ranks

# The limits are for a machine shared with other test runs; alone this file takes about a minute.
pytestmark = [pytest.mark.ray, pytest.mark.timeout(600)]

STEPS = 160
SHORT = {"steps": 8, "checkpoint_every": 4}


def config(**train) -> PretrainConfig:
    fields = train_config(**{"steps": STEPS, "checkpoint_every": 20, "warmup_steps": 10} | train).model_dump()
    return PretrainConfig.model_validate({"model": MODEL, "train": fields})


def run(root, settings=None, *, stop=None, progress=None, **workers):
    """Without Ray Data, whose processes would be half of all; test_kill_resume.py has them."""
    return pretrain(
        settings or config(),
        data=str(root / "data"),
        out=str(root / "run"),
        run_id="run",
        storage_root=str(root),
        workers=Workers(**{"num_workers": 2, "data_reader": "direct"} | workers),
        stop=stop,
        progress=progress,
    )


def rank_run(root):
    return worker.run(open_run(Path(root), config()))


@pytest.fixture(scope="module")
def on_ranks(tmp_path_factory):
    """The reference: two gloo ranks, no Ray, nobody told anything."""
    root = tmp_path_factory.mktemp("ranks")
    write_dataset(root / "data")
    run_ranks(rank_run, 2, str(root), timeout_s=400)
    return root


@pytest.fixture(scope="module")
def local_ray():
    with one_ray():
        yield


def assert_equal_runs(root, reference):
    assert losses(root) == losses(reference)
    ours, theirs = (checkpoint.load_model(str(place / "run"))[0].state_dict() for place in (root, reference))
    assert all(torch.equal(ours[name], value) for name, value in theirs.items())


def workers_of(pid):
    """Process ids of the Ray Train workers among the descendants of `pid`, oldest first."""
    parents = {}
    for status in Path("/proc").glob("[0-9]*/status"):
        try:
            fields = dict(line.split(":\t", 1) for line in status.read_text().splitlines() if ":\t" in line)
            name = Path(status.parent, "cmdline").read_bytes()
        except (FileNotFoundError, ProcessLookupError):
            continue
        parents[int(fields["Pid"])] = (int(fields["PPid"]), b"RayTrainWorker" in name)

    def descends(child):
        while child in parents and child != pid:
            child = parents[child][0]
        return child == pid

    return sorted(child for child, (_, is_worker) in parents.items() if is_worker and descends(child))


def slow_work(settings):
    """On a worker: the same, at 30 ms a step, so that a signal finds it training on the fastest machine."""
    from_numpy = worker.Batch.from_numpy

    def slowly(arrays):
        time.sleep(0.03)
        return from_numpy(arrays)

    worker.Batch.from_numpy = slowly
    return trainer._work(settings)


def test_sigterm_to_a_worker_and_a_request_to_stop_save_and_nothing_is_lost(tmp_path, on_ranks, local_ray, monkeypatch):
    """One worker is told to end, and new ones go on; then the run is asked to stop, and the same call goes on."""
    monkeypatch.setattr(trainer, "_work", slow_work)
    write_dataset(tmp_path / "data")
    stop, handler = StopRequest(), signal.getsignal(signal.SIGINT)
    told, seen, handlers, store = [], [], [], ResultsStore(Storage(str(tmp_path)))

    def saved():
        return [int(event["message"].split()[5]) for event in store.events("run") if event["kind"] == "preemption"]

    def tell():
        while not integrity.complete(str(tmp_path / "run/checkpoints")):
            time.sleep(0.005)
        told.append(workers_of(os.getpid())[-1])
        os.kill(told[0], signal.SIGTERM)
        while max((values.get("step", 0) for values in seen), default=0) <= max(saved(), default=STEPS):
            time.sleep(0.05)
        handlers.append(signal.getsignal(signal.SIGINT))
        stop.asked.set()

    threading.Thread(target=tell, daemon=True).start()
    # A worker that is told to end is no failure.
    with pytest.raises(
        PreemptedError, match=rf"^stopped as asked after step \d+ of {STEPS}, which is saved$"
    ) as stopped:
        run(tmp_path, stop=stop, worker_failures=0, progress=seen.append)
    step = int(str(stopped.value).split()[5])
    assert integrity.complete(str(tmp_path / "run/checkpoints"))[-1] == f"step-{step:08d}"
    assert not stop.possible.is_set()
    assert handlers == [handler]  # Ctrl-C is the caller's, who can ask; Ray's handler would end the run unsaved
    assert not Path("/proc", str(told[0])).exists()
    monkeypatch.undo()
    # An earlier request does not stop it.
    summary = run(tmp_path, progress=seen.append)
    assert summary["step"] == STEPS
    assert signal.getsignal(signal.SIGINT) is handler  # Ray's own is gone with the run
    first, second = saved()
    assert first < second == step
    notices = [values["notice"] for values in seen if "notice" in values]
    assert notices == [f"resumes from step {at} of {STEPS}" for at in (first, second)]
    assert_equal_runs(tmp_path, on_ranks)
    writers = {name.split("-")[1] for name in list_parts(Storage(str(tmp_path)), "run")}
    assert writers == {"0001", "0002", "0003"}
    assert seen[-1]["step"] == STEPS
    assert seen[-1].keys() == {"step", "steps", "loss", "tokens_per_s", "eta_s"}
    assert run(tmp_path) == summary  # a finished run answers at once, without workers


def test_a_relative_source_is_found_from_the_users_folder_and_divergence_is_raised_as_itself(
    tmp_path, local_ray, monkeypatch
):
    write_dataset(tmp_path / "data")
    shutil.copy(Path(__file__).parents[4] / "examples" / "deltaproduct.py", tmp_path / "mine.py")
    monkeypatch.chdir(tmp_path)
    layout = {"type": "uniform", "mixer": {"type": "deltaproduct", "source": "mine.py"}}
    train = train_config(lr=1e30, grad_clip=None, warmup_steps=0).model_dump()
    started = time.monotonic()
    with pytest.raises(NonFiniteLossError, match="step 2"):  # no retry cures it
        run(
            tmp_path,
            PretrainConfig.model_validate({"model": {**MODEL, "layout": layout}, "train": train}),
            num_workers=1,
        )
    assert time.monotonic() - started < 60
    assert ResultsStore(Storage(str(tmp_path))).run("run").state == "failed"


def preempted(root):
    asked = iter([0, 0, STOP] + [0] * 9)
    with pytest.raises(PreemptedError):
        worker.run(open_run(Path(root), pretrain_config(**SHORT)), stop=lambda: next(asked))


def test_a_run_of_two_workers_goes_on_with_the_one_there_is_room_for(tmp_path, local_ray):
    def world_size():
        newest = checkpoints(tmp_path / "run")[-1]
        return Storage(f"{tmp_path}/run/checkpoints/{newest}").read_json("checkpoint.json")["world_size"]

    write_dataset(tmp_path / "data")
    worker.run(open_run(tmp_path, pretrain_config(**SHORT), "undisturbed"))
    run_ranks(preempted, 2, str(tmp_path))
    assert world_size() == 2
    summary = run(tmp_path, pretrain_config(**SHORT), min_workers=1, cpus_per_worker=2)  # of two CPUs
    assert (summary["step"], summary["position"]) == (8, 64)
    assert world_size() == 1
    assert losses(tmp_path) == pytest.approx(losses(tmp_path, "undisturbed"), rel=1e-5)


@pytest.mark.parametrize(
    ("environment", "cpus_per_worker", "expected"),
    [
        ({}, None, 4),  # of 8 cores, two workers
        ({"LT2_CORES": "3", "OMP_NUM_THREADS": "3"}, None, 1),
        ({"OMP_NUM_THREADS": "6"}, None, 6),
        ({"OMP_NUM_THREADS": "1"}, 5.0, 5),
        ({"LT2_CORES": "2", "OMP_NUM_THREADS": "2"}, 0.5, 1),
    ],
)
def test_threads_of_a_worker(monkeypatch, environment, cpus_per_worker, expected):
    monkeypatch.setattr(cores, "usable", lambda: 8)
    for name in ("LT2_CORES", "OMP_NUM_THREADS"):
        monkeypatch.delenv(name, raising=False)
    for name, value in environment.items():
        monkeypatch.setenv(name, value)
    assert trainer._threads(Workers(num_workers=2, cpus_per_worker=cpus_per_worker)) == expected


@pytest.mark.parametrize(
    ("taken", "expected"),
    [
        ([], "attempt-0001"),
        (["attempt-0001", "attempt-0002"], "attempt-0003"),
        (["attempt-0002"], "attempt-0003"),  # somebody has removed the first
        (["attempt-10000", "attempt-0009", "attempt-x", "notes"], "attempt-10001"),
    ],
)
def test_rays_name_of_an_attempt_is_one_that_it_has_not_seen(taken, expected):
    assert new_name(taken) == expected


def test_a_request_the_cluster_can_never_meet_fails_at_once(tmp_path, local_ray):
    write_dataset(tmp_path / "data")
    with pytest.raises(ConfigError, match="no room for 2 workers of 3 CPUs: .* lower cpus_per_worker or add nodes"):
        run(tmp_path, cpus_per_worker=3)
    with pytest.raises(ConfigError, match="no room for 1 worker of 1 CPU and 1 GPU: .* 2 CPUs and 0 GPUs"):
        run(tmp_path, num_workers=1, use_gpu=True)


def test_workers_keep_to_the_fence_of_the_process_that_started_them(tmp_path, monkeypatch):
    given = []

    def fake(work, train_loop_config, scaling_config, run_config):
        given.append(run_config.worker_runtime_env["env_vars"])
        return SimpleNamespace(fit=lambda: SimpleNamespace(return_value={"error": None, "summary": {}}))

    for fence in (None, "s3://bucket/next/lease.json"):
        if fence:
            monkeypatch.setenv(FENCE, fence)
        trainer._fit(fake, {}, Storage(str(tmp_path)), ScalingConfig(num_workers=1), 1, 0)
    assert given == [{"OMP_NUM_THREADS": "1"}, {"OMP_NUM_THREADS": "1", FENCE: "s3://bucket/next/lease.json"}]


@pytest.mark.parametrize(("dashboard", "cleans"), [("", 0), ("10.0.0.1:8265", 1)])
def test_rays_cleaner_asks_the_own_dashboard_or_is_left_out_as_are_its_datasets(monkeypatch, dashboard, cleans):
    monkeypatch.setattr(trainer, "get_dashboard_url", lambda: dashboard)
    made = trainer.Trainer(lambda settings: None, scaling_config=ScalingConfig(num_workers=1))
    kinds = [type(callback) for callback in made._create_default_callbacks()]
    assert kinds.count(PlacementGroupCleanerCallback) == cleans
    assert DatasetsCallback not in kinds  # a process to hand out none
    assert len(kinds) > 3
