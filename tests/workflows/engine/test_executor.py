"""Failure stays where it belongs, retries end, finished work is reused, and everything is on record."""

from __future__ import annotations

import errno
import json
import os
from contextlib import nullcontext
from pathlib import Path

import pytest
from botocore.exceptions import ClientError, EndpointConnectionError

from lt2.config import ConfigError
from lt2.train.loop import NonFiniteLossError
from lt2_platform import storage_errors
from lt2_platform.step_records import this_process
from lt2_platform.storage import Storage
from lt2_platform.storage_errors import noting
from lt2_workflows.engine import endings, executor, records
from lt2_workflows.engine.executor import run
from lt2_workflows.engine.records import list_workflows, read_done, step_state
from lt2_workflows.graph import Resources, Step
from lt2_workflows.loading import load_workflow
from lt2_workflows.steps import EvaluateStep
from tests.workflows.conftest import FAKE_STEPS


class WorkerGroupError(Exception):
    def __init__(self, failures):
        super().__init__("Training failed due to worker errors: [Rank 0 Error Snippet]: Traceback (most ...")
        self.worker_failures = failures


def test_of_workers_that_failed_the_errors_are_told_and_no_tracebacks():
    wrapped = RuntimeError("traceback")
    wrapped._base_exc = KeyError("mine")  # pyright: ignore[reportAttributeAccessIssue]  as Ray Train has it
    told = endings.said(WorkerGroupError({0: wrapped, 1: wrapped, 2: OSError("gone")}), endings.FAILED)
    assert told == "KeyError: 'mine', OSError: gone"
    assert endings.said(WorkerGroupError({}), endings.FAILED).startswith("WorkerGroupError: Training failed")


def test_training_that_diverged_is_not_tried_again():
    diverged = NonFiniteLossError("step 3: loss nan; rolled back 2 of 2 times")
    assert endings.classify(WorkerGroupError({0: diverged})) == endings.BAD_INPUT
    assert endings.classify(WorkerGroupError({0: RuntimeError("other")})) == endings.FAILED


@pytest.fixture
def storage(tmp_path):
    return Storage(str(tmp_path / "storage"))


def execute(storage, recipe, *overrides, **options):
    """(outcome of each step, events in order)"""
    events = []
    workflow = load_workflow(f"{FAKE_STEPS}:{recipe}", overrides)
    outcomes = run(workflow, storage, say=events.append, ttl_s=3, **options)
    return outcomes, events


def states(outcomes):
    return {name: outcome.state for name, outcome in outcomes.items()}


def kinds(events, step):
    return [event["event"] for event in events if event["step"] == step and event["event"] != "progress"]


def test_a_failure_stops_its_descendants_only(storage):
    outcomes, events = execute(storage, "branches", "left.fail=error")
    assert states(outcomes) == {"root": "done", "left": "failed", "right": "done", "leaf": "blocked"}
    assert outcomes["left"].error == "ValueError: this step fails"
    log = Path(outcomes["left"].log).read_text()
    assert "Traceback" in log
    assert "this step fails" in log
    assert outcomes["leaf"].error == "needs left"
    # Repairing the step is another identity, so only it and what depends on it runs.
    outcomes, _ = execute(storage, "branches")
    assert states(outcomes) == {"root": "skipped", "left": "done", "right": "skipped", "leaf": "done"}


def test_a_step_is_blocked_by_one_failure_while_another_of_its_needs_still_runs(storage):
    both = "leaf.part.sources=[{step: left}, {step: right}]"
    outcomes, _ = execute(storage, "branches", "left.fail=error", "right.pause_s=1", both)
    assert states(outcomes) == {"root": "done", "left": "failed", "right": "done", "leaf": "blocked"}
    assert outcomes["leaf"].error == "needs left"


def test_independent_branches_run_side_by_side(storage):
    slow = ("left.pause_s=2", "right.pause_s=2")  # longer than a process takes to start on a busy machine
    _, events = execute(storage, "branches", *slow)
    order = [(event["step"], event["event"]) for event in events if event["step"] in ("left", "right")]
    first_end = next(index for index, (_, kind) in enumerate(order) if kind == "done")
    assert {step for step, kind in order[:first_end] if kind == "started"} == {"left", "right"}


