"""Runs in a real browser: their table, curves, selection in the address, live growth, comparison."""

from __future__ import annotations

import json
import re
import time

import pytest

from lt2_platform.results.index import compact
from lt2_platform.results.store import ResultsStore
from lt2_platform.storage import Storage
from tests.dashboards.conftest import add_run, attempt

from .conftest import drawn, option, until, visiting

pytestmark = pytest.mark.browser


def rows(page) -> list[str]:
    return page.locator("table.runs tbody th").all_inner_texts()


def row_colours(page) -> list[str]:
    """Of the runs in the table that are drawn, the colours of their lines."""
    return page.locator("tr.selected").evaluate_all("(rows) => rows.map((row) => row.style.getPropertyValue('--run'))")


def test_runs_and_their_curves(page, site):
    page.goto(site.address)
    drawn(page, 5)
    assert rows(page)[0] == "live-4"
    assert page.locator("tr", has_text="live-4").locator(".num").first.inner_text() == "about 3 s left · 20 / 50"
    assert page.get_by_role("link", name="CSV").last.get_attribute("href") == "/api/runs.csv"
    assert page.locator("tr", has_text="stalled-5").locator(".status").inner_text() == "stalled"
    assert page.inner_text("#root") == site.store.storage.root
    page.goto(f"{site.address}/workflows")
    page.locator("#root", has_text=site.store.storage.root).wait_for()  # on every page
    page.go_back()
    drawn(page, 5)
    names = {series["name"] for series in option(page)["series"]}
    assert names == {"live-4", "stalled-5", "gdn-3", "hybrid-2", "full-1"}
    header = page.locator("table.runs thead").inner_text()
    assert header.index("progress") < header.index("started") < header.index("loss")  # seen without scrolling
    losses = page.locator("table.runs tbody td:nth-child(6)").all_inner_texts()
    assert losses == ["2.401", "3.601", "NaN", "2.162", "2.161"]
    assert "lr" in header
    assert "ratio" in header
    assert "dim" not in header  # the same in every run
    assert page.locator("img").count() == 0  # the HTML in the settings stayed text


def test_selection_filter_and_sort_live_in_the_address(page, site):
    page.goto(site.address)
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
    page.goto(site.address)
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


def test_the_page_of_a_store_that_is_slow_to_answer(page, site):
    held = []
    page.route("**/api/runs?*", lambda route: held.append(route))
    page.route("**/api/runs", lambda route: held.append(route))
    page.goto(site.address)
    page.get_by_text("Reading the results store").wait_for()
    # Not the browser's own word for a list without one.
    assert page.locator("details.menu").all_inner_texts() == ["Charts", "Columns"]
    assert "off" in page.get_by_text("Compare", exact=True).get_attribute("class")
    assert not page.locator(".table-wrap").is_visible()
    held.pop().continue_()
    drawn(page, 5)
    for kind, address in (("workflows", "workflows/demo-1"), ("compare", "compare?runs=full-1,hybrid-2")):
        page.route(
            f"**/api/{kind}*/**" if kind == "workflows" else f"**/api/{kind}?*", lambda route: held.append(route)
        )
        page.goto(f"{site.address}/{address}")
        page.locator(".loading", has_text="Reading the").wait_for()
        assert page.locator("h1").is_visible()
        assert not page.locator(".table-wrap, .graph").first.is_visible()
    page.unroute_all(behavior="ignoreErrors")


