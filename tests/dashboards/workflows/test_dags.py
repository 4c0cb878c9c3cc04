"""Workflows and steps as the pages read them from the engine's records."""

from __future__ import annotations

import time

import pytest
from fastapi.testclient import TestClient

from lt2.config import ConfigError
from lt2_dashboards.app import create_app
from lt2_dashboards.auth import Access
from lt2_dashboards.workflows import dags
from lt2_dashboards.workflows.dags import in_order, is_trial, overall, read_trials, read_workflow, read_workflows
from lt2_dashboards.workflows.steps import LOG_TAIL, read_log, read_step
from lt2_platform.step_records import this_process
from lt2_platform.storage import Storage
from tests.dashboards.conftest import HOSTILE, attempt, body, fill_sweep, fill_workflow


def test_a_workflow_with_the_states_of_its_steps(client):
    (listed,) = body(client.get("/api/workflows"))["workflows"]
    assert (listed["id"], listed["recipe"], listed["state"]) == ("demo-1", "demo", "failed")
    page = body(client.get("/api/workflows/demo-1"))
    steps = {step["name"]: step for step in page["steps"]}
    assert {name: step["state"] for name, step in steps.items()} == {
        "prepare": "done",
        "full": "failed",
        "hybrid-2": "running",
        "report": "waiting",
    }
    assert {name: step["level"] for name, step in steps.items()} == {
        "prepare": 0,
        "full": 1,
        "hybrid-2": 1,
        "report": 2,
    }
    assert steps["full"]["attempt"] == 2
    assert steps["full"]["error"] == "ValueError: lr is negative; use a positive one"
    assert steps["report"]["needs"] == ["full", "hybrid-2"]


def test_a_step_with_attempts_newest_first(client):
    step = body(client.get("/api/steps/full-00000000"))
    assert [(a["attempt"], a["state"]) for a in step["attempts"]] == [(2, "failed"), (1, "infrastructure")]
    assert step["attempts"][0]["host"] == "node-1"
    assert step["config"]["note"] == HOSTILE
    assert step["has_run"] is False
    assert body(client.get("/api/steps/hybrid-2"))["has_run"] is True
    assert body(client.get("/api/steps/prepare-00000000"))["result"] == {"tokens": "5"}


def test_a_sweeps_trials_are_on_its_steps_page_and_not_on_the_list(tmp_path):
    storage = Storage(str(tmp_path))
    fill_workflow(storage)
    fill_sweep(storage, 250, failed=2)
    storage.write_json("workflows/orphan/dag.json", {"workflow": "orphan", "ids": {}, "part_of": "sweep-of-old"})
    shared = {"workflow": "swept-shared", "ids": {"prepare": "prepare-00000000"}, "part_of": "sweep-00000000"}
    storage.write_json("workflows/swept-shared-1/dag.json", shared)  # what trials have in common is none of them
    client = TestClient(create_app(str(tmp_path), Access("none")), base_url="http://127.0.0.1:8787")
    found = body(client.get("/api/workflows"))
    assert {w["id"]: w["trials"] for w in found["workflows"]} == {
        "demo-1": {},
        "swept-1": {"sweep-00000000": 250},
        "orphan": {},
    }
    assert (found["trials"], found["left_out"]) == (250, 0)
    assert body(client.get("/api/steps/sweep-00000000"))["sweep"] is True
    assert body(client.get("/api/steps/full-00000000"))["sweep"] is False
    sweep = body(client.get("/api/steps/sweep-00000000/trials"))
    assert (sweep["states"], len(sweep["trials"]), sweep["left_out"]) == ({"failed": 2, "done": 248}, 251, 0)
    assert [(t["id"], t["state"], t["error"]) for t in sweep["trials"][:3]] == [
        ("swept-trial-248", "failed", "pretrain: trial 248 ran out of memory"),
        ("swept-trial-249", "failed", "pretrain: trial 249 ran out of memory"),
        ("swept-shared-1", "done", None),
    ]
    assert body(client.get("/api/workflows/swept-trial-249"))["part_of"] == "sweep-00000000"


