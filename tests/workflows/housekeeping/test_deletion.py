"""Deleting workflows: what goes, what stays, and what a kill leaves."""

from __future__ import annotations

import re
import time

import pytest
from typer.testing import CliRunner

from lt2.config import ConfigError
from lt2_platform.fence import OvertakenError
from lt2_platform.storage import Storage
from lt2_workflows.cli import app
from lt2_workflows.engine import hold, records
from lt2_workflows.engine.hold import check_idle, clear
from lt2_workflows.housekeeping.deletion import Deletion, delete
from tests.workflows.housekeeping.stores import DONE, LEASE, files, step, workflow


@pytest.fixture
def storage(request, tmp_path):
    return Storage(request.getfixturevalue("s3_root") if getattr(request, "param", "") == "s3" else str(tmp_path))


@pytest.mark.parametrize("storage", ["local", "s3"], indirect=True)
def test_a_workflow_goes_with_the_steps_that_no_other_has(storage):
    workflow(storage, "a-1", "prepare-0", "train-1", "eval-1")
    workflow(storage, "b-1", "prepare-0", "train-2")
    storage.write_bytes("runs/train-1/curves.parquet", b"numbers")
    found, gone = Deletion.of(storage, "a-1"), []
    assert found == Deletion(("eval-1", "train-1"), ("a-1",), {"prepare-0": ["b-1"]})
    delete(storage, found, gone.append)
    assert gone == ["steps/eval-1", "steps/train-1", "workflows/a-1"]
    assert storage.list("workflows") == ["b-1"]
    assert storage.read_bytes("runs/train-1/curves.parquet") == b"numbers"
    assert len(files(storage, "steps/prepare-0")) == len(files(storage, "steps/train-2")) == 5
    # A process of attempt 1 that everybody took for dead still finds its fence.
    assert files(storage, "steps/train-1") == ["steps/train-1/attempts/2/lease.json"]
    assert storage.read_json("steps/train-1/attempts/2/lease.json")["released"]
    assert records.last_attempt(storage, "steps/train-1") == 2
    with pytest.raises(ConfigError, match="no workflow 'train-1' in .*; `lt2 status` lists them"):
        Deletion.of(storage, "train-1")


def test_trials_go_with_their_sweep_and_not_without_it(storage):
    workflow(storage, "s-1", "prepare-0", "sweep-1")
    workflow(storage, "s-1-trial-1", "prepare-0", "train-1", part_of="sweep-1")
    workflow(storage, "s-1-trial-2", "prepare-0", "inner-2", part_of="sweep-1")
    workflow(storage, "s-1-trial-2-trial-1", "train-2", part_of="inner-2")
    with pytest.raises(ConfigError, match=r"s-1-trial-1 is a trial of the sweep sweep-1 in .*; give that one's"):
        Deletion.of(storage, "s-1-trial-1")
    workflow(storage, "other", "sweep-1")
    assert Deletion.of(storage, "s-1") == Deletion(
        (), ("s-1",), {"sweep-1": ["other"], "prepare-0": ["s-1-trial-1", "s-1-trial-2"]}
    )
    storage.delete("workflows/other")
    found = Deletion.of(storage, "s-1")
    assert found.steps == ("sweep-1", "prepare-0", "train-1", "inner-2", "train-2")
    assert set(found.workflows) == {"s-1", "s-1-trial-1", "s-1-trial-2", "s-1-trial-2-trial-1"}
    assert found.workflows[-1] == "s-1"  # while it is there, the same command finds the others
    storage.delete("workflows/s-1")
    assert Deletion.of(storage, "s-1-trial-1").steps == ("train-1",)  # whose sweep is gone


def test_what_must_not_go_is_told(storage):
    workflow(storage, "a-1", "train-1", name="a")
    workflow(storage, "a-2", "train-2", name="a")
    with pytest.raises(ConfigError, match="2 workflows are called a: a-1, a-2; give the id of one"):
        Deletion.of(storage, "a")
    workflow(storage, "a", "train-3")
    assert Deletion.of(storage, "a").steps == ("train-3",)  # an id goes before names
    with pytest.raises(ConfigError, match="step train-1 belongs to a-1; delete that workflow"):
        Deletion.of(storage, "train-1")
    step(storage, "more-1", done=False)
    workflow(storage, "b-1", "more-1", steps={"more": {"start": storage.join("steps/train-1/out")}})
    with pytest.raises(ConfigError, match="b-1 is not finished and reads steps/train-1; finish or delete it first"):
        Deletion.of(storage, "a-1")
    storage.write_json("steps/more-1/done.json", DONE)
    assert Deletion.of(storage, "a-1").steps == ("train-1",)  # it has read what it needed
    storage.write_bytes("workflows/c-1/dag.json", b"{")
    with pytest.raises(ConfigError, match=r"c-1/dag.json is not readable"):  # nobody knows what it needs
        Deletion.of(storage, "a-1")


