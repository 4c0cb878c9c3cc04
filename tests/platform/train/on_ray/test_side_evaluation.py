"""Evaluation during training: on a spare CPU beside a training worker, waiting and skipping where there is none."""

import shutil
import time
from collections import defaultdict
from dataclasses import replace
from types import SimpleNamespace
from unittest.mock import Mock

import pytest
import torch
from botocore.exceptions import EndpointConnectionError
from ray.exceptions import RayError

from lt2.config import ConfigError
from lt2_platform import storage_errors
from lt2_platform.evaluate import checkpoints as evaluation
from lt2_platform.evaluate import diagnostics
from lt2_platform.fence import FENCE, OvertakenError
from lt2_platform.results.store import ResultsStore
from lt2_platform.storage import Storage
from lt2_platform.train import evaluation_records, worker
from lt2_platform.train.config import TrainingEvaluation, Workers
from lt2_platform.train.evaluation_records import note, record, wanted
from lt2_platform.train.on_ray import side_evaluation
from lt2_platform.train.on_ray.side_evaluation import SideEvaluations
from lt2_platform.train.on_ray.trainer import pretrain
from tests.platform.one_ray import one_ray
from tests.platform.train.packed import checkpoints, train_config, write_dataset
from tests.platform.train.test_worker import losses, open_run, pretrain_config, weights

PERPLEXITY = {"type": "perplexity", "batch_size": 4}


def plan(**fields):
    return TrainingEvaluation.model_validate({"every": 2, "tasks": [PERPLEXITY]} | fields)


@pytest.fixture(scope="module")
def two_cpus():
    with one_ray():
        yield


def run(root, config, **workers):
    where = {"data": str(root / "data"), "out": str(root / "run"), "run_id": "run", "storage_root": str(root)}
    return pretrain(config, **where, workers=Workers(**workers))


@pytest.mark.ray
@pytest.mark.timeout(600)
@pytest.mark.parametrize("num_workers", [1, 2])  # one CPU is spare, or none
def test_checkpoints_are_evaluated_and_training_is_what_it_was_without(tmp_path, two_cpus, num_workers):
    write_dataset(tmp_path / "data")
    config = pretrain_config(steps=8, keep_checkpoints=1)
    if num_workers == 1:
        worker.run(open_run(tmp_path, config, "plain"))
    run(
        tmp_path,
        config,
        num_workers=num_workers,
        cpus_per_worker=1,
        data_reader="direct",
        evaluation=plan(max_waiting=4),
    )
    names = [f"step-{step:08d}" for step in (2, 4, 6, 8)]
    assert [record(str(tmp_path / "run"), name)["state"] for name in names] == ["done"] * 4
    evals = ResultsStore(Storage(str(tmp_path))).index().evals
    rows = [row for _, _, row in evals]
    assert {name for _, name, _ in evals} == {"training"}
    assert sorted({row["step"] for row in rows}) == [2, 4, 6, 8]
    assert {row["metric"] for row in rows} >= {"loss", "perplexity"}
    assert checkpoints(tmp_path / "run") == ["step-00000008"]  # the others stayed until they were evaluated
    if num_workers == 1:
        assert losses(tmp_path) == losses(tmp_path, "plain")
        ours, theirs = weights(tmp_path / "run"), weights(tmp_path / "plain")
        assert all(torch.equal(value, theirs[name]) for name, value in ours.items())


@pytest.mark.ray
def test_what_the_cluster_can_never_do_is_refused(tmp_path, two_cpus):
    write_dataset(tmp_path / "data")
    with pytest.raises(ConfigError, match="every 3 is not a multiple of train.checkpoint_every 2"):
        run(tmp_path, pretrain_config(steps=8), evaluation=plan(every=3))
    assert not (tmp_path / "run").exists()  # the folder is not bound to a config that cannot work
    with pytest.raises(ConfigError, match="resources.evaluation needs 1 CPU and 1 GPU, and no node of the cluster"):
        run(tmp_path, pretrain_config(steps=8), evaluation=plan(gpus=1))
    with pytest.raises(ConfigError, match="every 2 is not a multiple of train.checkpoint_every None"):
        plan().check(train_config())


