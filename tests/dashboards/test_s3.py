"""The dashboard over a store on S3: every page, live, and what it says while S3 is away."""

from __future__ import annotations

import pytest
from botocore.exceptions import ClientError
from fastapi.testclient import TestClient

from lt2_dashboards import queries
from lt2_dashboards.app import create_app
from lt2_dashboards.auth import Access
from lt2_platform.results.index import compact
from lt2_platform.results.store import ResultsStore
from lt2_platform.storage import Storage

from .conftest import body, fill, fill_workflow

PAGES = (
    "/api/runs",
    "/api/runs/hybrid-2",
    "/api/compare?runs=full-1,hybrid-2",
    "/api/figures/curves?runs=full-1,live-4&metric=loss",
    "/api/figures/downstream",
    "/api/figures/hybrid",
    "/api/figures/stability",
    "/api/workflows",
    "/api/workflows/demo-1",
    "/api/steps/full-00000000",
    "/api/steps/full-00000000/attempts/1/log",
)


@pytest.fixture
def client(s3_root, monkeypatch):
    monkeypatch.setattr(queries, "FRESH_SECONDS", 0.0)
    fill(s3_root)
    fill_workflow(Storage(s3_root))
    return TestClient(create_app(s3_root, Access("none")), base_url="http://localhost")


def test_every_page_shows_what_a_local_store_shows(client, s3_root, tmp_path):
    fill(tmp_path)
    fill_workflow(Storage(str(tmp_path)))
    local = TestClient(create_app(str(tmp_path), Access("none")), base_url="http://localhost")
    there, here = body(client.get("/api/runs")), body(local.get("/api/runs"))
    assert there["root"] == s3_root
    assert [row["run"] for row in there["rows"]] == [row["run"] for row in here["rows"]]
    assert [row["numbers"] for row in there["rows"]] == [row["numbers"] for row in here["rows"]]
    for page in PAGES:
        first = client.get(page)
        assert set(body(first)) == set(body(local.get(page))), page
        again = client.get(page, headers={"if-none-match": first.headers["etag"]})
        assert again.status_code == 304, page
    curve = body(client.get("/api/figures/curves?runs=full-1&metric=loss"))
    assert curve["rows"][-1][1:5:2] == [50, pytest.approx(2 + 8 / 50 + 1e-3)]
    assert client.get("/api/figures/curves.csv?runs=full-1").text.count("\n") == 51


def test_a_run_grows_and_is_compacted_while_it_is_looked_at(client, s3_root):
    store = ResultsStore(Storage(s3_root))
    writer = store.create_run("live-4", {"config": store.run("live-4").config})
    for step in (21, 22):
        writer.log(step, {"loss": float(step)})
        writer.flush()
        points = body(client.get("/api/figures/curves?runs=live-4&metric=loss"))["option"]["series"][0]["data"]
        assert points[-1] == [step, float(step)]
        compact(store.storage)
    assert body(client.get("/api/runs/live-4"))["last"]["loss"] == 22.0


def test_a_storage_that_is_away_is_an_error_that_says_so(client, monkeypatch):
    assert client.get("/api/runs").status_code == 200

    said = "refused by s3.example"
    for error in (ConnectionError(said), ClientError({"Error": {"Message": said}}, "ListObjectsV2")):

        def refuse(*_: object, error: Exception = error) -> None:
            raise error

        with monkeypatch.context() as patch:
            patch.setattr(Storage, "list", refuse)
            answer = client.get("/api/runs")
            assert answer.status_code == 503
            assert f"cannot be read at the moment ({error})" in answer.json()["error"]
    assert client.get("/api/runs").status_code == 200
