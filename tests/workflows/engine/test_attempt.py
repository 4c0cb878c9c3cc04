"""The process of an attempt, by itself: what it says when it cannot even begin."""

from __future__ import annotations

import json
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

from lt2_workflows.engine.attempt import BAD_INPUT, FAILED


def attempted(root: Path, record: dict[str, Any]) -> tuple[int, list[dict[str, Any]], str]:
    """(exit code, events, stderr), with stdin held open as a driver does."""
    job = {"record": record, "storage": str(root), "step": "prepare", "attempt": 1, "ttl_s": 30.0}
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
