"""What holds on every page in a real browser: login, keyboard, narrow windows, lost answers, nothing to show."""

from __future__ import annotations

import re

import pytest

from lt2_dashboards.auth import LOGIN
from tests.dashboards.conftest import fill_sweep

from .conftest import Site, drawn, until

pytestmark = pytest.mark.browser


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
    page.goto(site.address)
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
    assert seen == ["AbortError", "The server's answer was cut off.", True, False]


def test_a_narrow_window_scrolls_down_only(page, site):
    """Wide things scroll inside the page, and the bar keeps all it holds on the screen."""
    storage = site.store.storage
    fill_sweep(storage, 3, failed=1)
    storage.write_json("steps/sweep-00000000/done.json", {"attempt": 1, "result": {"text": f"\n{'column  ' * 30}\n"}})
    site.store.log_event("hybrid-2", "rollback", {"step": 7, "to": "step-5", "message": "loss nan " * 30})
    page.set_viewport_size({"width": 390, "height": 900})
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
        assert page.evaluate("document.documentElement.scrollWidth") == 390, address
        for item in page.locator("#nav a, #help, #theme").all():
            box = item.bounding_box()
            assert 0 <= box["x"] <= 390 - box["width"], (address, item.inner_text())
        if address == "/runs/hybrid-2":
            assert page.locator(".events .said").bounding_box()["width"] > 300  # below the time, not in what it leaves
        if address.startswith("/workflows/swept-1"):
            assert page.evaluate("getComputedStyle(document.querySelector('.report')).whiteSpace") == "pre"
    page.goto(site.address)
    until(page, "document.getElementById('root').innerText")
    assert page.locator("#root").bounding_box()["y"] < page.locator("#nav").bounding_box()["y"]
    assert page.locator(".bar").bounding_box()["height"] < 90


def test_keyboard(page, site):
    page.goto(site.address)
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
            route.fulfill(status=status, json={"error": "s3://x cannot be read at the moment (refused)"})

    page.route("**/api/runs/hybrid-2", once)
    page.goto(f"{site.address}/runs/hybrid-2")
    page.get_by_text("s3://x cannot be read at the moment (refused)").wait_for()
    drawn(page, 5)
    assert page.locator("figure").first.is_visible()
    assert page.get_by_text("cannot be read at the moment").count() == 0
    page.goto(f"{site.address}/figures/curves?runs=full-1")
    drawn(page)
    page.route("**/api/figures/curves?*", lambda route: route.fulfill(status=503, json={"error": "away"}))
    page.locator("#connection", has_text="reconnecting").wait_for()
    assert page.locator("figure canvas").is_visible()  # what was drawn stays
    assert page.locator("table.numbers tbody tr").count() == 50
    page.unroute("**/api/figures/curves?*")
    until(page, "document.getElementById('connection').textContent === ''")


NAMELESS = """() => [
  ...[...document.querySelectorAll("[tabindex='0']:not(a, button)")].filter((e) => !e.ariaLabel || !e.role),
  ...[...document.querySelectorAll("input, select")].filter((e) => !e.labels.length && !e.ariaLabel),
  ...document.querySelectorAll("th:not([scope])"),
].filter((e) => e.checkVisibility()).map((e) => e.outerHTML.slice(0, 120))"""


@pytest.mark.parametrize("address", ["/", "/runs/hybrid-2", "/compare?runs=full-1,hybrid-2", "/evaluations", "/sweeps"])
def test_what_takes_the_focus_and_every_header_is_named(page, site, address):
    page.goto(site.address + address)
    page.locator("th[scope=col]").first.wait_for(state="attached")
    assert page.evaluate(NAMELESS) == []


def test_missing_things_say_so(page, site):
    for address, text in [
        ("/runs/nope", "no run 'nope'"),
        ("/workflows/nope", "no workflow 'nope'"),
        ("/compare?runs=nope,full-1", "no run 'nope'"),
        ("/figures/nope", "no figure 'nope'"),
        ("/elsewhere", "There is no such page"),
        ("/runs/%E0%A4%A", "There is no such page"),
        ("/runs/100%25", "no run '100%'"),
        ("/compare", "Select two or more runs"),
    ]:
        page.goto(site.address + address)
        page.get_by_text(text).first.wait_for()
        assert page.locator("details.same:visible, .toolbar h2:visible").count() == 0  # nor heads of what is not there
    page.goto(f"{site.address}/elsewhere")
    until(page, "document.title === 'No such page · LT2'")


def test_an_empty_store_says_what_to_do(browser, tmp_path):
    with Site(tmp_path / "store") as site:
        context = browser.new_context()
        page = context.new_page()
        page.goto(f"{site.address}{LOGIN}?token={site.access.token}")
        page.get_by_text("lt2 run quickstart").wait_for()
        page.goto(f"{site.address}/workflows")
        page.get_by_text("No workflows yet").wait_for()
        context.close()
