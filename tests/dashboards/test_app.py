"""The JSON behind the pages: right, revalidated, and unmoved by hostile input."""

from __future__ import annotations

import asyncio
import time
from concurrent.futures import ThreadPoolExecutor
from types import SimpleNamespace
from urllib.parse import quote

import pytest
from fastapi.testclient import TestClient

from lt2_dashboards import queries
from lt2_dashboards.app import create_app
from lt2_dashboards.auth import Access
from lt2_dashboards.queries import Source
from lt2_platform.results.index import compact
from lt2_platform.results.store import ResultsStore
from lt2_platform.storage import Storage

from .conftest import HOSTILE, add_run, body, fill, layout


def names(answer) -> list[str]:
    return [row["run"] for row in body(answer)["rows"]]


def test_runs_newest_first_with_what_differs(client):
    page = body(client.get("/api/runs"))
    assert [row["run"] for row in page["rows"]] == ["live-4", "stalled-5", "gdn-3", "hybrid-2", "full-1"]
    assert {row["run"]: row["status"] for row in page["rows"]} == {
        "live-4": "running",
        "stalled-5": "stalled",
        "gdn-3": "failed",
        "hybrid-2": "finished",
        "full-1": "finished",
    }
    assert page["counts"] == {"running": 1, "stalled": 1, "failed": 1, "finished": 2}
    assert set(page["varying"]) == {
        "train.lr",
        "model.layout.type",
        "model.layout.mixer.type",
        "model.layout.attention.type",
        "model.layout.ratio",
        "model.layout.pattern",
    }
    hybrid = next(row for row in page["rows"] if row["run"] == "hybrid-2")
    assert hybrid["config"]["train.lr"] == "0.002"
    assert hybrid["numbers"]["validation/perplexity"] == 10.0
    assert (hybrid["step"], hybrid["total"]) == (50, 50)
    failed = next(row for row in page["rows"] if row["run"] == "gdn-3")
    assert (failed["numbers"]["loss"], failed["numbers"]["grad_norm"]) == ("NaN", "inf")


@pytest.mark.parametrize(
    ("q", "found"),
    [
        ("full", ["full-1"]),
        ("-", ["live-4", "stalled-5", "gdn-3", "hybrid-2", "full-1"]),
        ("lr>1.5e-3", ["hybrid-2"]),
        ("train.lr=0.002", ["hybrid-2"]),
        ("lr=2e-3", ["hybrid-2"]),
        ("train.lr=2e-3", ["hybrid-2"]),  # a setting of that value, however it is written
        ("lr!=0.001", ["hybrid-2"]),
        ("mixer.type=gdn status!=running", ["stalled-5", "gdn-3", "hybrid-2"]),
        ("layout.type~HYB", ["hybrid-2"]),
        ("ratio=1:4", ["hybrid-2"]),
        ("perplexity<10.5", ["hybrid-2"]),
        ("step<=10 loss>0", ["stalled-5"]),
        ("step!=50 step!=20", ["stalled-5", "gdn-3"]),
        ("status=failed", ["gdn-3"]),
        ("nothing", []),
    ],
)
def test_filters(client, q, found):
    answer = client.get("/api/runs", params={"q": q})
    if q == "step<=10 loss>0":
        assert names(answer) == ["stalled-5"]
    assert sorted(names(answer)) == sorted(found)


def test_status_filter_and_sort(client):
    assert names(client.get("/api/runs?status=failed,running&sort=run")) == ["gdn-3", "live-4"]
    assert names(client.get("/api/runs?sort=train.lr"))[-1] == "hybrid-2"
    assert names(client.get("/api/runs?sort=-model.layout.ratio"))[0] == "hybrid-2"  # runs without it come last
    assert names(client.get("/api/runs?sort=model.layout.ratio"))[0] == "hybrid-2"
    assert names(client.get("/api/runs?sort=validation/perplexity"))[:2] == ["hybrid-2", "full-1"]


@pytest.mark.parametrize(
    ("q", "message"),
    [
        ("foo=1", "no setting or metric is called 'foo'"),
        ("lr>fast", "'fast' is not a number"),
        ("run<3", "run is text"),
        ("step~5", "step is a number"),
        ("x" * 501, "at most 500"),
    ],
)
def test_queries_that_make_no_sense_say_why(client, q, message):
    answer = client.get("/api/runs", params={"q": q})
    assert answer.status_code == 400
    assert message in answer.json()["error"]