def test_a_step_that_no_workflow_has(storage):
    step(storage, "train-1")
    assert Deletion.of(storage, "train-1") == Deletion(("train-1",), (), {})


def test_an_unfinished_workflow_does_not_keep_itself(storage):
    step(storage, "train-1", done=False)
    workflow(storage, "a-1", "train-1", steps={"train": {"start": storage.join("steps/train-1/out")}})
    assert Deletion.of(storage, "a-1").steps == ("train-1",)


def test_a_running_step_stays(storage, monkeypatch):
    workflow(storage, "a-1", "train-1", "eval-1")
    step(storage, "eval-1", done=False, released=False)

    def beats(_):
        lease = storage.read_json("steps/eval-1/attempts/1/lease.json")
        storage.write_json("steps/eval-1/attempts/1/lease.json", lease | {"beat": lease["beat"] + 1})

    monkeypatch.setattr(hold.time, "sleep", beats)
    with pytest.raises(ConfigError, match=r"step eval-1 is being run by process 1 on h; stop it first"):
        delete(storage, Deletion.of(storage, "a-1"))
    assert len(files(storage, "steps/train-1")) == 5


def test_who_died_without_a_word_is_waited_for_and_then_holds_nothing(storage, monkeypatch):
    step(storage, "train-1", done=False, released=False)
    now = [0.0]
    monkeypatch.setattr(time, "monotonic", lambda: now[0])
    monkeypatch.setattr(time, "sleep", lambda seconds: now.__setitem__(0, now[0] + seconds))
    check_idle(storage, ["train-1", "never-ran"])
    assert 30 < now[0] < 33


def test_who_begins_to_run_a_step_meanwhile_keeps_it(storage, monkeypatch):
    step(storage, "train-1")
    with monkeypatch.context() as patched:
        patched.setattr(hold, "last_attempt", lambda *_: 0)  # seen before attempt 1 began
        with pytest.raises(ConfigError, match="step train-1 is being run by another process since a moment ago"):
            delete(storage, Deletion.of(storage, "train-1"))
    assert len(files(storage, "steps/train-1")) == 5
    with pytest.raises(OvertakenError, match="step train-1: another process took over"), hold.hold(storage, "train-1"):
        storage.write_json(records.lease_path("steps/train-1", 3), LEASE)


@pytest.mark.parametrize("refused", ["done.json", "out", "incomplete.json"])
def test_a_deletion_that_is_killed_is_ended_by_the_next_attempt_or_the_same_command(storage, monkeypatch, refused):
    workflow(storage, "a-1", "train-1")
    remove = Storage.delete

    def killed(self, path):
        if path.endswith(f"/{refused}"):
            raise KeyboardInterrupt
        remove(self, path)

    with monkeypatch.context() as patched:
        patched.setattr(Storage, "delete", killed)
        with pytest.raises(KeyboardInterrupt):
            delete(storage, Deletion.of(storage, "a-1"))
    storage.write_json(records.lease_path("steps/train-1", 2), LEASE)  # its lease is stale by now
    step_files = files(storage, "steps/train-1")
    assert "steps/train-1/incomplete.json" in step_files
    assert ("steps/train-1/done.json" in step_files) == (refused == "done.json")  # never done with half of its output
    clear(storage, "steps/train-1")
    assert not {"incomplete.json", "done.json", "out"} & set(storage.list("steps/train-1"))
    clear(storage, "steps/train-1")
    delete(storage, Deletion.of(storage, "a-1"))
    assert files(storage, "") == ["steps/train-1/attempts/3/lease.json"]


def test_the_commands(storage):
    workflow(storage, "a-1", "train-1", name="a")
    run = CliRunner().invoke
    place = ["--storage", storage.root]
    shown = run(app, ["space", *place]).stdout
    assert re.search(r"steps/train-1 +done +1970-01-01 00:00 +a-1", shown)
    assert f"in 6 files in {storage.root}" in shown
    refused = run(app, ["delete", "a", *place], input="n\n")
    assert isinstance(refused.exception, ConfigError)
    assert "deletes " in refused.stdout
    assert len(files(storage, "")) == 6
    assert run(app, ["delete", "a", "--yes", *place]).stdout.splitlines()[1:] == [
        "deleted steps/train-1",
        "deleted workflows/a-1",
    ]