def test_a_table_over_depths_is_no_score_of_the_model_itself(trained, monkeypatch):
    monkeypatch.setattr(diagnostics, "SHORTEST", 6)  # documents of this dataset have 5 and 8 tokens
    name, tasks = checkpoints(trained.out)[-1], [PERPLEXITY, {"type": "diagnostics", "documents": 1}]
    evaluate, states = evaluation.evaluate_checkpoint, []

    def evaluating(*arguments, **more):
        states.append(record(trained.out, name)["state"])
        return evaluate(*arguments, **more)

    monkeypatch.setattr(evaluation, "evaluate_checkpoint", evaluating)
    side_evaluation.evaluate(trained, plan(tasks=tasks, loops=[1, 2, 3]).model_dump(mode="json"), name, None)
    depths = defaultdict(set)
    for _, kind, row in ResultsStore(Storage(trained.storage_root)).index().evals:
        depths[kind].add(row["n_loops"])
    assert depths == {"training": {2}, "depth": {1, 2, 3}, "diagnostics": {2}}
    assert [*states, record(trained.out, name)["state"]] == ["running", "done"]


class NoRoom(SideEvaluations):
    """Evaluations that never begin, except those named."""

    def __init__(self, spec, **fields):
        super().__init__(spec, plan(**fields), gpus=0)
        self.begun, self.cancelled = set(), []

    def start(self, name):
        return name

    def is_over(self, handle):
        return handle in self.begun

    def cancel(self, handle):
        self.cancelled.append(handle)

    def result(self, handle):
        if handle not in self.begun:
            raise ConfigError("a task\nof no use")
        note(self.spec.out, handle, "done")


@pytest.fixture(scope="module")
def original(tmp_path_factory):
    root = tmp_path_factory.mktemp("original")
    write_dataset(root / "data")
    spec = replace(open_run(root, pretrain_config(steps=8)), evaluate_every=2)
    worker.run(spec)
    return root, spec


@pytest.fixture
def trained(original, tmp_path, monkeypatch):
    """A run of one's own."""
    monkeypatch.setattr(side_evaluation, "STARTING_SECONDS", 0.0)
    root, spec = original
    shutil.copytree(root, tmp_path, dirs_exist_ok=True)
    return replace(spec, data=str(tmp_path / "data"), out=str(tmp_path / "run"), storage_root=str(tmp_path))


def test_an_evaluation_of_an_attempt_that_was_taken_over_writes_nothing(trained, tmp_path, monkeypatch):
    """Its task lives on while the attempt's process stands still."""
    (tmp_path / "next").touch()
    monkeypatch.setenv(FENCE, str(tmp_path / "next"))
    sent, needs = [], []
    remote = SimpleNamespace(remote=lambda *arguments: sent.append(arguments))
    task = SimpleNamespace(options=lambda **options: needs.append(options) or remote)
    monkeypatch.setattr(side_evaluation.ray, "remote", lambda function: task)
    SideEvaluations(trained, plan(cpus=3), gpus=0.5).start("step-00000002")
    assert needs == [{"num_cpus": 3, "num_gpus": 0.5, "name": "evaluate step-00000002"}]
    monkeypatch.setenv(FENCE, "")  # as in a worker
    with pytest.raises(OvertakenError):
        side_evaluation.evaluate(*sent[0])
    assert record(trained.out, "step-00000002") == {}
    assert ResultsStore(Storage(str(tmp_path))).index().evals == []


def test_evaluations_wait_the_oldest_are_skipped_and_a_failed_one_costs_nothing_else(trained, caplog):
    names = [f"step-{step:08d}" for step in (2, 4, 6, 8)]
    assert checkpoints(trained.out) == names  # two are to be kept, but none has been evaluated
    side = NoRoom(trained, max_waiting=2)
    side.look()
    assert side.cancelled == names[:2]
    assert "the evaluation of step-00000002 waits: it needs 1 CPUs and 0 GPUs" in caplog.text
    assert [record(trained.out, name)["state"] for name in names] == ["skipped", "skipped", "waiting", "waiting"]
    side.begun.add(names[2])
    side.look()
    assert wanted(trained.out, 2) == [names[3]]
    side.drain()
    assert [record(trained.out, name)["state"] for name in names] == ["skipped", "skipped", "done", "failed"]
    assert record(trained.out, names[3])["reason"] == "of no use"
    events = ResultsStore(Storage(trained.storage_root)).events("run")
    assert [(event["checkpoint"], event["state"]) for event in events] == [
        (names[0], "skipped"), (names[1], "skipped"), (names[3], "failed")
    ]  # fmt: skip
    assert checkpoints(trained.out) == names[2:]
    assert caplog.text.count(" waits: ") == 1


