"""The process of an attempt, by itself: what it says when it cannot even begin."""

from __future__ import annotations

import json
import signal
import subprocess
import sys
import time
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from botocore.exceptions import EndpointConnectionError

from lt2_platform import storage_errors
from lt2_platform.fence import FENCE
from lt2_platform.storage import Storage
from lt2_workflows.engine import attempt, records
from lt2_workflows.engine.attempt import _work
from lt2_workflows.engine.context import StepContext
from lt2_workflows.engine.endings import BAD_INPUT, DONE, FAILED
from lt2_workflows.graph import STEP_TYPES
from lt2_workflows.loading import load_workflow
from tests.workflows.conftest import FAKE_STEPS


def attempted(root: Path, record: dict[str, Any], step: str = "prepare") -> tuple[int, list[dict[str, Any]], str]:
    """(exit code, events, stderr), with stdin held open as a driver does."""
    job = {"record": record, "storage": str(root), "step": step, "attempt": 1, "ttl_s": 30.0}
    child = subprocess.Popen(
        [sys.executable, "-m", "lt2_workflows.engine.attempt"],
        stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True,
    )  # fmt: skip
    assert child.stdin is not None
    assert child.stdout is not None
    assert child.stderr is not None
    child.stdin.write(json.dumps(job) + "\n")
    child.stdin.flush()
    events, errors = [json.loads(line) for line in child.stdout], child.stderr.read()
    code = child.wait(60)
    child.stdin.close()
    return code, events, errors


def test_a_record_that_is_refused_is_the_users_mistake_and_said(tmp_path):
    record = {"workflow": "w", "recipe_file": None, "steps": {"prepare": {"type": "prepare", "seq_len": "long"}}}
    code, events, errors = attempted(tmp_path, record)
    assert code == BAD_INPUT
    assert [event["event"] for event in events] == ["failed"]
    assert "prepare.seq_len" in events[0]["error"]
    assert "Fatal" not in errors


def test_a_recipe_that_raises_ends_with_its_traceback_not_with_an_abort(tmp_path):
    recipe = tmp_path / "recipe.py"
    recipe.write_text("raise RuntimeError('broken')")
    code, events, errors = attempted(tmp_path, {"workflow": "w", "recipe_file": str(recipe), "steps": {}})
    assert (code, events) == (FAILED, [])
    assert "RuntimeError: broken" in errors
    assert "Fatal" not in errors


def test_what_a_recipe_prints_while_it_is_imported_is_no_event(tmp_path):
    recipe = tmp_path / "recipe.py"
    recipe.write_text("print('hello', flush=True)")
    code, events, errors = attempted(tmp_path, {"workflow": "w", "recipe_file": str(recipe), "steps": {}})
    assert (code, [event["event"] for event in events]) == (BAD_INPUT, ["failed"])
    assert "hello" in errors


def test_a_deletion_that_was_cut_off_is_ended_before_the_step_begins(tmp_path):
    """Or what is left of the old output would be gone on with (`lt2_workflows.engine.hold`)."""
    workflow, storage = load_workflow(f"{FAKE_STEPS}:chain", []), Storage(str(tmp_path))
    folder = workflow.steps["first"].folder
    storage.write_bytes(f"{folder}/out/lines", b"of before")
    storage.write_json(f"{folder}/incomplete.json", {})
    code, _, errors = attempted(tmp_path, workflow.record(), "first")
    assert code == DONE, errors
    assert storage.read_bytes(f"{folder}/out/lines").decode().splitlines() == ["line 0", "line 1", "line 2"]
    assert not storage.exists(f"{folder}/incomplete.json")


def worked(root, monkeypatch, step):
    """What `_work` makes of a step's function."""
    workflow = load_workflow(f"{FAKE_STEPS}:chain", [])
    monkeypatch.setitem(STEP_TYPES, "write", replace(STEP_TYPES["write"], run=step))
    return _work(StepContext(Storage(str(root)), workflow, workflow.steps["first"], lambda values: None))


@pytest.mark.parametrize(
    ("returned", "reason"),
    [
        (None, "returned None (it is not a dict)"),
        ([1], "returned [1] (it is not a dict)"),
        ({"x": np.float32(2)}, "Object of type float32 is not JSON serializable"),
    ],
)
def test_a_result_that_no_record_can_hold_is_the_steps_mistake(tmp_path, monkeypatch, returned, reason):
    code, error, _ = worked(tmp_path, monkeypatch, lambda config, context: returned)
    assert code == BAD_INPUT
    assert error is not None
    assert error.startswith("step 'first' returned ")
    assert reason in error
    assert error.endswith("return a dict of plain values")


def test_a_step_that_exits_has_failed(tmp_path, monkeypatch, capsys):
    code, error, _ = worked(tmp_path, monkeypatch, lambda config, context: sys.exit(0))
    assert (code, error) == (FAILED, "SystemExit: 0")
    assert "sys.exit(0)" in capsys.readouterr().err  # where from


def test_a_store_that_is_away_as_an_attempt_begins_and_ends_costs_no_attempt(tmp_path, monkeypatch):
    monkeypatch.setattr(storage_errors, "LONGEST_PAUSE_SECONDS", 0.0)
    monkeypatch.setenv(FENCE, "")  # which the attempt sets: it is not to stay
    for name, instead in {
        "capture_output": lambda *of: lambda: None,
        "_ignore_signals": list,
        "leave_ray": list,
    }.items():
        monkeypatch.setattr(attempt, name, instead)
    asked = []

    def refused_at_first(question):
        def ask(*of):
            asked.append(question.__name__)
            if asked.count(question.__name__) == 1:
                raise EndpointConnectionError(endpoint_url="http://away")
            return question(*of)

        return ask

    monkeypatch.setattr(attempt, "read_done", refused_at_first(records.read_done))
    monkeypatch.setattr(records.Lease, "stop", refused_at_first(records.Lease.stop))
    workflow, storage = load_workflow(f"{FAKE_STEPS}:chain", []), Storage(str(tmp_path))
    events: list[dict[str, Any]] = []
    assert attempt.run_attempt(storage, workflow, "first", 1, 30.0, events.append) == DONE
    assert records.read_done(storage, workflow.steps["first"])
    assert records.read_record(storage, records.lease_path(workflow.steps["first"].folder, 1))["released"]
    assert asked == ["read_done"] * 2 + ["stop"] * 2


def test_last_words_that_take_too_long_are_not_waited_for():
    code = "import time; from lt2_workflows.engine.output import end_process as end"
    began = time.monotonic()
    child = subprocess.run(
        [sys.executable, "-c", f"{code}\nend('over', lambda: time.sleep(100), 0.2)"], stderr=subprocess.PIPE, text=True
    )
    assert time.monotonic() - began < 60
    assert (child.returncode, child.stderr) == (-signal.SIGKILL, "lt2: attempt ended: over\n")
    child = subprocess.run(
        [sys.executable, "-c", f"{code}\nend('over', lambda: 1 / 0, 100)"], stderr=subprocess.PIPE, text=True
    )
    assert (child.returncode, child.stderr) == (-signal.SIGKILL, "lt2: attempt ended: over\n")
