"""scripts/gpu_check at tiny sizes: the parts run side by side as they would on a card, and failures are reported."""

from __future__ import annotations

import json
import subprocess
import sys
from importlib.machinery import SourceFileLoader
from importlib.util import module_from_spec, spec_from_loader
from pathlib import Path

ROOT = Path(__file__).parents[1]
LOADER = SourceFileLoader("gpu_check", str(ROOT / "scripts/gpu_check"))
SCRIPT = module_from_spec(spec_from_loader("gpu_check", LOADER))
LOADER.exec_module(SCRIPT)


def check(out: Path, *arguments: str) -> tuple[subprocess.CompletedProcess[str], dict]:
    command = [sys.executable, str(ROOT / "scripts/gpu_check"), "--dry-run", "--out", str(out), *arguments]
    run = subprocess.run(command, cwd=out.parent, capture_output=True, text=True, check=False)
    return run, json.loads(out.with_suffix(".json").read_text())


def test_parts_run_side_by_side_and_their_rows_are_kept(tmp_path):
    run, report = check(tmp_path / "report", "--parts", "parity,decode,training,learning", "--models", "gdn")
    assert run.returncode == 0, run.stdout + run.stderr
    assert report["failures"] == {}
    assert {row["mixer"] for row in report["parts"]["parity"]} == {"gdn"}
    assert all(row["ok"] for row in report["parts"]["parity"])
    decoded = report["parts"]["decode"]
    assert {(row["batch"], row["context"]) for row in decoded} == {(1, 16), (1, 64), (8, 16), (8, 64)}
    assert all(row["over_default"] > 0 for row in decoded if row["batch"] == 1)
    assert report["parts"]["training"][0]["tokens_per_s"] > 0
    learned = {(row["task"], row["n_loops"]) for row in report["parts"]["learning"]}
    assert learned == {(task, n_loops) for task in ("language", "state_recall") for n_loops in (1, 4)}
    assert "## decode" in (tmp_path / "report.md").read_text()


def test_a_part_that_outruns_its_limit_is_reported_and_the_next_one_runs(tmp_path):
    run, report = check(tmp_path / "report", "--parts", "training,prefill", "--models", "gdn", "--minutes", "0.005")
    assert run.returncode == 1
    assert set(report["failures"]) == {"training", "prefill"}
    assert report["failures"]["prefill"].startswith("stopped after")


def test_the_chosen_parts_share_the_minutes():
    whole = SCRIPT.limits(list(SCRIPT.PARTS), 8)
    assert sum(whole.values()) - whole["parity"] <= 480  # parity runs beside decode
    assert SCRIPT.limits(["training"], 8) == {"training": 480}
    assert SCRIPT.limits(["parity", "decode"], 2) == {"parity": 120, "decode": 120}
    assert SCRIPT.limits(["training", "learning"], 9) == {"training": 360, "learning": 180}


def test_rows_are_compared_with_the_one_that_differs_in_one_thing():
    rows = [
        {"model": "full", "batch": 1, "tokens_per_s": 2.0},
        {"model": "gdn", "batch": 1, "tokens_per_s": 6.0},
        {"model": "gdn", "batch": 8, "tokens_per_s": 6.0},
        {"model": "full", "batch": 8, "out_of_memory": True},
    ]
    SCRIPT.compare(rows, by="model", base="full", name="over_full")
    assert [row.get("over_full") for row in rows] == [1.0, 3.0, None, None]