@pytest.mark.parametrize(
    "address",
    ["runs/nope", "compare?runs=nope", "figures/nope", "figures/curves?runs=nope", "workflows/nope", "steps/nope"],
)
def test_what_is_not_there_is_404_and_named(client, address):
    answer = client.get(f"/api/{address}")
    assert answer.status_code == 404
    assert "'nope'" in answer.json()["error"]


def test_what_should_be_a_number_is_named_like_any_other_mistake(client):
    for address, named in (("/api/runs?page=abc", "page='abc'"), ("/api/steps/s/attempts/one/log", "attempt='one'")):
        answer = client.get(address)
        assert answer.status_code == 400
        assert answer.json()["error"].startswith(f"{named}: ")


@pytest.mark.parametrize("path", ["/", "/static/app.js", "/api/runs", "/api/figures/curves.csv?runs=full-1"])
def test_head_is_answered_like_get(client, path):
    asked, got = client.head(path), client.get(path)
    assert asked.status_code == got.status_code == 200
    assert asked.headers["content-type"] == got.headers["content-type"]


HOSTILE_NAMES = [
    "'; DROP TABLE runs; --",
    '" OR 1=1',
    HOSTILE,
    "../../../../etc/passwd",
    "%2e%2e%2f",
    "a\x00b",
    "é" * 300,
    "x" * 20_000,
    "run?x=1#y",
    "=cmd()",
]


@pytest.mark.parametrize("name", HOSTILE_NAMES)
@pytest.mark.parametrize(
    "address",
    ["/api/runs/{}", "/api/compare?runs={}", "/api/figures/curves?runs={}", "/api/figures/{}", "/api/workflows/{}"]
    + ["/api/steps/{}", "/api/steps/{}/attempts/1/log", "/api/figures/curves.csv?runs={}"],
)
def test_hostile_names_are_refused_and_change_nothing(client, root, name, address):
    answer = client.get(address.format(quote(name, safe="")))
    assert answer.status_code in (400, 404)
    assert "root:" not in answer.text
    assert len(answer.text) < 500
    assert len(names(client.get("/api/runs"))) == 5


@pytest.mark.parametrize("name", HOSTILE_NAMES)
def test_hostile_filters_and_columns_are_only_text(client, name):
    assert client.get("/api/runs", params={"q": name}).status_code in (200, 400)
    if len(name) < 10_000:
        assert len(names(client.get("/api/runs", params={"sort": name}))) == 5
    assert len(names(client.get("/api/runs", params={"status": name}))) == 5


def test_huge_numbers_are_refused_or_clamped(client):
    assert len(names(client.get("/api/runs?page=9000000000000000000"))) == 5
    assert len(names(client.get("/api/runs?page=-5"))) == 5
    assert len(names(client.get(f"/api/runs?page={'9' * 400}"))) == 5
    assert client.get(f"/api/steps/hybrid-2/attempts/{'9' * 400}/log").status_code == 404
    many = ",".join(f"r{number}" for number in range(10_000))
    assert "at most 50" in client.get(f"/api/figures/curves?runs={many}").json()["error"]
    assert "at most 20" in client.get(f"/api/compare?runs={many}").json()["error"]


@pytest.mark.parametrize(
    "path",
    [
        "/static/../app.py",
        "/static/%2e%2e/app.py",
        "/static/..%2fapp.py",
        "/static//etc/passwd",
        "/static/%2fetc/passwd",
    ]
    + ["/static/vendor/../../auth.py", "/static/....//app.py", "/static/\\..\\app.py"],
)
def test_no_file_outside_static_is_served(client, path):
    answer = client.get(path)
    assert "lt2_dashboards" not in answer.text
    assert "root:" not in answer.text


