"""The pages in a real headless Chromium: rendered, linked, filtered, live, exported, reachable by keyboard."""

from __future__ import annotations

import csv
import re
import shutil
import threading
import time
from pathlib import Path

import pytest
import uvicorn

from lt2_dashboards import queries
from lt2_dashboards.app import create_app, listen
from lt2_dashboards.auth import LOGIN, Access
from lt2_platform.results import ResultsStore
from lt2_platform.results_index import compact
from lt2_platform.storage import Storage

from .conftest import HOSTILE, fill, fill_sweep, fill_workflow

CHROMIUM = shutil.which("chromium") or "/usr/bin/chromium"
QUIET = ("background-networking", "component-update", "sync", "gpu", "quic")
ARGUMENTS = ["--headless", "--no-sandbox", "--no-first-run", *(f"--disable-{feature}" for feature in QUIET)]
MISSING = "Debian's chromium is not installed: apt-get install chromium"

pytestmark = [
    pytest.mark.browser,
    pytest.mark.skipif(
        not Path(CHROMIUM).exists(), reason="Debian's chromium is not installed: apt-get install chromium"
    ),
]


@pytest.fixture(scope="module")
def browser():
    playwright = pytest.importorskip("playwright.sync_api", reason="playwright is not installed: pip install -e .[dev]")
    with playwright.sync_playwright() as driver:
        chromium = driver.chromium.launch(executable_path=CHROMIUM, args=ARGUMENTS)
        yield chromium
        chromium.close()


class Site:
    """A dashboard on a free port, over a store that tests may add to."""

    def __init__(self, root: Path):
        self.store = ResultsStore(Storage(str(root)))
        self.access = Access("token", root.parent / "token")
        self.socket = listen("127.0.0.1", 0)
        self.address = f"http://127.0.0.1:{self.socket.getsockname()[1]}"
        config = uvicorn.Config(create_app(str(root), self.access), log_level="warning", lifespan="off")
        self.server = uvicorn.Server(config)
        self.thread = threading.Thread(target=self.server.run, args=([self.socket],), daemon=True)

    def __enter__(self) -> Site:
        self.thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self.server.should_exit = True
        self.thread.join(10)
        self.socket.close()


@pytest.fixture(scope="module")
def site(tmp_path_factory):
    root = tmp_path_factory.mktemp("site") / "store"
    fill(root)
    fill_workflow(Storage(str(root)))
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(queries, "FRESH_SECONDS", 0.0)
        with Site(root) as running:
            yield running


@pytest.fixture
def page(browser, site):
    """A page that has logged in; any script error or breach of the CSP fails the test."""
    context = browser.new_context(viewport={"width": 1440, "height": 900}, accept_downloads=True)
    page = context.new_page()
    problems: list[str] = []
    page.on("pageerror", lambda error: problems.append(str(error)))
    page.on(
        "console",
        lambda m: (
            problems.append(m.text) if m.type == "error" and not re.search("status of (400|503)", m.text) else None
        ),
    )
    page.goto(f"{site.address}{LOGIN}?token={site.access.token}")
    yield page
    context.close()
    assert problems == []


def until(page, condition: str, seconds: float = 60.0) -> None:
    """Wait for a JavaScript condition; one that throws (what it looks at is not there yet) does not hold.

    Playwright's own way to do that evaluates strings, which our CSP forbids.
    """
    end = time.monotonic() + seconds
    while not page.evaluate(f"(() => {{ try {{ return Boolean({condition}); }} catch {{ return false; }} }})()"):
        assert time.monotonic() < end, f"not within {seconds} s: {condition}"
        page.wait_for_timeout(50)


def drawn(page, count: int = 1) -> None:
    """Wait until `count` figures are on the screen."""
    until(page, f"document.querySelectorAll('figure[data-ready]').length >= {count}")


def option(page, index: int = 0) -> dict:
    """The chart option that ECharts holds for a figure."""
    return page.evaluate(f"document.querySelectorAll('figure')[{index}].figure.option()")


def rows(page) -> list[str]:
    return page.locator("table.runs tbody th").all_inner_texts()


def test_strangers_are_told_how_to_enter(browser, site):
    context = browser.new_context()
    page = context.new_page()
    answer = page.goto(site.address)
    assert answer is not None
    assert answer.status == 401
    assert "Open the address that `lt2 dashboard` printed" in page.inner_text("body")
    context.close()


