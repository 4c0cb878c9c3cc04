"""The page of one run: which workflow it is of, what happened to it, why it does not go on and when it will be done."""

from __future__ import annotations

import time

from lt2_dashboards import queries
from lt2_platform.results.index import compact
from lt2_platform.step_records import this_process
from tests.dashboards.conftest import Clock, add_run, attempt, body


def test_runs_are_found_by_their_workflow(store, client):
    add_run(store, "pretrain-1", start=time.time(), lr=1e-3)
    for name, workflow in (("pretrain-2", "quickstart-5bc43cf6"), ("pretrain-3", "sweep_ratio-1-4-00000000")):
        # A config may say anything: only the provenance tells of which workflow a run is.
        info = {"workflow": workflow, "step": name, "config": {"info": "workflow", "train": {"steps": 5}}}
        store.create_run(name, info).close()
    rows = {row["run"]: row["workflow"] for row in body(client.get("/api/runs"))["rows"]}
    assert rows == {"pretrain-1": None, "pretrain-2": "quickstart-5bc43cf6", "pretrain-3": "sweep_ratio-1-4-00000000"}
    for q, found in (
        ("quickstart", {"pretrain-2"}),
        ("workflow~SWEEP_", {"pretrain-3"}),
        ("workflow=quickstart-5bc43cf6", {"pretrain-2"}),
        ("workflow!=quickstart-5bc43cf6", {"pretrain-1", "pretrain-3"}),
        ("workflow=", {"pretrain-1"}),
    ):
        assert {row["run"] for row in body(client.get("/api/runs", params={"q": q}))["rows"]} == found, q
    sorted_by = [row["run"] for row in body(client.get("/api/runs?sort=workflow"))["rows"]]
    assert sorted_by[:2] == ["pretrain-2", "pretrain-3"]
    assert body(client.get("/api/runs/pretrain-2"))["workflow"] == "quickstart-5bc43cf6"


def test_settings_with_several_values_come_before_those_that_some_runs_lack(store, client):
    for name, config in (("a", {"lr": 1, "act": "relu"}), ("b", {"lr": 2}), ("c", {"lr": 3, "act": "relu"})):
        store.create_run(name, {"config": config}).close()
    assert body(client.get("/api/runs"))["varying"] == ["lr", "act"]


def test_what_runs_are_of_comes_before_the_settings_that_only_some_kinds_have(store, client):
    mixers = ({"type": "gdn", "expand": 1}, {"type": "gla", "expand": 2}, {"type": "nsa", "block": 8})
    for index, mixer in enumerate(mixers):
        store.create_run(f"r{index}", {"config": {"hidden": 60 + index, "mixer": mixer}}).close()
    assert body(client.get("/api/runs"))["varying"] == ["mixer.type", "hidden", "mixer.expand", "mixer.block"]


def test_a_status_can_be_asked_for_as_the_page_calls_it(store, client):
    add_run(store, "live", start=time.time() - 30, steps=3, end=None)
    add_run(store, "done", start=time.time() - 30, steps=3)
    assert [row["run"] for row in body(client.get("/api/runs?q=status=live"))["rows"]] == ["live"]


def test_what_happened_to_a_run_newest_first_and_damaged_events_named(store, client):
    add_run(store, "r", start=time.time())
    store.log_event("r", "rollback", {"step": 7, "position": 56, "to": "step-5", "message": "step 7: loss nan"})
    store.log_event("r", "preemption", {"message": "the node goes away"})
    store.storage.write_bytes("runs/r/events/0-rollback-aa.json", b"{")
    found = body(client.get("/api/runs/r"))
    assert [event["kind"] for event in found["events"]] == ["preemption", "rollback"]
    assert (found["events"][1]["step"], found["events"][1]["to"]) == (7, "step-5")
    assert len(found["skipped"]) == 1
    assert "0-rollback-aa.json" in found["skipped"][0]


def test_a_run_says_what_its_newest_attempt_says(store, client):
    add_run(store, "r", start=time.time() - 20, steps=5, end=None)  # cut off: the run itself still says "running"
    assert body(client.get("/api/runs/r"))["attempt"] is None
    store.storage.write_json("steps/r/spec.json", {"name": "pretrain", "config": {}, "needs": {}})
    attempt(store.storage, "r", 1, "infrastructure", time.time() - 20)
    attempt(store.storage, "r", 2, "interrupted", time.time() - 10, error="interrupted at step 5")
    found = body(client.get("/api/runs/r"))
    assert found["status"] == "running"
    assert (found["attempt"]["state"], found["attempt"]["attempt"]) == ("interrupted", 2)
    assert found["attempt"]["error"] == "interrupted at step 5"