def test_polling_is_answered_304_until_something_changes(tmp_path, monkeypatch):
    monkeypatch.setattr(queries, "FRESH_SECONDS", 0.0)
    store = fill(tmp_path)
    client = TestClient(create_app(str(tmp_path), Access("none")), base_url="http://localhost")
    addresses = ["/api/runs", "/api/runs/live-4", "/api/figures/curves?runs=live-4&metric=loss", "/api/workflows"]
    etags = {address: client.get(address).headers["etag"] for address in addresses}
    for address, etag in etags.items():
        again = client.get(address, headers={"if-none-match": etag})
        assert (again.status_code, again.content) == (304, b""), address
    writer = store.create_run("live-4", {"config": store.run("live-4").config})
    writer.log(21, {"loss": 1.25})
    writer.flush()
    for address in addresses[:3]:
        assert client.get(address, headers={"if-none-match": etags[address]}).status_code == 200
    points = body(client.get(addresses[2]))["option"]["series"][0]["data"]
    assert points[-1] == [21, 1.25]


def test_questions_that_waited_for_one_look_at_a_slow_store_share_it(tmp_path, monkeypatch):
    fill(tmp_path)
    source = Source(str(tmp_path))
    looks, look = [], source.store.version

    def slow():
        looks.append(2 * queries.FRESH_SECONDS)
        return look()

    monkeypatch.setattr(queries, "time", SimpleNamespace(monotonic=lambda: sum(looks)))  # only looks take time
    monkeypatch.setattr(source.store, "version", slow)
    with ThreadPoolExecutor(5) as pool:
        found = list(pool.map(lambda _: source.snapshot(), range(5)))
    assert len(looks) == 1
    assert len({id(snapshot) for snapshot in found}) == 1


def test_answers_are_remembered_until_there_are_too_many(tmp_path):
    source, asked = Source(str(tmp_path)), []
    for question in (0, 0, *range(2 * queries.CACHED_ANSWERS)):
        source.remembered((question,), lambda _, question=question: asked.append(question) or [question])
    assert asked == list(range(2 * queries.CACHED_ANSWERS))
    assert len(source.snapshot().answers) <= queries.CACHED_ANSWERS


def test_pages_survive_damaged_files_and_name_them(tmp_path):
    store = ResultsStore(Storage(str(tmp_path)))
    writer = add_run(store, "broken", start=time.time() - 10, end=None, layout=layout("gdn"))
    parts = store.storage.list("runs/broken/metrics")
    store.storage.write_bytes(f"runs/broken/metrics/{parts[0]}", b"PAR1....PAR1")
    writer.log(60, {"loss": 1.0})
    writer.flush()
    store.storage.write_bytes("results/journal/odd.json", b"{")
    store.storage.write_bytes("workflows/torn/dag.json", b'{"ids": {')
    store.storage.write_bytes("steps/torn/spec.json", b"\xff\xfe")
    client = TestClient(create_app(str(tmp_path), Access("none")), base_url="http://localhost")
    assert "results/journal/odd.json" in body(client.get("/api/runs"))["skipped"][0]
    page = body(client.get("/api/runs/broken"))
    assert parts[0] in page["skipped"][0]
    figure = body(client.get("/api/figures/curves?runs=broken"))
    assert figure["option"]["series"][0]["data"][-1] == [60, 1.0]
    assert any(parts[0] in note for note in figure["notes"])
    assert body(client.get("/api/workflows"))["workflows"] == []
    assert client.get("/api/workflows/torn").status_code == 400
    assert client.get("/api/steps/torn").status_code == 400


def test_reading_while_runs_are_written_and_compacted(tmp_path, monkeypatch):
    monkeypatch.setattr(queries, "FRESH_SECONDS", 0.0)
    store = fill(tmp_path)
    client = TestClient(create_app(str(tmp_path), Access("none")), base_url="http://localhost")
    writer = store.create_run("growing", {"config": {"train": {"steps": 20}}})
    for step in range(20):
        writer.log(step, {"loss": float(step)})
        writer.flush()
        if step % 8 == 0:
            compact(store.storage)
        assert body(client.get("/api/runs"))["total"] == 6
        data = body(client.get("/api/figures/curves?runs=growing"))["option"]["series"][0]["data"]
        assert data == [[s, float(s)] for s in range(step + 1)]