def test_an_answer_that_broke_off_is_not_kept(page, site):
    """A page left while its answer is read must not leave half of it behind for the next visit's 304."""
    seen = page.evaluate("""async () => {
        const { get } = await import("/static/api.js");
        const real = window.fetch;
        const answers = [];
        for (const name of ["AbortError", "TypeError"]) {
            window.fetch = async (...asked) => {
                const answer = await real(...asked);
                const json = () => Promise.reject(Object.assign(new Error(name), { name }));
                return { status: answer.status, ok: answer.ok, headers: answer.headers, json };
            };
            answers.push(await get("/api/runs?broken").then(() => "kept", (error) => error.message));
        }
        window.fetch = real;
        const { body, changed } = await get("/api/runs?broken");
        return [...answers, changed, "error" in body];
    }""")
    assert seen == ["AbortError", "The server's answer broke off.", True, False]


def test_runs_and_their_curves(page, site):
    drawn(page, 5)
    assert rows(page)[0] == "live-4"
    assert page.locator("tr", has_text="stalled-5").locator(".status").inner_text() == "stalled"
    assert page.inner_text("#root") == site.store.storage.root
    names = {series["name"] for series in option(page)["series"]}
    assert names == {"live-4", "stalled-5", "gdn-3", "hybrid-2", "full-1"}
    header = page.locator("table.runs thead").inner_text()
    assert "lr" in header
    assert "ratio" in header
    assert "dim" not in header  # the same in every run
    assert page.locator("img").count() == 0  # the HTML in the settings stayed text


def test_selection_filter_and_sort_live_in_the_address(page, site):
    drawn(page, 5)
    page.get_by_label("Draw full-1").uncheck()
    page.wait_for_url("**/?sel=live-4,stalled-5,gdn-3,hybrid-2")
    until(page, "document.querySelector('figure').figure.option().series.length === 4")
    page.get_by_label("Filter runs").fill("lr>1.5e-3")
    page.wait_for_url(re.compile("q=lr"))
    until(page, "document.querySelectorAll('table.runs tbody tr').length === 1")
    page.get_by_role("button", name="loss", exact=True).click()
    page.wait_for_url(re.compile("sort="))
    copied = page.url
    page.goto(f"{site.address}/workflows")
    page.goto(copied)
    until(page, "document.querySelectorAll('table.runs tbody tr').length === 1")
    assert page.get_by_label("Filter runs").input_value() == "lr>1.5e-3"


def test_a_filter_that_matches_nothing_and_one_that_makes_no_sense(page, site):
    page.goto(f"{site.address}/?q=nothing")
    page.get_by_role("button", name="Clear the filter").click()
    until(page, "document.querySelectorAll('table.runs tbody tr').length === 5")
    page.goto(f"{site.address}/?q=foo%3D1")
    page.get_by_text("no setting or metric is called 'foo'").wait_for()


def test_a_live_run_grows_on_the_page(page, site):
    page.goto(f"{site.address}/runs/live-4")
    drawn(page, 5)
    before = len(option(page)["series"][0]["data"])
    info = site.store.run("live-4")
    writer = site.store.create_run("live-4", {"config": info.config})
    writer.log(info.step + 1, {"loss": 0.125})
    writer.flush()
    until(page, f"document.querySelector('figure').figure.option().series[0].data.length > {before}")
    assert option(page)["series"][0]["data"][-1] == [info.step + 1, 0.125]
    until(page, "document.querySelector('.facts').innerText.includes('0.125')")
    compact(site.store.storage)
    for _ in range(2):  # the second poll began after the compaction
        with page.expect_response(lambda answer: "/api/runs/live-4" in answer.url):
            pass
    assert option(page)["series"][0]["data"][-1] == [info.step + 1, 0.125]


def test_a_new_run_appears(page, site):
    drawn(page, 5)
    with site.store.create_run("newcomer", {"config": {"train": {"lr": 1}}}) as writer:
        writer.log(1, {"loss": 3.0})
    until(page, "document.querySelector('table.runs tbody th').innerText === 'newcomer'")
    site.store.storage.delete("results/journal/newcomer.json")


def test_a_cut_axis_links_to_the_whole_curve(page, site):
    with site.store.create_run("steep", {"config": {}}) as writer:
        for step in range(200):
            writer.log(step, {"loss": 100.0 if step < 3 else 2 + step / 1000})
    for address in ("/?sel=steep", "/runs/steep", "/figures/curves?runs=steep"):
        page.goto(site.address + address)
        page.locator("figure", has_text="above the axis").get_by_role("link", name="Show it").click()
        page.wait_for_url(re.compile("/figures/curves.*full=1"))
        until(page, "document.querySelector('.figure.beside').figure.option().yAxis[0].max == null")
        assert page.locator(".figure.beside .notes").inner_text() == ""
        assert page.get_by_label("full", exact=True).is_checked()
    site.store.storage.delete("results/journal/steep.json")


