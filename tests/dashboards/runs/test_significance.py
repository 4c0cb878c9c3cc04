"""Runs compared item by item on the dashboard: the numbers of `lt2 compare`, at the models' own depth."""

from __future__ import annotations

import json

import pytest

from lt2_platform.evaluate.compare import compare
from lt2_platform.results.store import ResultsStore
from tests.dashboards.conftest import body


def answered(store: ResultsStore, run: str, scores: list[int], depth: str, evaluation: str = "e1") -> str:
    """The samples of an evaluation of `run`; their folder."""
    folder = f"evals/{run}/{evaluation}/harness/{depth}"
    lines = [
        {"task": "piqa", "doc_id": number, "doc_hash": f"h{number}", "scores": {"acc": score}}
        for number, score in enumerate(scores)
    ]
    store.storage.write_bytes(f"{folder}/samples/piqa.jsonl", "\n".join(map(json.dumps, lines)).encode())
    return store.storage.join(folder)


def test_each_run_is_compared_with_the_first_at_its_own_depth(store, client):
    for run, config in (("a", {"model": {"n_loops": 2}}), ("b", {"model": {"n_loops": 4, "halting": {"type": "act"}}})):
        store.create_run(run, {"config": config}).close()
    store.create_run("none", {"config": {}}).close()
    left = answered(store, "a", [1, 0, 0, 0, 0, 0, 0, 1], "loops-2")
    answered(store, "a", [1] * 8, "loops-1", "e2")  # another depth, evaluated later
    right = answered(store, "b", [1, 1, 1, 1, 1, 1, 0, 1], "loops-4-early-exit")
    answered(store, "b", [0] * 8, "loops-4")
    found = body(client.get("/api/significance?runs=a,b,none"))
    assert (list(found["pairs"]), found["skipped"]) == (["b"], [])
    (expected,) = compare(left, right)
    assert found["pairs"]["b"] == {"piqa/acc": {k: v for k, v in expected.items() if k not in ("task", "metric")}}
    assert found["pairs"]["b"]["piqa/acc"]["p_value"] == pytest.approx(2 / 2**5)


def test_what_cannot_be_compared_is_left_out_or_named(store, client):
    for run in ("a", "b", "c"):
        store.create_run(run, {"config": {"n_loops": 2}}).close()
    answered(store, "a", [1, 0], "loops-2")
    answered(store, "b", [1, 0], "loops-8")  # at no depth of its own
    store.storage.write_bytes("evals/c/e1/harness/loops-2/samples/piqa.jsonl", b"{half")
    found = body(client.get("/api/significance?runs=a,b,c"))
    assert found["pairs"] == {}
    assert [line.split(" (")[0] for line in found["skipped"]] == ["the items of c cannot be read"]
    assert body(client.get("/api/significance")) == {"pairs": {}, "skipped": []}
    refused = client.get("/api/significance?runs=a,gone")
    assert (refused.status_code, refused.json()["error"]) == (404, f"no run 'gone' in {store.storage.root}")
    assert client.get("/api/significance?runs=" + ",".join(map(str, range(21)))).status_code == 400
