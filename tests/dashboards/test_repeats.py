"""Of a run that was evaluated more than once, the same result counts everywhere."""

from __future__ import annotations

import itertools
import json
import math

import duckdb
import pytest
from fastapi.testclient import TestClient

from lt2_dashboards.app import create_app
from lt2_dashboards.auth import Access
from lt2_dashboards.figures.parts.store import evaluated
from lt2_dashboards.queries import Source
from lt2_platform.evaluate.repeats import STANDING_SQL, standing
from lt2_platform.results.index import compact
from lt2_platform.results.store import ResultsStore
from lt2_platform.storage import Storage

from .conftest import body


def test_of_a_repeated_evaluation_the_last_counts(tmp_path):
    store = ResultsStore(Storage(str(tmp_path)))
    store.create_run("r", {"config": {}}).close()
    for value in (3.0, 2.0, 2.5):
        store.log_eval("r", "validation", [{"metric": "perplexity", "value": value}])
    store.log_eval("r", "depth", [{"metric": "perplexity", "value": n + 1.0, "n_loops": n} for n in (1, 8)])
    compact(store.storage)
    client = TestClient(create_app(str(tmp_path), Access("none")), base_url="http://localhost")
    found = body(client.get("/api/runs"))
    depths = {"depth/perplexity/1 loop": 2.0, "depth/perplexity/8 loops": 9.0}
    assert found["rows"][0]["numbers"] == {"validation/perplexity": 2.5, **depths}
    assert found["metrics"][0] == "validation/perplexity"  # what the model is comes before its other depths


@pytest.mark.parametrize("compacted", [False, True])
def test_neither_a_quick_look_nor_an_older_checkpoint_replaces_full_results(tmp_path, compacted):
    store = ResultsStore(Storage(str(tmp_path)))
    store.create_run("r", {"config": {}}).close()
    whole = {"task": "arc_easy", "metric": "acc", "value": 0.6, "step": 900, "n": 2376, "limit": None}
    for changed in ({"step": 100}, {}, {"n": 10, "limit": 10}, {"step": 100, "n": 10, "limit": 10}, {"step": 100}):
        store.log_eval("r", "validation", [whole | {"value": 0.1} | changed if changed else whole])
    if compacted:
        compact(store.storage)
    client = TestClient(create_app(str(tmp_path), Access("none")), base_url="http://localhost")
    assert body(client.get("/api/runs"))["rows"][0]["numbers"] == {"validation/arc_easy/acc": 0.6}
    (found,) = evaluated(Source(str(tmp_path)).snapshot())
    assert found.scores == {("arc_easy", "acc"): 0.6}
    compared = body(client.get("/api/compare?runs=r"))["evals"]
    assert compared == [
        {"key": "validation/arc_easy/acc", "values": [0.6], "errors": [None], "items": [2376], "data": [None]}
    ]


def test_sql_and_python_agree_on_which_result_stands_higher():
    values = {"step": (None, 3, 20), "n": (None, 5, 40.0, math.nan, True), "limit": (None, 5), "more": ('"n": 7',)}
    rows = [dict(zip(values, each)) for each in itertools.product(*values.values())]
    rows += [{key: value for key, value in row.items() if key != "limit" and value is not None} for row in rows]
    table = duckdb.connect().execute("CREATE TABLE evals (row VARCHAR)")
    table.executemany("INSERT INTO evals VALUES (?)", [[json.dumps(row)] for row in rows])
    found = table.execute(f"SELECT {STANDING_SQL} FROM evals ORDER BY rowid").fetchall()
    assert [standing for (standing,) in found] == [standing(row) for row in rows]