def test_compare_from_the_table(page, site):
    page.goto(f"{site.address}/?sel=full-1,hybrid-2")
    page.get_by_role("link", name="Compare 2").click()
    page.wait_for_url("**/compare?runs=full-1,hybrid-2")
    table = page.locator("table.compare")
    table.wait_for()
    assert table.locator("tr", has_text="model.layout.ratio").locator("td").all_inner_texts() == ["not set", "1:4"]
    best = table.locator("tr", has_text="validation/perplexity").locator(".best")
    assert best.inner_text().startswith("10")
    drawn(page, 3)
    page.get_by_label("Take hybrid-2 out").click()
    page.get_by_text("Select two or more runs").wait_for()


def test_workflow_graph_attempts_and_log(page, site):
    page.goto(f"{site.address}/workflows")
    page.get_by_role("link", name="demo-1").click()
    page.locator(".node").nth(3).wait_for()
    assert page.locator(".node.failed").inner_text().startswith("full")
    assert page.locator("path.edge").count() == 4
    page.get_by_text("ValueError: lr is negative").wait_for()  # opens at the step that needs attention
    page.locator("pre.log", has_text="attempt 2 of full").wait_for()
    page.get_by_role("button", name="attempt 1").click()
    log = page.locator("pre.log", has_text="attempt 1 of full")
    log.wait_for()
    assert HOSTILE in log.inner_text()
    assert "\x1b" not in log.inner_text()
    assert "loss 9" not in log.inner_text()  # redrawn by the progress line
    assert page.url.endswith("?attempt=1")
    page.get_by_role("link", name="hybrid-2").click()
    page.get_by_role("link", name="curves").click()
    page.wait_for_url("**/runs/hybrid-2")
    page.get_by_role("link", name="attempts and log").click()
    page.locator("pre.log", has_text="attempt 1 of hybrid-2").wait_for()


def test_a_sweeps_trials_from_the_list_to_a_failed_one_and_back(page, site):
    fill_sweep(site.store.storage, 3, failed=1)
    page.goto(f"{site.address}/workflows")
    page.get_by_text("3 trials of sweeps are not in this list").wait_for()
    assert page.locator("tbody tr").count() == 2
    page.get_by_role("link", name="3 trials").click()
    trials = page.locator(".trials tbody tr")
    trials.nth(2).wait_for()
    assert "trial 2 ran out of memory" in trials.nth(0).inner_text()
    assert page.locator(".trials .chips").inner_text().split() == ["failed", "1", "done", "2"]
    page.get_by_role("link", name="swept-trial-2").click()
    page.locator(".notice", has_text="trial 2 ran out of memory").wait_for()
    page.get_by_role("link", name="sweep-00000000").click()
    trials.nth(2).wait_for()


def test_damaged_records_are_named(browser, tmp_path):
    storage = Storage(str(tmp_path / "store"))
    fill_workflow(storage)
    for path in ("workflows/torn/dag.json", "steps/prepare-00000000/done.json"):
        storage.write_bytes(path, b"")
    with Site(tmp_path / "store") as site:
        context = browser.new_context()
        page = context.new_page()
        page.goto(f"{site.address}{LOGIN}?token={site.access.token}")
        page.goto(f"{site.address}/workflows")
        page.get_by_text("2 records cannot be read").wait_for()
        page.get_by_text("workflows/torn/dag.json: skipped, unreadable (empty)").wait_for()
        page.goto(f"{site.address}/workflows/demo-1/steps/prepare-00000000")
        page.locator(".panel .notice.warn", has_text="steps/prepare-00000000/done.json").wait_for()
        assert page.locator(".node.unreadable").inner_text().startswith("prepare")
        assert page.locator(".panel .facts .status").inner_text() == "unreadable"
        context.close()


def test_evaluations_beside_the_paper(page, site):
    page.goto(f"{site.address}/evaluations")
    drawn(page, 3)
    ours = page.locator("tr.ours")
    assert ours.locator("th").all_inner_texts() == ["hybrid-2"]
    assert page.locator("tr.paper").count() == 12
    names = [series["name"] for series in option(page)["series"]]
    assert names == ["paper, other models", "paper, Looped Transformer", "paper, Looped Hybrid (Full+GDN)", "hybrid-2"]
    page.get_by_role("button", name="0.6B").click()
    until(page, "document.querySelectorAll('tr.paper').length === 15")
    assert page.url.endswith("?size=0.6B")