def test_branches_share_the_cores(storage, monkeypatch):
    monkeypatch.delenv("OMP_NUM_THREADS", raising=False)
    monkeypatch.setenv("LT2_CORES", "6")
    outcomes, _ = execute(storage, "branches")
    logs = {name: Path(outcome.log).read_text() for name, outcome in outcomes.items()}
    found = {name: part for name in logs for part in (6, 3) if f"cores {part}, threads {part}\n" in logs[name]}
    assert found == {"root": 6, "left": 3, "right": 3, "leaf": 3}


def test_a_step_run_alone_has_the_threads_it_has_among_the_others(storage, monkeypatch):
    monkeypatch.delenv("OMP_NUM_THREADS", raising=False)
    monkeypatch.setenv("LT2_CORES", "6")
    execute(storage, "branches", only="root")
    outcomes, _ = execute(storage, "branches", only="left")
    assert "cores 3, threads 3\n" in Path(outcomes["left"].log or "").read_text()


def test_retries_are_capped(storage, tmp_path):
    overrides = ("first.fail=error", f"first.trace={tmp_path}", "first.resources.retries=1")
    outcomes, events = execute(storage, "chain", *overrides)
    assert states(outcomes) == {"first": "failed", "second": "blocked", "third": "blocked"}
    assert outcomes["first"].attempt == 2
    assert kinds(events, "first") == ["started", "retry", "started", "failed"]


def test_a_step_that_fails_once_succeeds(storage, tmp_path):
    overrides = ("first.fail=error", "first.fail_times=1", f"first.trace={tmp_path}")
    outcomes, _ = execute(storage, "chain", *overrides)
    assert states(outcomes) == {"first": "done", "second": "done", "third": "done"}
    assert outcomes["first"].attempt == 2


@pytest.mark.parametrize(("how", "counted"), [("kill", False), ("segfault", True)])
def test_a_killed_process_is_not_the_steps_fault_but_a_crash_is(storage, tmp_path, how, counted):
    overrides = (f"first.fail={how}", "first.fail_times=1", f"first.trace={tmp_path}", "first.resources.retries=0")
    outcomes, _ = execute(storage, "chain", *overrides)
    assert states(outcomes)["first"] == ("failed" if counted else "done")
    if counted:
        assert "Segmentation fault" in Path(outcomes["first"].log).read_text()


def test_bad_input_is_not_retried_and_has_no_noise(storage, tmp_path):
    outcomes, events = execute(storage, "chain", "first.fail=bad_input", f"first.trace={tmp_path}")
    assert states(outcomes)["first"] == "bad_input"
    assert outcomes["first"].error == "the corpus is empty; give a source with text"
    assert kinds(events, "first") == ["started", "failed"]


def test_what_is_recorded(storage):
    execute(storage, "chain")
    execute(storage, "chain")
    workflow = load_workflow(f"{FAKE_STEPS}:chain")
    first = workflow.steps["first"]
    done = read_done(storage, first)
    assert done["attempt"] == 1
    assert done["provenance"]["packages"]["torch"]
    assert storage.read_bytes(f"{first.folder}/attempts/1/log").startswith(b"attempt 1 continues at line 0\n")
    assert storage.read_json(f"{first.folder}/attempts/1/state.json")["state"] == "done"
    assert storage.read_json(f"{first.folder}/spec.json")["fingerprint"] == first.fingerprint
    record = storage.read_json(f"workflows/{workflow.id}/dag.json")
    assert record["steps"] == workflow.record()["steps"]
    (item,) = list_workflows(storage)
    assert [(step["name"], step["state"], step["needs"]) for step in item["steps"]] == [
        ("first", "done", []),
        ("second", "done", ["first"]),
        ("third", "done", ["second"]),
    ]
    histories = storage.glob(f"workflows/{workflow.id}/events/*.jsonl")
    first_run, second_run = ([json.loads(line) for line in storage.read_bytes(h).splitlines()] for h in histories)
    assert kinds(first_run, "third") == ["started", "done"]
    assert kinds(second_run, "third") == ["skipped"]