def test_a_task_that_is_beginning_does_not_wait_for_a_place(trained, monkeypatch, caplog):
    """It says that it runs when its process has begun, seconds after it got its place."""
    monkeypatch.setattr(side_evaluation, "STARTING_SECONDS", 30.0)
    side, now = NoRoom(trained), time.monotonic()
    side.look()
    assert (side.cancelled, caplog.text) == ([], "")
    monkeypatch.setattr(side_evaluation.time, "monotonic", lambda: now + 35)
    note(trained.out, "step-00000002", "running")
    side.look()
    assert side.cancelled == ["step-00000004"]
    assert "the evaluation of step-00000004 waits" in caplog.text


def test_another_driver_takes_up_what_the_first_left(trained):
    note(trained.out, "step-00000002", "running")
    note(trained.out, "step-00000004", "done")
    side = NoRoom(trained, max_waiting=9)
    side.look()
    assert list(side.handles) == ["step-00000002", "step-00000006", "step-00000008"]


def test_a_failure_without_words_is_told_by_its_kind(trained, monkeypatch):
    side = NoRoom(trained, max_waiting=9)
    side.look()
    monkeypatch.setattr(side, "result", Mock(side_effect=RayError()))
    side.begun.add("step-00000002")
    side.look()
    assert record(trained.out, "step-00000002")["reason"] == "RayError"


def test_a_record_that_is_being_written_counts_as_none(trained):
    Storage(trained.out).write_bytes("evaluations/step-00000002.json", b"")
    assert record(trained.out, "step-00000002") == {}
    assert "step-00000002" in evaluation_records.wanted(trained.out, 2)


def test_evaluations_that_are_over_are_not_asked_for_again(trained, monkeypatch):
    side, names = NoRoom(trained), [f"step-{step:08d}" for step in (2, 4, 6, 8)]
    note(trained.out, names[0], "done")
    side.look()
    asked, read = [], Storage.read_json

    def reading(storage, path):
        asked.append(path)
        return read(storage, path)

    monkeypatch.setattr(Storage, "read_json", reading)
    side.look()
    assert not [path for path in asked if names[0] in path or names[1] in path]  # done, and skipped
    assert [path for path in asked if names[2] in path]


def test_a_store_that_is_away_for_a_while_ends_no_watching(trained, monkeypatch, caplog):
    monkeypatch.setattr(side_evaluation, "POLL_SECONDS", 0.01)
    side, looks = NoRoom(trained), []

    def look():
        looks.append(1)
        if len(looks) == 1:
            raise EndpointConnectionError(endpoint_url="http://away")
        side.ended.set()

    monkeypatch.setattr(side, "look", look)
    side._run()
    assert len(looks) == 2
    assert "are not being tracked (Could not connect" in caplog.text


def test_the_end_of_training_waits_for_a_store_that_is_away(trained, monkeypatch):
    monkeypatch.setattr(storage_errors, "LONGEST_PAUSE_SECONDS", 0.0)
    side = NoRoom(trained, max_waiting=9)
    side.look()
    asked, listed = [], Storage.list

    def listing(storage, path=""):
        asked.append(path)
        if len(asked) % 2:  # every question is refused once
            raise EndpointConnectionError(endpoint_url="http://away")
        return listed(storage, path)

    def noting(*args, **more):
        asked.append(args)
        if len(asked) % 2:
            raise EndpointConnectionError(endpoint_url="http://away")
        note(*args, **more)

    monkeypatch.setattr(Storage, "list", listing)
    monkeypatch.setattr(evaluation_records, "note", noting)
    side.drain()
    names = [f"step-{step:08d}" for step in (2, 4, 6, 8)]
    assert [record(trained.out, name)["state"] for name in names] == ["failed"] * 4
    assert side.handles == {}


def test_a_run_that_fails_leaves_no_evaluation_behind(trained, monkeypatch):
    asked = []
    monkeypatch.setattr(side_evaluation, "places", lambda request: asked.append(request) or 1)
    side = NoRoom(trained, cpus=2)

    def train():
        with side:
            side.look()
            raise RuntimeError("diverged")

    with pytest.raises(RuntimeError, match="diverged"):
        train()
    assert asked == [{"CPU": 2}], "no GPU is no request"
    names = [f"step-{step:08d}" for step in (6, 8)]
    assert side.cancelled[-2:] == names
    assert not side.thread.is_alive()
    with NoRoom(trained):  # another attempt, whose training ends well
        assert [record(trained.out, name)["state"] for name in names] == ["waiting"] * 2
    assert [record(trained.out, name)["state"] for name in names] == ["failed"] * 2