def test_sweeps(page, site):
    page.goto(f"{site.address}/sweeps?metric=validation/perplexity")
    drawn(page)
    assert page.locator("tbody tr").count() == 2
    assert option(page)["parallelAxis"][-1]["name"] == "validation/perplexity"


def test_figure_page_exports_and_table(page, site, browser, tmp_path):
    page.goto(f"{site.address}/figures/curves?runs=full-1&metric=loss")
    drawn(page)
    assert page.locator("table.numbers tbody tr").count() == 50
    page.get_by_role("button", name="step").click()
    until(page, "document.querySelector('table.numbers tbody td:nth-child(2)').innerText === '50'")
    assert page.locator("th[aria-sort=descending]").inner_text() == "step ↓"
    with page.expect_download() as download:
        page.get_by_role("link", name="CSV").click()
    with open(download.value.path(), newline="") as file:
        assert len(list(csv.reader(file))) == 51
    with page.expect_download() as download:
        page.get_by_role("link", name="HTML").click()
    saved = tmp_path / "curves.html"
    download.value.save_as(saved)
    alone = browser.new_context(offline=True).new_page()
    alone.goto(f"file://{saved}")
    alone.locator("#chart svg path").first.wait_for(state="attached")
    assert alone.locator("h1").inner_text() == "Training loss (nats per token)"
    alone.context.close()


def test_the_gallery_draws_what_is_in_sight_and_says_what_is_missing(page, site):
    page.goto(f"{site.address}/figures")
    until(page, "document.querySelectorAll('.cards > li').length >= 14")
    until(page, "document.querySelectorAll('.cards figure[data-asked]:not([data-ready])').length === 0")
    drawn(page, 4)
    page.get_by_role("link", name="Loop diagnostics").scroll_into_view_if_needed()
    page.get_by_text("lt2 diagnose RUN").wait_for()
    page.get_by_role("link", name="State recall", exact=True).click()
    page.wait_for_url("**/figures/state_recall")
    page.get_by_text("Nothing of this store is in this figure yet").wait_for()
    drawn(page)
    assert option(page)["series"][0]["type"] == "heatmap"


def test_a_figures_parameters_are_its_address(page, site):
    page.goto(f"{site.address}/figures/hybrid")
    drawn(page)
    page.get_by_label("by").select_option("pattern")
    page.wait_for_url("**/figures/hybrid?by=pattern")
    until(page, "document.querySelector('figure').figure.option().xAxis[0].data[0] === 'bookend'")
    page.goto(f"{site.address}/figures/cost_vs_length")
    drawn(page)
    assert len(option(page)["grid"]) == 2
    page.get_by_text("Choose runs").click()
    page.get_by_label("hybrid-2").check()
    page.wait_for_url("**/figures/cost_vs_length?runs=hybrid-2")


def test_a_table_asked_for_before_its_numbers_arrive(page, site):
    """Pressing Table while a small chart's answer, which has no rows, is on its way."""
    drawn(page, 5)
    seen = page.evaluate("""async () => {
        const { figure } = await import("/static/chart.js");
        const tile = figure("curves", { small: true });
        document.body.append(tile.element);
        const loading = tile.load({ runs: "full-1", metric: "lr" });
        tile.element.querySelector("button").click();
        await loading;
        const arrived = () => tile.element.querySelector("td");
        for (let wait = 0; wait < 600 && !arrived(); wait++) await new Promise((done) => setTimeout(done, 50));
        const rows = tile.element.querySelectorAll("tbody tr").length;
        tile.destroy();
        tile.element.remove();
        return rows;
    }""")
    assert seen == 50


