"""Workflows in a real browser: graph, attempts and logs, trials of sweeps, damaged records."""

from __future__ import annotations

import time

import pytest

from lt2_dashboards.auth import LOGIN
from lt2_platform.storage import Storage
from tests.dashboards.conftest import HOSTILE, attempt, fill_sweep, fill_workflow

from .conftest import Site, until, visiting

pytestmark = pytest.mark.browser


def test_workflow_graph_attempts_and_log(page, site):
    page.goto(f"{site.address}/workflows")
    assert "full: ValueError: lr is negative" in page.locator("tr", has_text="demo-1").inner_text()
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
    page.set_viewport_size({"width": 400, "height": 800})  # the step whose log is shown is in sight in the graph
    page.goto(f"{site.address}/workflows/demo-1/steps/report-00000000")
    node = page.locator(".node[aria-current]", has_text="report")
    node.wait_for()
    assert 0 <= node.bounding_box()["x"] <= 400 - node.bounding_box()["width"]
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


def test_the_time_of_a_running_step_goes_on_and_its_mark_stays(browser, tmp_path):
    storage = Storage(str(tmp_path / "store"))
    fill_workflow(storage)
    attempt(storage, "full-00000000", 3, "running", time.time() - 7200)  # and no heartbeat: lost
    with visiting(browser, tmp_path / "store") as (page, address):
        page.goto(f"{address}/workflows/demo-1")
        running, lost = page.locator(".node.running small"), page.locator(".node.lost")
        before = running.inner_text()
        until(page, f"document.querySelector('.node.running small').textContent !== {before!r}", 15)
        assert lost.locator("small").inner_text() == "#3"  # nobody knows how long it ran
        assert lost.get_attribute("aria-current") == "true"  # the step that is shown below
        page.goto(f"{address}/workflows/-/steps/hybrid-2")
        took = page.locator(".panel .facts div", has_text="time").locator("dd")
        before = took.inner_text()
        until(page, f"[...document.querySelectorAll('.panel dd')].every((dd) => dd.textContent !== {before!r})", 15)


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
        page.get_by_text("workflows/torn/dag.json: skipped, unreadable (it is empty)").wait_for()
        page.goto(f"{site.address}/workflows/demo-1/steps/prepare-00000000")
        page.locator(".panel .notice.warn", has_text="steps/prepare-00000000/done.json").wait_for()
        assert page.locator(".node.unreadable").inner_text().startswith("prepare")
        assert page.locator(".panel .facts .status").inner_text() == "unreadable"
        context.close()
