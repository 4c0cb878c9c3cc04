"""scripts/gpu_check at tiny sizes: the parts run side by side as they would on a card, and failures are reported."""

from __future__ import annotations

import gc
import json
import signal
import subprocess
import sys
import time
import weakref
from concurrent.futures import Future
from importlib.machinery import SourceFileLoader
from importlib.util import module_from_spec, spec_from_loader
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch

from benchmarks.gpu import machine, training
from benchmarks.gpu.parity import finished_by

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
    rows = [json.loads(line) for line in (tmp_path / "report.jsonl").read_text().splitlines()]
    assert {row["part"] for row in rows} == {"machine", "parity", "decode", "training", "learning"}
    measured = [row for row in rows if row["part"] == "training"]
    assert measured == report["parts"]["training"]
    passed = [line for line in run.stdout.splitlines() if line.startswith("passed")]
    assert [line.split()[1] for line in passed] == ["decode:", "parity:", "training:", "learning:"]


def test_a_part_that_outruns_its_limit_is_reported_and_the_next_one_runs(tmp_path):
    run, report = check(tmp_path / "report", "--parts", "training,prefill", "--models", "gdn", "--minutes", "0.005")
    assert run.returncode == 1
    assert set(report["failures"]) == {"training", "prefill"}
    assert report["failures"]["prefill"].startswith("stopped after")


def test_a_check_that_is_ended_leaves_no_part_behind(tmp_path, monkeypatch):
    """A machine that is lent ends what runs too long, and what stayed would keep its card."""
    running = []

    def check(options, parts):
        process = subprocess.Popen(["sleep", "60"], start_new_session=True)
        running.append(process)
        parts["decode"] = SCRIPT.Part("decode", process, 60, 0, 0)
        signal.raise_signal(signal.SIGTERM)

    monkeypatch.setattr(SCRIPT, "check", check)
    monkeypatch.setattr(sys, "argv", ["gpu_check", "--out", str(tmp_path / "report")])
    before = signal.getsignal(signal.SIGTERM)
    try:
        with pytest.raises(SystemExit):
            SCRIPT.main()
    finally:
        signal.signal(signal.SIGTERM, before)
    assert running[0].poll() == -signal.SIGKILL


@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a card")
def test_without_a_card_nothing_is_measured(monkeypatch, capsys):
    (facts,) = machine.part(False, None, 1.0)
    monkeypatch.setattr(SCRIPT, "start", lambda name, options, limit: None)
    monkeypatch.setattr(SCRIPT, "finish", lambda part, out: ([facts], None))
    assert SCRIPT.check(SimpleNamespace(dry_run=False, out="report"), {}) == 1
    assert capsys.readouterr().err == "no CUDA device; --dry-run tries the script without one\n"


def test_the_parts_that_are_left_share_the_time_that_is_left():
    left = ["decode", "parity", "training", "prefill", "learning"]
    shares = {name: SCRIPT.share(name, left, 480, beside=True) for name in left}
    assert round(sum(shares.values())) == 480
    assert shares["decode"] > 130
    assert SCRIPT.share("training", ["training"], 480, beside=False) == 480
    assert SCRIPT.share("parity", ["parity", "prefill"], 190, beside=False) == 140
    # What decode leaves goes to the others.
    assert SCRIPT.share("training", left[2:], 400, beside=True) > shares["training"]


def test_mixers_that_parity_has_not_checked_in_time_are_named():
    done, dead, late = Future(), Future(), Future()
    done.set_result([{"mixer": "gdn", "ok": True}])
    dead.set_exception(RuntimeError("a process died"))
    cases = {done: ("gdn", torch.float32, 9), dead: ("kda", torch.float32, 9), late: ("nsa", torch.bfloat16, 9)}
    rows = {row["mixer"]: row for row in finished_by(time.monotonic(), cases)}
    assert rows["gdn"]["ok"]
    assert rows["kda"] == {"mixer": "kda", "dtype": "float32", "ok": False, "failure": "RuntimeError: a process died"}
    assert rows["nsa"] == {"mixer": "nsa", "dtype": "bfloat16", "skipped": "time"}
    counted = SCRIPT.verdict("parity", list(rows.values()), None)
    assert counted == "FAILED  parity: 1 rows, 1 skipped, 1 failed"


def test_nothing_of_the_training_case_before_is_left():
    """A sharded model is in cycles with its hooks: its weights and moments would count in the next one's peak."""
    before = torch.nn.Linear(2, 2)
    before.register_forward_hook(before.forward)
    gone = weakref.ref(before)
    gc.disable()
    try:
        del before
        training.fresh()
    finally:
        gc.enable()
    assert gone() is None


def test_every_peer_is_beside_a_case_of_ours():
    def place(case):
        return case._replace(implementation="", compile=True)

    for at, case in enumerate(training.CASES):
        ours = [other for other in training.CASES[:at] if other.implementation == "lt2"]
        assert case.implementation == "lt2" or place(case) in map(place, ours)


def test_rows_are_compared_with_the_one_that_differs_in_one_thing():
    rows = [
        {"model": "full", "batch": 1, "tokens_per_s": 2.0},
        {"model": "gdn", "batch": 1, "tokens_per_s": 6.0},
        {"model": "gdn", "batch": 8, "tokens_per_s": 6.0},
        {"model": "full", "batch": 8, "out_of_memory": True},
    ]
    SCRIPT.compare(rows, by="model", base="full", name="over_full")
    assert [row.get("over_full") for row in rows] == [1.0, 3.0, None, None]