def test_a_narrow_window_scrolls_down_only(page, site):
    """Wide things scroll inside the page, and the bar keeps all it holds on the screen."""
    storage = site.store.storage
    fill_sweep(storage, 3, failed=1)
    storage.write_json("steps/sweep-00000000/done.json", {"attempt": 1, "result": {"text": f"\n{'column  ' * 30}\n"}})
    page.set_viewport_size({"width": 420, "height": 900})
    for address, ready in [
        ("/", "table.runs tbody tr"),
        ("/runs/hybrid-2", "figure[data-ready]"),
        ("/compare?runs=full-1,hybrid-2", "table.compare"),
        ("/workflows", "table.numbers"),
        ("/workflows/demo-1", ".node"),
        ("/workflows/swept-1/steps/sweep-00000000", ".report"),
        ("/evaluations", "figure[data-ready]"),
        ("/sweeps", "figure[data-ready]"),
        ("/figures", ".cards figure[data-ready]"),
        ("/figures/curves?runs=full-1", "figure[data-ready]"),
        ("/elsewhere", ".notice"),
    ]:
        page.goto(site.address + address)
        page.locator(ready).first.wait_for()
        assert page.evaluate("document.documentElement.scrollWidth") == 420, address
        for item in page.locator("#nav a, #help, #theme").all():
            box = item.bounding_box()
            assert 0 <= box["x"] <= 420 - box["width"], (address, item.inner_text())
        if address.startswith("/workflows/swept-1"):
            assert page.evaluate("getComputedStyle(document.querySelector('.report')).whiteSpace") == "pre"
    page.goto(site.address)
    until(page, "document.getElementById('root').innerText")
    assert page.locator("#root").bounding_box()["y"] < page.locator("#nav").bounding_box()["y"]
    assert page.locator(".bar").bounding_box()["height"] < 90


@pytest.mark.parametrize("width", [420, 1280])
def test_the_note_of_a_small_chart_is_not_clipped(page, site, width):
    page.set_viewport_size({"width": width, "height": 900})
    page.goto(f"{site.address}/runs/gdn-3")
    drawn(page, 5)
    until(page, "document.querySelectorAll('.tiles .notes p').length >= 2")
    hidden = """[...document.querySelectorAll(".tiles > .figure")].filter((tile) => {
        const notes = tile.querySelector(".notes");
        const below = notes.getBoundingClientRect().bottom > tile.getBoundingClientRect().bottom;
        return notes.childElementCount && (below || notes.scrollHeight > notes.clientHeight + 1);
    }).length"""
    assert page.evaluate(hidden) == 0


def test_keyboard(page, site):
    drawn(page, 5)
    page.keyboard.press("j")
    page.keyboard.press("j")
    focused = page.evaluate("document.activeElement.textContent")
    page.keyboard.press("x")
    page.wait_for_url(re.compile("sel="))
    assert focused not in page.url.split("sel=")[1].split(",")
    page.keyboard.press("/")
    assert page.evaluate("document.activeElement.type") == "search"
    page.keyboard.press("Escape")
    page.keyboard.press("t")
    assert page.evaluate("document.documentElement.dataset.theme") == "dark"
    page.keyboard.press("?")
    page.get_by_role("heading", name="Keyboard").wait_for()
    page.keyboard.press("Escape")
    page.keyboard.press("g")
    page.keyboard.press("w")
    page.wait_for_url("**/workflows")
    page.keyboard.press("g")
    page.keyboard.press("f")
    page.wait_for_url("**/figures")


def test_a_page_recovers_when_the_storage_comes_back(page, site):
    answers = iter([503])

    def once(route):
        status = next(answers, None)
        if status is None:
            route.continue_()
        else:
            route.fulfill(status=status, json={"error": "s3://x cannot be read just now (refused)"})

    page.route("**/api/runs/hybrid-2", once)
    page.goto(f"{site.address}/runs/hybrid-2")
    page.get_by_text("s3://x cannot be read just now (refused)").wait_for()
    drawn(page, 5)
    assert page.locator("figure").first.is_visible()
    assert page.get_by_text("cannot be read just now").count() == 0


def test_missing_things_say_so(page, site):
    for address, text in [
        ("/runs/nope", "no run 'nope'"),
        ("/workflows/nope", "no workflow 'nope'"),
        ("/compare?runs=nope,full-1", "no run 'nope'"),
        ("/figures/nope", "no figure 'nope'"),
        ("/elsewhere", "There is no such page"),
        ("/compare", "Select two or more runs"),
    ]:
        page.goto(site.address + address)
        page.get_by_text(text).first.wait_for()


def test_an_empty_store_says_what_to_do(browser, tmp_path):
    with Site(tmp_path / "store") as site:
        context = browser.new_context()
        page = context.new_page()
        page.goto(f"{site.address}{LOGIN}?token={site.access.token}")
        page.get_by_text("lt2 run quickstart").wait_for()
        page.goto(f"{site.address}/workflows")
        page.get_by_text("No workflows yet").wait_for()
        context.close()