def test_long_names_leave_room_for_numbers(browser, tmp_path):
    store = ResultsStore(Storage(str(tmp_path / "store")))
    runs = [(f"run{n}-" + "a-very-long-name-" * 8)[:125] for n in range(3)]
    for run in runs:
        add_run(store, run, start=time.time() - 500)
    with visiting(browser, tmp_path / "store") as (page, address):
        for path, wide in (("/", "table.runs"), (f"/compare?runs={','.join(runs)}", "table.compare")):
            page.goto(address + path)
            page.locator(f"{wide} tr").nth(3).wait_for()
            width = page.evaluate(f"document.querySelector('{wide}').getBoundingClientRect().width")
            assert width <= 1280, path  # asked at once: Compare is drawn anew when p-values have come
        page.set_viewport_size({"width": 400, "height": 800})  # a name stays in sight while the rest is scrolled
        for path, name in (("/", "table.runs tbody th"), (f"/compare?runs={','.join(runs)}", "table.compare tbody th")):
            page.goto(address + path)
            page.locator(name).nth(1).wait_for()
            scrolled, x = page.evaluate(f"""() => {{
                const cell = document.querySelectorAll("{name}")[1], wrap = cell.closest(".table-wrap");
                wrap.scrollLeft = 1000;
                return [wrap.scrollLeft, cell.getBoundingClientRect().x];
            }}""")
            assert scrolled > 20, path
            assert 0 <= x < 60, path
        page.goto(address)
        drawn(page, 5)
        assert len(set(row_colours(page))) == 3
        page.get_by_label("mean of seeds").check()  # these runs do not even differ in a seed
        until(
            page, "document.querySelector('figure').figure.option().series.some(({ members }) => members?.length === 3)"
        )
        until(
            page, "document.querySelector('figure').figure.option().series.length === 3"
        )  # with both ends of the band
        assert page.url.endswith("?seeds=1")
        assert len(set(row_colours(page))) == 1


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
    assert table.locator("tr", has_text="validation/perplexity").locator("small").inner_text() == "−9.1 %"
    page.get_by_label("Compare with hybrid-2").click()
    page.wait_for_url("**/compare?runs=hybrid-2,full-1")
    table.locator("tr", has_text="validation/perplexity").locator("small", has_text="+10.0 %").wait_for()
    page.get_by_label("Take hybrid-2 out").click()
    page.get_by_text("Select two or more runs").wait_for()


@pytest.mark.parametrize(
    ("differ", "ranked"), [("seed", {"loss", "ce"}), ("type", {"ce"}), ("loops", set()), ("steps", set())]
)
def test_compared_training_losses_are_ranked_where_they_are_one_quantity(page, site, differ, ranked):
    other = {"type": {"type": "exit_gate"}, "loops": {"loops": [1, 4]}}.get(differ, {})
    for seed, objective in enumerate(({}, other)):
        train = {"seed": seed, "objective": {"type": "next_token"} | objective}
        with site.store.create_run(f"{differ}-{seed}", {"config": {"train": train}}) as writer:
            writer.log(2 if differ == "steps" and seed else 1, {"loss": 2.0 + seed, "ce": 1.0 + seed})
    page.goto(f"{site.address}/compare?runs={differ}-0,{differ}-1")
    rows = page.locator("table.compare tr")
    rows.first.wait_for()
    row = {name: rows.filter(has=page.get_by_text(name, exact=True)) for name in ("loss", "ce")}
    assert {name for name in row if row[name].locator(".best").count()} == ranked
    assert row["loss"].locator("td").count() == 2
    last = rows.filter(has=page.get_by_text("step", exact=True)).locator("td").all_inner_texts()
    assert last == (["1", "2"] if differ == "steps" else ["1", "1"])


def test_compared_evaluations_say_how_sure_they_are(page, site):
    for run, right, of in (("full-1", 0, 8), ("hybrid-2", 7, 10)):
        row = {"task": "piqa", "metric": "acc", "value": right / of, "n": of, "stderr": 0.125}
        site.store.log_eval(run, "validation", [row])
        items = [
            {"task": "piqa", "doc_id": i, "doc_hash": f"{i}", "scores": {"acc": int(i < right)}} for i in range(of)
        ]
        for task in ("piqa", "copa"):
            text = "\n".join(json.dumps(item | {"task": task}) for item in items)
            site.store.storage.write_bytes(f"evals/{run}/e1/harness/loops-1/samples/{task}.jsonl", text.encode())
    site.store.log_eval("full-1", "validation", [row | {"task": "copa"}])  # the other's evaluation was cut off
    for run, value in (("full-1", 1e-4), ("hybrid-2", 0.9)):
        site.store.log_eval(run, "validation", [{"task": "far", "metric": "off", "value": value}])
    page.goto(f"{site.address}/compare?runs=full-1,hybrid-2")
    row = page.locator("table.compare tr", has_text="validation/piqa/acc")
    row.locator("small.sure").wait_for()
    assert row.locator("td").all_inner_texts() == ["0± 0.138 items", "0.7± 0.1310 itemsp = 0.0162 items only in one"]
    assert row.locator(".best").count() == 0  # of other items
    assert page.locator("table.compare tr", has_text="copa/acc").locator("td").last.inner_text() == "–"
    assert page.locator("table.compare tr", has_text="far/off").locator("small").inner_text() == "× 9,000"
    assert "one standard error" in page.locator("main > .notes").inner_text()


