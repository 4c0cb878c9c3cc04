"""The whole paper, small, as a user runs it: every stage for real, from text to the report."""

from __future__ import annotations

import subprocess
import sys

import pytest

from lt2_platform.storage import Storage
from lt2_workflows.engine.records import list_workflows
from tests.workflows.conftest import as_at_a_terminal

pytestmark = [pytest.mark.ray, pytest.mark.timeout(1800)]


def test_every_stage_runs_and_is_reported(tmp_path):
    command = [sys.executable, "-m", "lt2_workflows.cli", "run", "paper_end_to_end_small", "--storage", str(tmp_path)]
    # Ray reads ahead for the first training; its processes for all five would show no more.
    later = ("extend", "align", "distill", "long-context")
    direct = [f"{step}.resources.data_reader=direct" for step in later]
    command += [part for item in direct for part in ("--set", item)]
    finished = subprocess.run(command, env=as_at_a_terminal(), capture_output=True, text=True, timeout=1700)
    assert finished.returncode == 0, finished.stdout + finished.stderr
    storage = Storage(str(tmp_path))
    (workflow,) = list_workflows(storage)
    states = {step["name"]: step["state"] for step in workflow["steps"]}
    assert set(states.values()) == {"done"}, states
    results = {step["name"]: storage.read_json(f"steps/{step['id']}/done.json")["result"] for step in workflow["steps"]}
    # The student keeps the one layer that was chosen, through both stages, and is compared with its teacher.
    (kept,) = results["select"]["kept"]
    assert results["distill"]["kept"] == results["long-context"]["kept"] == [kept]
    tasks = {row["task"] for row in results["evaluate-long-context"]["rows"]}
    assert tasks >= {"perplexity", "continuation"}
    assert "LT2-hybrid, long context" in finished.stdout
    (step,) = (step for step in workflow["steps"] if step["name"] == "report")
    out = tmp_path / "steps" / step["id"] / "out"
    text = (out / "report.md").read_text()
    assert all(f"## {name}\n" in text for name in states if name != "report")
    assert results["retention"]["text"].strip("\n") in text
    assert "<svg" in (out / "report.html").read_text()
    assert str(out / "report.html") in finished.stdout