def test_a_run_whose_attempt_has_ended_is_live_for_a_minute_at_most(store, client):
    now = time.time()
    for run, silent in (("lost", 90), ("cut", 90), ("busy", 90), ("fresh", 30), ("other", 90)):
        add_run(store, run, start=now - silent - 5, steps=5, end=None)
    attempt(store.storage, "lost", 1, "running", now - 100, beat=now - 90, holder=this_process())
    attempt(store.storage, "cut", 1, "interrupted", now - 100)
    attempt(store.storage, "busy", 1, "interrupted", now - 200)
    attempt(store.storage, "busy", 2, "running", now - 100, beat=now)
    attempt(store.storage, "fresh", 1, "interrupted", now - 100)
    page = body(client.get("/api/runs"))
    states = {"lost": "stalled", "cut": "stalled", "busy": "running", "fresh": "running", "other": "running"}
    assert {row["run"]: row["status"] for row in page["rows"]} == states
    assert page["counts"] == {"stalled": 2, "running": 3}
    assert {row["run"] for row in body(client.get("/api/runs?status=stalled"))["rows"]} == {"lost", "cut"}
    found = body(client.get("/api/compare", params={"runs": ",".join(states)}))
    assert {run["run"]: run["status"] for run in found["runs"]} == states
    assert body(client.get("/api/runs/cut"))["status"] == "stalled"
    asked = {"q": "status=stalled", "metric": "loss"}
    assert {row[0] for row in body(client.get("/api/figures/sweep", params=asked))["rows"]} == {"lost", "cut"}


def test_what_remains_is_reckoned_from_the_last_steps(store, client):
    add_run(store, "other", start=time.time(), steps=0, end=None)
    clock = Clock(time.time() - 9000)  # a run that stood still for hours between its attempts
    writer = store.create_run("r", {"config": {"train": {"steps": 100}}}, clock=clock)
    for step in range(1, 41):
        writer.log(step, {"loss": 1.0, "step_time": 30.0 if step < 10 else 2.0})
    writer.flush()
    assert body(client.get("/api/runs/r"))["seconds_per_step"] == 2.0
    assert body(client.get("/api/runs/other"))["seconds_per_step"] is None


def test_a_model_from_elsewhere_has_a_page_and_can_be_compared(store, client):
    add_run(store, "ours", start=time.time())
    store.create_run("step", {"config": {"evaluated": "folder"}}).close()  # of a recipe that evaluated a folder
    store.create_run("base", {"config": {"model": {"dim": 8}, "imported": {"folder": "hub"}}}).close()
    for run, value in (("ours", 0.5), ("eval-SmolLM-1234", 0.75)):
        store.log_eval(run, "validation", [{"task": "piqa", "metric": "acc", "value": value}])
    found = body(client.get("/api/runs/eval-SmolLM-1234"))
    assert (found["status"], found["created"], found["metrics"], found["config"]) == ("evaluated", 0.0, [], {})
    assert found["evals"][0]["value"] == 0.75
    compared = body(client.get("/api/compare?runs=eval-SmolLM-1234,ours"))
    assert [run["run"] for run in compared["runs"]] == ["eval-SmolLM-1234", "ours"]
    assert compared["evals"][0]["values"] == [0.75, 0.5]
    assert (compared["differs"], compared["same"]["train.lr"], compared["elsewhere"]) == ([], "0.001", 1)
    assert body(client.get("/api/significance?runs=ours,eval-SmolLM-1234"))["pairs"] == {}
    assert client.get("/api/runs/eval-other").status_code == 404
    assert [
        body(client.get(f"/api/compare?runs={runs}"))["differs"] for runs in ("step,ours", "step", "base,ours")
    ] == [[]] * 3