def test_an_empty_store_is_no_error(tmp_path):
    client = TestClient(create_app(str(tmp_path / "none"), Access("none")), base_url="http://localhost")
    page = body(client.get("/api/runs"))
    assert (page["total"], page["rows"], page["skipped"]) == (0, [], [])
    assert body(client.get("/api/workflows"))["workflows"] == []
    assert body(client.get("/api/compare"))["runs"] == []


def test_compare_shows_what_differs_and_what_does_not(client):
    page = body(client.get("/api/compare?runs=full-1,hybrid-2"))
    differs = {row["key"]: row["values"] for row in page["differs"]}
    assert differs["train.lr"] == ["0.001", "0.002"]
    assert differs["model.layout.ratio"] == [None, "1:4"]
    assert page["same"]["model.dim"] == "64"
    assert {
        "key": "validation/perplexity",
        "values": [11.0, 10.0],
        "errors": [None] * 2,
        "items": [None] * 2,
        "data": [None] * 2,
    } in page["evals"]


def test_runs_are_paged(tmp_path):
    store = ResultsStore(Storage(str(tmp_path)))
    for number in range(105):
        store.create_run(f"r{number:03d}", {"config": {"n": number}}).close()
    client = TestClient(create_app(str(tmp_path), Access("none")), base_url="http://localhost")
    assert names(client.get("/api/runs?sort=run"))[:2] == ["r000", "r001"]
    assert names(client.get("/api/runs?sort=run&page=2")) == [f"r{number}" for number in range(100, 105)]
    for asked, shown in ((0, 1), (3, 2), (99, 2)):
        assert body(client.get(f"/api/runs?sort=run&page={asked}"))["page"] == shown
    last = body(client.get("/api/runs?sort=run&q=r0&page=2"))  # exactly one page of them
    assert (last["total"], last["page"], len(last["rows"])) == (100, 1, 100)


@pytest.mark.parametrize("path", ["/", "/static/app.js", "/api/runs"])
def test_an_answer_that_nobody_waits_for_is_no_error(root, path):
    """A page that is left while it loads: the server must not put a traceback into the terminal."""
    app = create_app(str(root), Access("none"))
    scope = {"type": "http", "asgi": {"version": "3.0"}, "http_version": "1.1", "method": "GET", "path": path,
             "raw_path": path.encode(), "query_string": b"", "root_path": "", "scheme": "http",
             "headers": [(b"host", b"localhost")], "client": ("127.0.0.1", 1), "server": ("localhost", 80)}  # fmt: skip
    sent = []

    async def receive():
        return {"type": "http.disconnect"}

    async def send(message):
        sent.append(message["type"])

    asyncio.run(app(scope, receive, send))
    assert sent[:1] in ([], ["http.response.start"])


def test_every_answer_says_how_long_it_holds(client):
    for address, wanted in (("/", "no-cache"), ("/static/app.js", "no-cache"), ("/api/runs", "no-cache"),
                            ("/api/figures/curves.csv?runs=full-1", "no-store"), ("/login", "no-store")):  # fmt: skip
        assert client.get(address, follow_redirects=False).headers.get_list("cache-control") == [wanted], address


@pytest.mark.parametrize("left_empty", [False, True])
def test_a_folder_that_vanishes_is_no_empty_store(tmp_path, monkeypatch, left_empty):
    """Moved away, or unmounted, which leaves the empty folder under it."""
    monkeypatch.setattr(queries, "FRESH_SECONDS", 0.0)
    root, elsewhere = tmp_path / "store", tmp_path / "moved"
    client = TestClient(create_app(str(root), Access("none")), base_url="http://127.0.0.1:8787")
    assert body(client.get("/api/runs"))["all"] == 0  # not there yet
    fill(root)
    assert body(client.get("/api/runs"))["all"] == 5
    root.rename(elsewhere)
    if left_empty:
        root.mkdir()
    for address in ("runs", "runs/full-1", "workflows", "figures/seeds", "figures/seeds.csv"):
        refused = client.get(f"/api/{address}")
        assert refused.status_code == 503
        assert "store cannot be read at the moment (it is gone or empty" in refused.json()["error"]
    assert client.get("/runs").status_code == 200  # the page itself, which says so
    if left_empty:
        root.rmdir()
    elsewhere.rename(root)
    assert body(client.get("/api/runs"))["all"] == 5