def test_a_result_keeps_its_digits_beside_a_count(page, site):
    rows = [{"task": "sciq", "metric": metric, "value": value} for metric, value in (("acc", 0.4375), ("cut", 140.0))]
    site.store.log_eval("live-4", "validation", rows)
    page.goto(f"{site.address}/runs/live-4")
    row = page.get_by_role("region", name="Evaluations").locator("tr", has_text="acc")
    assert row.locator("td.num").first.inner_text() == "0.4375"
    page.get_by_role("region", name="Evaluations").get_by_role("button", name="value").click()
    row.locator("xpath=preceding-sibling::tr", has_text="cut").wait_for()  # the largest first


def test_the_digits_of_a_column_are_those_of_its_usual_values(page, site):
    page.goto(f"{site.address}/static/icon.svg")
    for values, shown in (
        ([2.38333, 2.04019, 3.0, 700.71, None, "NaN"], ["2.3833", "2.0402", "3.0000", "700.7100", "–", "NaN"]),
        ([2.4, 3.1, 1.5e7], ["2.4", "3.1", "15M"]),  # of runs that have diverged
        ([1590.0, 1234.56, 2e6], ["1,590", "1,235", "2,000,000"]),
        ([0.52, 0.61, 5000.5, 6000.0, 7000.0], ["0.52", "0.61", "5,000.5", "6,000", "7,000"]),
    ):
        told = "async (values) => values.map((await import('/static/chart.js')).aligned(values, 4))"
        assert page.evaluate(told, values) == shown


def test_columns_and_charts_are_chosen_one_after_the_other(page, site):
    page.goto(site.address)
    drawn(page, 5)
    for menu, first, second, kept in (
        ("Columns", "tokens_per_s", "loss", r"cols=(?!.*\bloss\b)(?!.*tokens_per_s)"),
        ("Charts", "grad_norm", "lr", r"charts=loss,tokens_per_s,step_time($|&)"),
    ):
        page.locator("summary", has_text=menu).click()
        sheet = page.locator("details.menu[open]")
        sheet.get_by_label(first, exact=True).click()
        sheet.get_by_label(second, exact=True).click()  # the menu still has the focus: it has not been drawn anew
        page.wait_for_url(re.compile(kept))
        if menu == "Columns":
            page.keyboard.press("Escape")
            assert page.evaluate("document.activeElement.textContent") == menu
        else:
            page.locator("table.runs thead").click(position={"x": 3, "y": 3})
        assert page.locator("details.menu[open]").count() == 0
    until(page, "document.querySelectorAll('.tiles > figure').length === 3")
    copied = page.url
    page.goto(f"{site.address}/workflows")
    page.goto(copied)
    until(page, "document.querySelectorAll('.tiles > figure[data-ready]').length === 3")


def test_a_run_that_was_cut_off_says_why_and_what_to_do(page, site):
    root = site.store.storage
    now = time.time()
    writer = add_run(site.store, "cut-9", start=now - 400, steps=5, end=None)
    site.store.log_event("cut-9", "rollback", {"step": 4, "to": None, "message": "step 4: loss nan"})
    root.write_json("steps/cut-9/spec.json", {"name": "pretrain", "config": {}, "needs": {}})
    attempt(root, "cut-9", 1, "interrupted", now - 400, error="asked to stop")
    site.store.log_note("cut-9", "stopped for <b>node-7</b>", "ada")
    page.goto(f"{site.address}/?q=node-7")
    page.locator("tr", has_text="cut-9").locator("td[title='stopped for <b>node-7</b>']").wait_for()
    page.goto(f"{site.address}/runs/cut-9")
    page.locator(".notice.warn", has_text="This run was interrupted").wait_for()
    told = page.locator("main").inner_text()
    assert "asked to stop" in told
    assert "stopped for <b>node-7</b> ada, " in told
    assert "Run the same command again: it resumes from the last checkpoint." in told
    assert "step 4: loss nan; went back to the start" in told
    assert page.locator(".page-head .status").inner_text() == "interrupted"
    assert "remaining" not in told
    writer.close(state="failed")
    attempt(root, "cut-9", 2, "failed", now - 100, error="lower train.lr")
    page.locator(".notice.error", has_text="lower train.lr").wait_for()