def test_drift_of_code_and_packages_is_reported(storage):
    execute(storage, "chain")
    first = load_workflow(f"{FAKE_STEPS}:chain").steps["first"]
    done = read_done(storage, first)
    done["provenance"]["packages"]["torch"] = "0.4.1"
    storage.write_json(f"{first.folder}/done.json", done)
    _, events = execute(storage, "chain")
    drift = next(event["drift"] for event in events if event["step"] == "first")
    assert [item for item in drift if item.startswith("torch 0.4.1 -> ")]


def test_one_step_alone(storage):
    with pytest.raises(ConfigError, match="step 'second' needs first, not finished"):
        execute(storage, "chain", only="second")
    with pytest.raises(ConfigError, match="has no step 'fourth'"):
        execute(storage, "chain", only="fourth")
    assert states(execute(storage, "chain", only="first")[0]) == {"first": "done"}
    assert states(execute(storage, "chain", only="second")[0]) == {"second": "done"}
    assert step_state(storage, load_workflow(f"{FAKE_STEPS}:chain").steps["third"].folder)["state"] == "waiting"


def test_a_step_whose_process_vanished_is_shown_as_lost(storage):
    execute(storage, "chain", only="first")
    second = load_workflow(f"{FAKE_STEPS}:chain").steps["second"]
    lease = storage.read_json(load_workflow(f"{FAKE_STEPS}:chain").steps["first"].folder + "/attempts/1/lease.json")
    storage.write_json(f"{second.folder}/attempts/1/lease.json", lease | {"released": False, "time": 1e9})
    storage.write_json(f"{second.folder}/attempts/1/state.json", {"state": "running"})
    assert step_state(storage, second.folder)["state"] == "lost"


ELSEWHERE = {"host": "b", "machine": "b/1/2", "pid": 1, "start": "1", "token": "x", "ttl_s": 30.0, "released": False}


def test_a_slow_clock_elsewhere_is_no_death(storage, monkeypatch):
    """Only silence that was observed lets a step be taken over, however old its lease looks."""
    now = 1_000.0
    monkeypatch.setattr(records.time, "monotonic", lambda: now)
    watch = records.Watch(storage, "steps/a-1")
    for beat in range(4):
        written = records.time.time() - 3_600
        storage.write_json("steps/a-1/attempts/1/lease.json", ELSEWHERE | {"beat": beat, "time": written})
        attempt, holder = watch.holder()
        assert (attempt, holder and holder["beat"]) == (1, beat)
        now += 29
    assert watch.holder()[1] is not None
    now += 2
    assert watch.holder() == (1, None)


@pytest.mark.parametrize(("age", "state"), [(5, "running"), (300, "running"), (400, "lost")])
def test_a_step_elsewhere_is_shown_as_lost_only_when_no_ordinary_clock_explains_it(storage, age, state):
    lease = ELSEWHERE | {"beat": 1, "time": records.time.time() - age}
    storage.write_json("steps/a-1/attempts/1/lease.json", lease)
    storage.write_json("steps/a-1/attempts/1/state.json", {"state": "running"})
    shown = step_state(storage, "steps/a-1")
    assert (shown["state"], shown["ended"]) == (state, lease["time"] if state == "lost" else None)
    here = lease | this_process()  # alive, but silent by our own clock
    storage.write_json("steps/a-1/attempts/1/lease.json", here)
    assert step_state(storage, "steps/a-1")["state"] == ("running" if age < 60 else "lost")
    storage.write_json("steps/a-1/attempts/1/lease.json", here | {"time": records.time.time(), "released": True})
    assert step_state(storage, "steps/a-1")["state"] == "lost"  # its driver released what its process could not


def test_the_lease_of_a_killed_attempt_is_released_by_its_driver(storage, monkeypatch):
    waited: list[float] = []
    monkeypatch.setattr(records.time, "sleep", waited.append)
    lease = records.Lease(storage, "steps/a-1", 1, ttl_s=30, on_lost=print)
    assert lease.acquire()
    lease.stop()
    records.release_for(storage, "steps/a-1", 1)
    assert storage.read_json(lease.path) == lease.holder | {
        "attempt": 1,
        "released": True,
        "time": storage.read_json(lease.path)["time"],
    }
    records.release_for(storage, "steps/a-1", 1)
    assert waited == [records.ORPHAN_GRACE_S]  # once: for the Ray workers of the killed process
    records.release_for(storage, "steps/a-1", 2)  # it never got as far as a lease
    assert not storage.exists("steps/a-1/attempts/2/lease.json")


