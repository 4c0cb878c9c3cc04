"""Copying workflows to another root: there it is as if they had been run there."""

from __future__ import annotations

import pytest
from typer.testing import CliRunner

from lt2.config import ConfigError
from lt2_platform.results.store import ResultsStore
from lt2_platform.storage import Storage
from lt2_workflows.cli import app
from lt2_workflows.engine import records
from lt2_workflows.housekeeping import copying
from lt2_workflows.housekeeping.copying import COPIED, THERE, UNFINISHED, copy_workflow
from lt2_workflows.housekeeping.deletion import Deletion, delete
from tests.platform.conftest import values
from tests.workflows.housekeeping.stores import DONE, files, step, workflow


@pytest.fixture
def source(tmp_path):
    storage = Storage(str(tmp_path / "ours"))
    workflow(storage, "a-1", "prepare-0", "train-1", "eval-1", name="a")
    storage.write_bytes("steps/train-1/attempts/1/log", b"said")
    storage.write_bytes("evals/train-1/eval-1/samples/x.jsonl", b"{}")
    store = ResultsStore(storage)
    with store.create_run("train-1", {"config": {"lr": 0.1}}) as run:
        run.log(1, {"loss": 2.0})
        run.log(2, {"loss": 1.5})
    for value in (0.25, 0.5):
        store.log_eval("train-1", "core", [{"task": "t", "metric": "acc", "value": value}])
    store.log_note("train-1", "good", "me")
    return storage


@pytest.fixture(params=["local", "s3"])
def target(request, tmp_path):
    return Storage(request.getfixturevalue("s3_root") if request.param == "s3" else str(tmp_path / "theirs"))


def copied(source, target, name="a"):
    said = {}
    copy_workflow(source, target, name, said.__setitem__)
    return said


def test_a_copy_is_as_if_it_had_been_run_there(source, target):
    said = copied(source, target)
    assert said == dict.fromkeys(["steps/prepare-0", "steps/train-1", "steps/eval-1", "workflows/a-1"], COPIED)
    assert records.list_workflows(target)[0]["steps"][1]["state"] == "done"
    assert target.read_bytes("steps/train-1/out/made") == source.read_bytes("steps/train-1/out/made")
    assert target.read_bytes("steps/train-1/attempts/1/log") == b"said"
    assert sorted(target.list("steps/train-1")) == ["attempts", "done.json", "out", "spec.json"]
    assert target.read_bytes("evals/train-1/eval-1/samples/x.jsonl") == b"{}"
    ours, theirs = ResultsStore(source), ResultsStore(target)
    assert values(theirs, "train-1", "loss") == {1: 2.0, 2: 1.5}
    assert theirs.index() == ours.index()
    assert theirs.results() == ours.results()
    before = target.sizes()
    assert set(copied(source, target).values()) == {THERE, COPIED}  # steps are there, records are written again
    assert target.sizes() == before
    assert theirs.index() == ours.index()


def test_only_finished_steps_go_and_the_rest_follows(source, tmp_path):
    target = Storage(str(tmp_path / "theirs"))
    source.delete("steps/eval-1/done.json")
    assert copied(source, target)["steps/eval-1"] == UNFINISHED
    assert files(target, "steps/eval-1") == []
    source.write_json("steps/eval-1/done.json", DONE)
    ResultsStore(source).log_eval("train-1", "more", [{"task": "u", "metric": "acc", "value": 1.0}])
    assert copied(source, target)["steps/eval-1"] == COPIED
    assert ResultsStore(target).index() == ResultsStore(source).index()


def test_what_the_target_has_of_its_own_stays(source, tmp_path):
    target = Storage(str(tmp_path / "theirs"))
    workflow(target, "b-1", "prepare-0", "other-1")
    step(target, "train-1", done=False, made=7)  # that failed there
    with ResultsStore(target).create_run("other-1", {"config": {"lr": 0.3}}) as run:
        run.log(1, {"loss": 3.0})
    said = copied(source, target)
    assert (said["steps/prepare-0"], said["steps/train-1"]) == (THERE, COPIED)
    assert target.sizes("steps/train-1/out") == source.sizes("steps/train-1/out")
    assert target.read_json("steps/train-1/done.json") == DONE | {"attempt": 2}
    assert set(ResultsStore(target).index().runs) == {"train-1", "other-1"}
    with ResultsStore(target).create_run("train-1", {"config": {"lr": 0.1}}) as run:
        run.log(3, {"loss": 1.0})
    copied(source, target)
    assert ResultsStore(target).run("train-1").last["loss"] == (3, 1.0)  # the later word


def test_a_copy_that_is_killed_leaves_no_step_that_looks_done(source, tmp_path, monkeypatch):
    target = Storage(str(tmp_path / "theirs"))

    def killed(source, target, paths):
        target.write_bytes("steps/prepare-0/out/part", b"half of it")
        raise KeyboardInterrupt

    with monkeypatch.context() as patched:
        patched.setattr(copying, "copy_files", killed)
        with pytest.raises(KeyboardInterrupt):
            copied(source, target)
    assert "incomplete.json" in target.list("steps/prepare-0")
    assert not target.is_file("steps/prepare-0/done.json")
    assert copied(source, target)["steps/prepare-0"] == COPIED
    assert target.sizes("steps/prepare-0/out") == source.sizes("steps/prepare-0/out")
    assert ResultsStore(target).index() == ResultsStore(source).index()


def test_a_step_that_runs_there_is_not_touched(source, tmp_path, monkeypatch):
    target = Storage(str(tmp_path / "theirs"))
    step(target, "train-1", done=False, released=False)
    monkeypatch.setattr("lt2_workflows.engine.records.Watch.heard", lambda _: True)
    with pytest.raises(ConfigError, match="step train-1 is being run by process 1 on h"):
        copied(source, target)
    assert files(target, "steps/prepare-0") == []


def test_a_step_that_ends_there_meanwhile_is_left_as_it_is(source, tmp_path, monkeypatch):
    target = Storage(str(tmp_path / "theirs"))
    monkeypatch.setattr(copying, "check_idle", lambda *_: step(target, "train-1", made=7))
    copied(source, target)
    assert target.sizes("steps/train-1/out") == {"steps/train-1/out/made": 7}
    assert target.read_json("steps/train-1/done.json") == DONE
    assert "incomplete.json" not in target.list("steps/train-1")


def test_a_sweep_takes_its_trials_along_and_can_then_be_deleted_here(source, tmp_path):
    target = Storage(str(tmp_path / "theirs"))
    workflow(source, "s-1", "prepare-0", "sweep-1")
    workflow(source, "s-1-trial-1", "train-2", part_of="sweep-1")
    said = copied(source, target, "s-1")
    assert said["steps/train-2"] == COPIED
    assert list(said)[-1] == "workflows/s-1"  # after its trials
    delete(source, Deletion.of(source, "s-1"))
    assert records.list_workflows(target, "s-1-trial-1")[0]["steps"][0]["state"] == "done"


def test_the_command(source, tmp_path):
    run = CliRunner().invoke
    done = run(app, ["copy", "a", str(tmp_path / "theirs"), "--storage", source.root])
    assert done.exit_code == 0
    assert "steps/train-1  copied\n" in done.stdout
    for arguments, message in (
        (["copy", "b", str(tmp_path / "theirs")], "no workflow 'b' in"),
        (["copy", "a", source.root], "is where it is; give another root"),
    ):
        refused = run(app, [*arguments, "--storage", source.root])
        assert isinstance(refused.exception, ConfigError)
        assert message in str(refused.exception)
