"""A small store with runs of every kind, and the dashboard over it."""

from __future__ import annotations

import json
import math
import time
from pathlib import Path

import pytest
from fastapi.testclient import TestClient

from lt2_dashboards.app import create_app
from lt2_dashboards.auth import Access
from lt2_platform.results.store import ResultsStore
from lt2_platform.storage import Storage

HOSTILE = "<img src=x onerror=alert(1)>"


class Clock:
    def __init__(self, now: float):
        self.now = now

    def __call__(self) -> float:
        return self.now


def layout(mixer: str, ratio: str | None = None) -> dict:
    if ratio is None:
        return {"type": "uniform", "mixer": {"type": mixer}}
    return {
        "type": "hybrid",
        "attention": {"type": "full"},
        "mixer": {"type": mixer},
        "ratio": ratio,
        "pattern": "interleave",
    }


def add_run(
    store: ResultsStore,
    name: str,
    *,
    start: float,
    lr: float = 1e-3,
    steps: int = 50,
    end: str | None = "finished",
    **model,
):
    """Log `steps` steps of a run and close it with state `end` (None: leave it open); returns the writer."""
    config = {"model": {"dim": 64, **model}, "train": {"lr": lr, "steps": 50, "note": HOSTILE}}
    clock = Clock(start)
    writer = store.create_run(name, {"config": config, "git": "abc123"}, clock=clock)
    for step in range(1, steps + 1):
        clock.now += 1
        writer.log(
            step,
            {
                "loss": 2 + 8 / step + lr,
                "grad_norm": 1 / step,
                "lr": lr,
                "tokens_per_s": 1000.0 + step,
                "step_time": 0.1,
            },
        )
    if end is None:
        writer.flush()
    else:
        writer.close({"tokens": steps * 100}, state=end)
    return writer


def fill(root: Path) -> ResultsStore:
    """Four runs: finished with evaluations, failed with NaN and HTML in its settings, live, stalled."""
    store, now = ResultsStore(Storage(str(root))), time.time()
    add_run(store, "full-1", start=now - 4000, layout=layout("full"))
    add_run(store, "hybrid-2", start=now - 3000, lr=2e-3, layout=layout("gdn", "1:4"))
    writer = add_run(store, "gdn-3", start=now - 2000, steps=10, end=None, layout=layout("gdn"))
    writer.log(11, {"loss": math.nan, "grad_norm": math.inf})
    writer.close(state="failed")
    add_run(store, "live-4", start=now - 30, steps=20, end=None, layout=layout("gdn"))
    add_run(store, "stalled-5", start=now - 1000, steps=5, end=None, layout=layout("gdn"))
    tasks = ("arc_easy", "arc_challenge", "hellaswag", "piqa", "winogrande", "openbookqa", "sciq", "boolq")
    store.log_eval("full-1", "validation", [{"metric": "perplexity", "value": 11.0, "step": 50}])
    store.log_eval("hybrid-2", "validation", [{"metric": "perplexity", "value": 10.0, "step": 50}])
    store.log_eval("hybrid-2", "downstream", [{"task": task, "metric": "acc,none", "value": 0.5} for task in tasks])
    store.log_eval("hybrid-2", "downstream", [{"task": "hellaswag", "metric": "acc_norm,none", "value": 0.6}])
    return store


def fill_workflow(storage: Storage) -> None:
    """A workflow of four steps: done, failed at its third attempt, running, waiting."""
    needs = {"prepare": [], "full": ["prepare"], "hybrid-2": ["prepare"], "report": ["full", "hybrid-2"]}
    ids = {name: name if name == "hybrid-2" else f"{name}-00000000" for name in needs}
    now = time.time()
    storage.write_json("workflows/demo-1/dag.json", {"workflow": "demo", "id": "demo-1", "ids": ids, "steps": {}})
    for name, wanted in needs.items():
        spec = {"name": name, "config": {"type": "x", "note": HOSTILE}, "needs": {need: ids[need] for need in wanted}}
        storage.write_json(f"steps/{ids[name]}/spec.json", spec)
    attempt(storage, ids["prepare"], 1, "done", now - 100)
    storage.write_json(f"steps/{ids['prepare']}/done.json", {"attempt": 1, "ended": now - 50, "result": {"tokens": 5}})
    attempt(storage, ids["full"], 1, "infrastructure", now - 90)
    attempt(storage, ids["full"], 2, "failed", now - 80, error="ValueError: lr is negative; use a positive one")
    attempt(storage, ids["hybrid-2"], 1, "running", now - 70, beat=now)


def attempt(
    storage: Storage,
    step: str,
    number: int,
    state: str,
    started: float,
    *,
    error: str | None = None,
    beat: float = 0.0,
    holder: dict | None = None,
) -> None:
    folder = f"steps/{step}/attempts/{number}"
    ended = None if state == "running" else started + 10
    record = {"state": state, "started": started, "ended": ended, "error": error, "provenance": {"git": "f" * 40}}
    storage.write_json(f"{folder}/state.json", record)
    lease = {"host": "node-1", "pid": 7, "beat": 1, "time": beat, "ttl_s": 30.0, "released": ended is not None}
    storage.write_json(f"{folder}/lease.json", lease | (holder or {}))
    log = f"\x1b[32mattempt {number} of {step}\x1b[0m\nloss 9\rloss 1\n{HOSTILE}\n"
    storage.write_bytes(f"{folder}/log", log.encode() + b"\xff\n")


def fill_sweep(storage: Storage, trials: int, *, failed: int) -> None:
    """A workflow "swept-1" of one sweep step, and its trials: the last `failed` failed, the others are done."""
    now = time.time()
    dag = {"workflow": "swept", "ids": {"sweep": "sweep-00000000"}}
    storage.write_json("workflows/swept-1/dag.json", dag)
    spec = {"name": "sweep", "config": {"type": "sweep"}, "needs": {}}
    storage.write_json("steps/sweep-00000000/spec.json", spec)
    attempt(storage, "sweep-00000000", 1, "running", now - 500, beat=now)
    for number in range(trials):
        step = f"pretrain-{number:08d}"
        dag = {"workflow": f"swept-{number}", "ids": {"pretrain": step}, "part_of": "sweep-00000000"}
        storage.write_json(f"workflows/swept-trial-{number}/dag.json", dag)
        storage.write_json(f"steps/{step}/spec.json", {"name": "pretrain", "config": {}, "needs": {}})
        if number >= trials - failed:
            attempt(storage, step, 1, "failed", now - 100, error=f"trial {number} ran out of memory")
        else:
            storage.write_json(f"steps/{step}/done.json", {"attempt": 1, "ended": now - 50, "result": {}})


@pytest.fixture(scope="module")
def root(tmp_path_factory) -> Path:
    path = tmp_path_factory.mktemp("store")
    fill(path)
    fill_workflow(Storage(str(path)))
    return path


@pytest.fixture(scope="module")
def client(root):
    """An HTTP client of a dashboard that asks nobody who they are."""
    return TestClient(create_app(str(root), Access("none")), base_url="http://127.0.0.1:8787")


def body(response) -> dict:
    assert response.status_code == 200, response.text
    return json.loads(response.content)