def test_what_trials_share_is_known_by_its_record_not_by_its_name():
    record = {"workflow": "swept-weights-shared", "part_of": "sweep-00000000"}
    assert is_trial(record | {"shared": False})
    assert not is_trial(record | {"shared": True})
    assert not is_trial(record | {"workflow": "swept", "shared": True})
    assert not is_trial(record)  # written before there was such a field
    assert is_trial(record | {"workflow": "swept-3"})


def test_what_a_list_leaves_out_is_counted(tmp_path, monkeypatch):
    monkeypatch.setattr(dags, "MAX_WORKFLOWS", 1)
    monkeypatch.setattr(dags, "MAX_TRIALS", 2)
    storage = Storage(str(tmp_path))
    fill_workflow(storage)
    fill_sweep(storage, 5, failed=1)
    found = read_workflows(storage, 0.0)
    assert ([w["id"] for w in found["workflows"]], found["left_out"]) == (["demo-1"], 1)
    sweep = read_trials(storage, "sweep-00000000", 0.0)
    assert [trial["id"] for trial in sweep["trials"]] == ["swept-trial-4", "swept-trial-0"]
    assert (sweep["states"], sweep["left_out"]) == ({"failed": 1, "done": 4}, 3)


def test_logs(client):
    log = body(client.get("/api/steps/full-00000000/attempts/1/log"))
    assert log["text"].startswith("\x1b[32mattempt 1 of full-00000000")
    assert log["text"].endswith("�\n")
    assert log["cut"] == 0
    assert body(client.get("/api/steps/full-00000000/attempts/9/log"))["text"] is None


def test_only_the_end_of_a_long_log_is_sent(tmp_path):
    storage = Storage(str(tmp_path))
    storage.write_bytes("steps/s/attempts/1/log", b"a" * 1_000 + b"b" * LOG_TAIL)
    log = read_log(storage, "s", 1)
    assert log == {"text": "b" * LOG_TAIL, "size": LOG_TAIL + 1_000, "cut": 1_000}


def test_stray_files_among_the_folders_are_no_workflows_and_no_attempts(tmp_path):
    storage = Storage(str(tmp_path))
    fill_workflow(storage)
    for path in ("workflows/x", "steps/full-00000000/attempts/7"):
        storage.write_bytes(path, b"")
    client = TestClient(create_app(str(tmp_path), Access("none")), base_url="http://127.0.0.1:8787")
    assert [workflow["id"] for workflow in body(client.get("/api/workflows"))["workflows"]] == ["demo-1"]
    assert client.get("/api/workflows/x").json()["error"].startswith("no workflow 'x'")
    assert body(client.get("/api/steps/full-00000000/attempts/7/log"))["text"] is None


@pytest.mark.parametrize("data", [b"", b"[]", b'{"attempt": ', b'{"attempt": "1"}'])
def test_a_step_with_a_damaged_done_record_is_not_done(tmp_path, data):
    storage = Storage(str(tmp_path))
    fill_workflow(storage)
    path = "steps/prepare-00000000/done.json"
    storage.write_bytes(path, data)
    (listed,) = (found := read_workflows(storage, 0.0))["workflows"]
    assert sorted(listed["states"]) == ["failed", "running", "unreadable", "waiting"]
    page, step = read_workflow(storage, "demo-1", 0.0), read_step(storage, "prepare-00000000", 0.0)
    shown = {each["name"]: each for each in page["steps"]}["prepare"]
    assert (shown["state"], shown["error"].partition(":")[0]) == ("unreadable", path)
    assert [each["state"] for each in step["attempts"]] == ["unreadable"]
    for answer in (found, page, step):
        assert [line.startswith(f"{path}: skipped, unreadable (") for line in answer["skipped"]] == [True]


def test_a_step_whose_done_record_was_removed_waits(tmp_path):
    storage = Storage(str(tmp_path))
    fill_workflow(storage)
    storage.delete("steps/prepare-00000000/done.json")
    storage.write_json("steps/prepare-00000000/attempts/1/state.json", {"state": "done", "ended": 0.0, "error": None})
    (listed,) = read_workflows(storage, 0.0)["workflows"]
    assert sorted(listed["states"]) == ["failed", "running", "waiting", "waiting"]