def test_a_store_that_is_away_for_a_while_ends_no_workflow(storage, monkeypatch, caplog):
    monkeypatch.setattr(storage_errors, "LONGEST_PAUSE_SECONDS", 0.0)
    drive, asked = executor._drive, []

    def driving(driver, step):
        def refused_at_first(question):
            def ask(*of):
                asked.append(of)
                if len(asked) % 2:
                    raise EndpointConnectionError(endpoint_url="http://away")
                return question(*of)

            return ask

        with monkeypatch.context() as away:
            away.setattr(executor, "read_done", refused_at_first(read_done))
            away.setattr(records, "last_attempt", refused_at_first(records.last_attempt))
            return drive(driver, step)

    monkeypatch.setattr(executor, "_drive", driving)
    outcomes, events = execute(storage, "chain", only="first")
    assert states(outcomes) == {"first": "done"}
    assert "retry" not in kinds(events, "first")
    assert len(asked) == 6  # done.json, the newest attempt, and done.json after it: each was refused once
    assert "storage refused (Could not connect" in caplog.text


@pytest.mark.parametrize(("status", "code"), [(503, endings.INFRASTRUCTURE), (500, endings.INFRASTRUCTURE), (403, 1)])
def test_a_store_with_a_trouble_of_its_own_is_no_failure_of_the_step(status, code):
    refused = OSError("said no")  # as s3fs raises it
    refused.__cause__ = ClientError({"Error": {}, "ResponseMetadata": {"HTTPStatusCode": status}}, "GetObject")
    assert endings.classify(refused) == code
    arrows = OSError(f"When reading: AWS Error UNKNOWN (HTTP status {status}) during HeadObject operation: No body.")
    assert endings.classify(arrows) == code


def test_a_full_disk_is_told_with_the_store_that_is_on_it(tmp_path):
    with pytest.raises(OSError, match="No space left") as caught, noting("/disk"):
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
    wrapped = RuntimeError("worker group failed")
    wrapped.__cause__ = caught.value
    told = "storage root /disk cannot be used (No space left on device); choose another with --storage or LT2_STORAGE"
    assert endings.said(wrapped, endings.FAILED) == told
    assert endings.said(RuntimeError("else"), endings.FAILED) == "RuntimeError: else"


def test_an_event_that_storage_refuses_comes_with_the_next(storage, monkeypatch, caplog):
    events = records.Events(storage, "w-1")
    with monkeypatch.context() as full:
        full.setattr(os, "replace", lambda *paths: (_ for _ in ()).throw(OSError(errno.ENOSPC, "No space left")))
        events.add({"event": "retry"})
    assert "No space left" in caplog.text
    assert storage.list("workflows/w-1/events") == []
    events.add({"event": "done"})
    (name,) = storage.list("workflows/w-1/events")
    lines = storage.read_bytes(f"workflows/w-1/events/{name}").decode().splitlines()
    assert [json.loads(line)["event"] for line in lines] == ["retry", "done"]


def test_a_cluster_that_is_gone_is_told_before_anything_is_written(storage, monkeypatch):
    monkeypatch.setenv("RAY_ADDRESS", "10.0.0.1:6379")
    monkeypatch.setattr(executor, "unanswered", lambda address: f"nothing answers at {address}")
    with pytest.raises(ConfigError, match=r"nothing answers at 10\.0\.0\.1"):
        run(load_workflow("quickstart", []), storage, say=lambda event: None)
    assert not os.path.exists(storage.root)


def test_a_ray_is_started_for_steps_that_will_join_one(monkeypatch):
    monkeypatch.delenv("RAY_ADDRESS", raising=False)
    monkeypatch.setattr(executor, "ray_head", lambda num_cpus: nullcontext({"cpus": num_cpus}))
    found = []
    for workers in (1, 9):  # one copy of the model works in the step's own process
        config = EvaluateStep(checkpoint="a", data="b", resources=Resources(num_workers=workers))
        with executor._ray_for([Step("evaluate", config, "0" * 64, ())]) as environment:
            found.append(environment)
    assert found[0] == dict(os.environ)
    assert found[1]["cpus"] >= 9