def test_compared_results_begin_with_what_the_models_are(store, client):
    add_run(store, "r", start=time.time())
    for name in ("depth", "sweep", "validation"):
        store.log_eval("r", name, [{"task": "perplexity", "metric": "loss", "value": 1.0}])
    store.log_eval("r", "downstream", [{"task": "piqa", "metric": "acc", "value": 1.0}])
    names = [row["key"].partition("/")[0] for row in body(client.get("/api/compare?runs=r"))["evals"]]
    assert names == ["downstream", "validation", "depth", "sweep"]


def test_results_at_several_depths_stand_beside_each_other(store, client):
    add_run(store, "r", start=time.time())
    place = {"task": "copa", "metric": "acc", "stderr": 0.25}
    depths = ({"n_loops": 4}, {"n_loops": 1}, {"n_loops": 4, "early_exit": True, "exit_threshold": 0.5})
    store.log_eval("r", "depth", [place | depth | {"value": 0.5} for depth in depths])
    store.log_eval("r", "depth", [place | {"n_loops": 1, "value": 0.75}])  # evaluated again
    store.log_eval("r", "depth", [{"task": "piqa", "metric": "acc", "n_loops": 1, "value": 1.0}])
    store.log_eval("r", "validation", [place | {"value": 0.5}])
    found = body(client.get("/api/runs/r"))
    assert [row["name"] for row in found["evals"]] == ["validation"]
    assert found["depths"]["depths"] == ["1 loop", "4 loops", "4 loops, early exit at 0.5"]
    copa, piqa = found["depths"]["rows"]
    assert (copa["task"], copa["metric"], [row["value"] for row in copa["at"]]) == ("copa", "acc", [0.75, 0.5, 0.5])
    assert (piqa["at"][0]["value"], piqa["at"][1:]) == (1.0, [None, None])


def test_a_setting_that_is_null_in_one_run_and_missing_in_another_does_not_differ(store, client):
    store.create_run("plain", {"config": {"model": {"dim": 8}}}).close()
    store.create_run("halting", {"config": {"model": {"dim": 8, "halting": None}}}).close()
    for runs in ("plain,halting", "halting,plain"):
        compared = body(client.get(f"/api/compare?runs={runs}"))
        assert (compared["differs"], compared["same"]) == ([], {"model.dim": "8", "model.halting": "null"})


def test_notes_are_with_their_run_and_are_no_results(store, client, monkeypatch):
    monkeypatch.setattr(queries, "FRESH_SECONDS", 0.0)
    for name in ("r", "other"):
        add_run(store, name, start=time.time())
    store.log_note("r", "diverged\u2028 after <b>80k</b> 🙂", "ada")
    store.log_note("r", "Resumed with half the lr", "bob")
    store.log_note("elsewhere", "of a run that the store does not have", "ada")
    for _ in range(2):
        page = body(client.get("/api/runs"))
        assert {row["run"]: row["note"] for row in page["rows"]} == {"r": "Resumed with half the lr", "other": ""}
        assert not any("note" in metric for metric in page["metrics"])
        found = body(client.get("/api/runs/r"))
        assert [(note["note"], note["author"]) for note in found["notes"]] == [
            ("Resumed with half the lr", "bob"),
            ("diverged\u2028 after <b>80k</b> 🙂", "ada"),
        ]
        assert found["evals"] == []
        for q, names in (("HALF", ["r"]), ("note~resumed", ["r"]), ("note=", ["other"]), ("diverged", [])):
            assert [row["run"] for row in body(client.get("/api/runs", params={"q": q}))["rows"]] == names
        assert client.get("/api/runs/elsewhere").status_code == 404
        compact(store.storage)  # and the same from the tables of the index
    assert [row["run"] for row in body(client.get("/api/runs?sort=-note"))["rows"]] == ["r", "other"]
    store.log_note("r", "", "ada")
    store.log_note("other", "new", "ada")
    assert {row["run"]: row["note"] for row in body(client.get("/api/runs"))["rows"]} == {"r": "", "other": "new"}
    assert body(client.get("/api/runs/r"))["notes"] == []


def test_what_has_curves_is_told_apart_from_results(store, client):
    add_run(store, "r", start=time.time())
    store.log_eval("r", "validation", [{"metric": "loss", "value": 2.0}])
    page = body(client.get("/api/runs"))
    assert "validation/loss" in page["metrics"]
    assert set(page["logged"]) == {"loss", "grad_norm", "lr", "tokens_per_s", "step_time"}