@pytest.mark.parametrize("data", [b"", b"{}]", b'{"ids": []}', b'{"ids": {"a": "../b"}}'])
def test_a_workflow_with_a_damaged_record_is_named(tmp_path, data):
    storage = Storage(str(tmp_path))
    fill_workflow(storage)
    storage.write_bytes("workflows/torn/dag.json", data)
    found = read_workflows(storage, 0.0)
    assert [workflow["id"] for workflow in found["workflows"]] == ["demo-1"]
    assert [line.partition(" ")[0] for line in found["skipped"]] == ["workflows/torn/dag.json:"]
    with pytest.raises(ConfigError, match=r"workflows/torn/dag.json: skipped, unreadable"):
        read_workflow(storage, "torn", 0.0)


def test_damaged_records_of_an_attempt(tmp_path):
    storage, now = Storage(str(tmp_path)), time.time()
    for name in ("state", "lease"):
        storage.write_json(f"steps/{name}/spec.json", {"name": "s"})
        attempt(storage, name, 1, "running", now - 10, beat=now)
        path = f"steps/{name}/attempts/1/{name}.json"
        storage.write_bytes(path, b"")
        step = read_step(storage, name, now)
        assert [each["state"] for each in step["attempts"]] == ["unreadable"]
        assert step["skipped"] == [f"{path}: skipped, unreadable (it is empty)"]


def test_a_step_whose_settings_are_damaged_is_named(tmp_path):
    storage = Storage(str(tmp_path))
    fill_workflow(storage)
    path = "steps/report-00000000/spec.json"
    storage.write_bytes(path, b"")
    assert read_workflow(storage, "demo-1", 0.0)["skipped"] == [f"{path}: skipped, unreadable (it is empty)"]
    with pytest.raises(ConfigError, match=f"^{path}: skipped, unreadable"):
        read_step(storage, "report-00000000", 0.0)


def test_a_holder_that_fell_silent_is_lost(tmp_path):
    storage = Storage(str(tmp_path))
    storage.write_json("steps/s/spec.json", {"name": "s"})
    attempt(storage, "s", 1, "running", 0.0, beat=1_000.0)
    assert read_step(storage, "s", 1_359.0)["attempts"][0]["state"] == "running"  # another machine's clock may be off
    assert read_step(storage, "s", 1_361.0)["attempts"][0]["state"] == "lost"
    attempt(storage, "s", 1, "running", 0.0, beat=1_000.0, holder=this_process())
    assert read_step(storage, "s", 1_059.0)["attempts"][0]["state"] == "running"
    assert read_step(storage, "s", 1_061.0)["attempts"][0]["state"] == "lost"


def test_steps_in_a_circle_do_not_hang():
    circle = [{"name": "a", "needs": ["b"]}, {"name": "b", "needs": ["a"]}, {"name": "c", "needs": ["zzz"]}]
    assert {step["name"] for step in in_order(circle)} == {"a", "b", "c"}


def test_needs_that_others_imply_are_not_drawn():
    steps = [
        {"name": "report", "needs": ["evaluate", "prepare", "pretrain"]},
        {"name": "evaluate", "needs": ["prepare", "pretrain"]},
        {"name": "pretrain", "needs": ["prepare"]},
        {"name": "prepare", "needs": []},
        {"name": "items", "needs": ["prepare"]},
    ]
    assert {step["name"]: step["edges"] for step in in_order(steps)} == {
        "prepare": [],
        "pretrain": ["prepare"],
        "items": ["prepare"],
        "evaluate": ["pretrain"],
        "report": ["evaluate"],
    }


def test_overall_state():
    assert overall(["done", "done"]) == "done"
    assert overall(["done", "waiting"]) == "waiting"
    assert overall(["done", "running", "failed"]) == "failed"
    assert overall(["done", "unreadable", "running"]) == "unreadable"


@pytest.mark.parametrize("name", ["", ".", "..", "a/b", "../runs", "a\x00", "x" * 129])
def test_names_that_are_no_folders_are_refused(tmp_path, name):
    for read in (
        lambda s, n: read_workflow(s, n, 0.0),
        lambda s, n: read_step(s, n, 0.0),
        lambda s, n: read_trials(s, n, 0.0),
        lambda s, n: read_log(s, n, 1),
    ):
        with pytest.raises(ConfigError, match="not the name of a workflow or step"):
            read(Storage(str(tmp_path)), name)
