"""scripts/gpu_check at tiny sizes: the parts run side by side as they would on a card, and failures are reported."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).parents[1]


def check(out: Path, *arguments: str) -> tuple[subprocess.CompletedProcess[str], dict]:
    command = [sys.executable, str(ROOT / "scripts/gpu_check"), "--dry-run", "--out", str(out), *arguments]
    run = subprocess.run(command, cwd=out.parent, capture_output=True, text=True, check=False)
    return run, json.loads(out.with_suffix(".json").read_text())


def test_parts_run_side_by_side_and_their_rows_are_kept(tmp_path):
    run, report = check(tmp_path / "report", "--parts", "parity,decode,training", "--models", "gdn")
    assert run.returncode == 0, run.stdout + run.stderr
    assert report["failures"] == {}
    assert {row["mixer"] for row in report["parts"]["parity"]} == {"gdn"}
    assert all(row["ok"] for row in report["parts"]["parity"])
    assert [(row["batch"], row["context"]) for row in report["parts"]["decode"]] == [(1, 16), (1, 64), (8, 16), (8, 64)]
    assert report["parts"]["training"][0]["tokens_per_s"] > 0
    assert "## decode" in (tmp_path / "report.md").read_text()


def test_a_part_that_outruns_its_limit_is_reported_and_the_next_one_runs(tmp_path):
    run, report = check(tmp_path / "report", "--parts", "training,prefill", "--models", "gdn", "--seconds", "0.1")
    assert run.returncode == 1
    assert set(report["failures"]) == {"training", "prefill"}
    assert report["failures"]["prefill"].startswith("stopped after")
