"""Figures in a real browser: drawn, parametrised by their address, exported, as tables, beside the paper's."""

from __future__ import annotations

import csv
import math
from pathlib import Path

import pytest

from lt2_platform.results.store import ResultsStore
from lt2_platform.storage import Storage
from tests.dashboards.conftest import fill_sweep
from tests.dashboards.paper_store import fill_paper

from .conftest import drawn, option, until, visiting

pytestmark = pytest.mark.browser


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


def test_evaluations_that_are_no_numbers_are_shown_as_that(browser, tmp_path):
    store = ResultsStore(Storage(str(tmp_path / "store")))
    store.create_run("diverged", {"config": {}}).close()
    store.log_eval("diverged", "validation", [{"task": "arc_easy", "metric": "acc", "value": math.nan}])
    store.log_eval("diverged", "validation", [{"task": "perplexity", "metric": "perplexity", "value": math.inf}])
    store.log_eval("diverged", "validation", [{"task": "piqa", "metric": "acc", "value": 0.5, "stderr": 0.0625}])
    with visiting(browser, tmp_path / "store") as (page, address):
        page.goto(f"{address}/evaluations")
        page.locator("tr.ours").wait_for()
        assert page.locator("tr.ours").inner_text().split()[:5] == ["diverged", "this", "store", "inf", "NaN"]
        assert page.locator("tr.ours td", has_text="50.00").inner_text() == "50.00 ± 6.25"
        assert "±" not in page.locator("table.scores thead").inner_text()
        ordered = "import('/static/chart.js').then(({ sorted }) => sorted(%s, { column: 0, down: %s }).rows.flat())"
        column = '{ columns: ["a"], rows: [[3], ["NaN"], [null], [-20], [100]] }'
        assert page.evaluate(ordered % (column, "false")) == [-20, 3, 100, "NaN", None]
        assert page.evaluate(ordered % (column, "true")) == ["NaN", 100, 3, -20, None]
        drawn(page)


def test_a_column_of_different_kinds_keeps_the_digits_of_each(browser, tmp_path):
    store = ResultsStore(Storage(str(tmp_path / "store")))
    store.create_run("one", {"config": {"train": {"lr": 1e-3}}}).close()
    rows = [{"metric": "decode_tokens_per_s", "value": 1044.13}, {"metric": "acc", "value": 2 / 3}]
    store.log_eval("one", "validation", rows)
    with visiting(browser, tmp_path / "store") as (page, address):
        page.goto(f"{address}/runs/one")
        page.locator(".panel tbody tr").nth(1).wait_for()
        assert page.locator(".panel tbody td.num").all_inner_texts() == ["1,044.13", "0.666667"]
        page.set_viewport_size({"width": 1900, "height": 900})
        ends = [box["x"] + box["width"] for box in (panel.bounding_box() for panel in page.locator(".panel").all())]
        assert ends[-1] == pytest.approx(ends[0], abs=1)  # settings and the like share the page's width
        brief = "import('/static/format.js').then(({ brief }) => %s.map(brief))"
        texts = ["0.0025986667263121865", "-0.1234567891", "0.001", "1:4", "1e-06", "gdn", "64"]
        assert page.evaluate(brief % texts) == ["0.00259867", "-0.123457", "0.001", "1:4", "1e-06", "gdn", "64"]
        durations = "import('/static/format.js').then(({ duration }) => [59.7, 119.7, 3599.9, 7260].map(duration))"
        assert page.evaluate(durations) == ["1 min 0 s", "2 min 0 s", "1 h 0 min", "2 h 1 min"]
        axis = "themed({ xAxis: {}, yAxis: { type: 'value' }, series: [] }, LIGHT).yAxis[0].axisLabel.formatter"
        ticks = (
            f"import('/static/theme.js').then(({{ themed, LIGHT }}) => [1.006, 1.0065, 0.1 + 0.2, 12500].map({axis}))"
        )
        assert page.evaluate(ticks) == ["1.006", "1.0065", "0.3", "12.5k"]


def test_lines_beyond_the_colours_have_another_dash_also_in_the_legend(browser, tmp_path):
    store = ResultsStore(Storage(str(tmp_path / "store")))
    runs = [f"run-{number:02d}" for number in range(12)]
    for run in runs:
        with store.create_run(run, {"config": {}}) as writer:
            for step in range(3):
                writer.log(step, {"loss": 1.0 + step})
    with visiting(browser, tmp_path / "store") as (page, address):
        page.goto(f"{address}/figures/curves?runs={','.join(runs)}")
        drawn(page)
        chart = option(page)
        styles = [(line["lineStyle"]["color"], line["lineStyle"]["type"]) for line in chart["series"]]
        assert len(set(styles)) == 12
        assert [dash for _, dash in styles] == ["solid"] * 10 + ["dashed"] * 2
        icons = [entry.get("icon") for entry in chart["legend"][0]["data"]]
        assert icons[:10] == [None] * 10  # the legend's own
        assert all(icon.startswith("path://") for icon in icons[10:])


MARKS = """import("/static/theme.js").then(({ themed, LIGHT }) => themed({
    yAxis: { type: "category", axisLabel: { width: 420, overflow: "truncate" } }, series: [
    { type: "scatter", name: "ours", symbol: "triangle", data: [] },
    { type: "line", name: "ours", silent: true, data: [[1, 1], [1, 2]] },
    { type: "scatter", name: "theirs", data: [] },
    { type: "line", name: "law", data: [[1, 1]] }, { type: "line", name: "law", data: [[1, 1], [2, 1]] },
]}, LIGHT, { width: 400 }))"""
HINT = """(count) => import("/static/theme.js").then(({ themed, LIGHT }) => {
    const named = { seriesName: "", axisValue: 1, axisDim: "x", color: "" };
    const items = Array.from({ length: count }, (_, at) => ({ ...named, value: [1, at + 1] }));
    return [...themed({ series: [] }, LIGHT).tooltip.formatter(items).children].map((row) => row.textContent);
})"""
LOGARITHMIC = """([values, small]) => import("/static/theme.js").then(({ themed, LIGHT }) => {
    const series = [values.map((value) => [1, value]), [[1, null], [2, 0]]].map((data) => ({ type: "line", data }));
    const [axis] = themed({ yAxis: { type: "log" }, series }, LIGHT, { small }).yAxis;
    const marks = axis.axisLabel.customValues;
    const shown = { min: Math.min(...values), max: Math.max(...values) };
    return marks ? [marks, axis.min(shown), axis.max(shown)] : null;
})"""


def test_what_the_theme_makes_of_marks_tooltips_and_axes(page, site):
    page.goto(f"{site.address}/no-such-page")
    assert page.evaluate(HINT, 20) == ["at 1", *map(str, range(20, 13, -1)), "… 6 more", *map(str, range(7, 0, -1))]
    assert page.evaluate(HINT, 3) == ["at 1", "1", "2", "3"]
    with_marks = page.evaluate(MARKS)
    icons = {entry["name"]: entry["icon"] for entry in with_marks["legend"]["data"]}
    assert (icons["ours"], icons["theirs"]) == ("triangle", "circle")  # of one colour, told apart by their marks
    assert icons["law"].startswith("path://")
    assert [line["showSymbol"] for line in with_marks["series"][3:]] == [True, False]  # one point is no line
    for values, small, marks in (
        ([2.5, 6.0], False, [2, 3, 4, 5, 6, 8]),
        ([2.5, 6.0], True, [2, 5, 10]),  # few in a small chart
        ([0.7, 300.0], False, [0.3, 1, 3, 10, 30, 100, 300, 1000]),
        ([0.001], False, [0.0008, 0.001, 0.0015]),
        ([1e-5, 1e9], False, None),  # ECharts' own
    ):
        assert page.evaluate(LOGARITHMIC, [values, small]) == (marks and [marks, marks[0], marks[-1]])
    label = with_marks["yAxis"][0]["axisLabel"]
    assert (label["width"], label["overflow"]) == (160, "break")  # on a phone, nothing is cut off


NAMES = """(index) => {
    const zr = echarts.getInstanceByDom(document.querySelectorAll("figure")[index].querySelector(".canvas")).getZr();
    const texts = zr.storage.getDisplayList().filter((item) => item.style?.text);
    const upright = texts.filter(({ transform }) => Math.abs(transform?.[1]) > 0.5);
    return upright.map((item) => {
        const box = item.getBoundingRect().clone();
        box.applyTransform(item.transform);
        return [item.style.text, box.x, zr.getWidth() - box.x - box.width];
    });
}"""


def test_the_names_of_axes_are_inside_the_chart(browser, tmp_path):
    fill_paper(tmp_path / "store")
    with visiting(browser, tmp_path / "store") as (page, address):
        charts = [("figures/pareto", 0, 1), ("figures/hybrid", 0, 2), ("figures/depth", 0, 1), ("evaluations", 1, 2)]
        for name, index, axes in [*charts, ("figures", 0, 0)]:  # tiles of the gallery have no room for names
            page.goto(f"{address}/{name}")
            until(page, f"document.querySelectorAll('figure')[{index}].matches('[data-ready]')")
            found = page.evaluate(NAMES, index)
            assert len(found) == axes, name
            assert all(min(left, right) >= 0 for _, left, right in found), (name, found)
        for width, places in ((1400, 2), (400, 1)):  # on a phone panels stand below each other
            page.set_viewport_size({"width": width, "height": 800})
            page.goto(f"{address}/figures/throughput")
            drawn(page)
            assert len({grid["left"] for grid in option(page)["grid"]}) == places


def test_a_control_that_is_left_empty_says_what_that_means(page, site):
    page.goto(f"{site.address}/figures/distillation")
    empty = {name: page.locator(f"input[name={name}]").get_attribute("placeholder") for name in ("teacher", "runs")}
    assert empty == {"teacher": "automatic", "runs": "all"}


def test_a_figure_that_cannot_be_drawn_says_so_where_one_looks(page, site):
    page.goto(f"{site.address}/figures/curves?runs=nope")
    page.locator(".canvas .notice.error", has_text="no run 'nope'").wait_for()


def test_sweeps(page, site):
    page.goto(f"{site.address}/sweeps?metric=validation/perplexity")
    drawn(page, 2)
    until(page, "document.querySelectorAll('.table-wrap').length === 2")
    by_configuration, by_run = page.locator(".table-wrap").all()
    assert [row.split("\t")[-1] for row in by_configuration.locator("tbody tr").all_inner_texts()] == [
        "hybrid-2",
        "full-1",
    ]
    by_configuration.get_by_role("link", name="full-1").wait_for()  # to its page
    by_run.get_by_role("button", name="run").click()
    assert by_run.locator("tbody th, tbody td:first-child").all_inner_texts() == ["hybrid-2", "full-1"]
    by_run.get_by_role("button", name="run").click()
    assert by_run.locator("tbody td:first-child").all_inner_texts() == ["full-1", "hybrid-2"]
    assert option(page, 1)["parallelAxis"][-1]["name"] == "Validation\nperplexity"
    fill_sweep(site.store.storage, 3, failed=0)
    with site.store.create_run("pretrain-00000001", {"workflow": "swept-trial-1", "config": {}}) as writer:
        writer.log(1, {"loss": 1.0})
    page.goto(f"{site.address}/sweeps")
    page.get_by_role("button", name="swept 3").click()
    page.wait_for_url("**/sweeps?q=workflow%7Eswept-")
    by_run.get_by_role("link", name="pretrain-00000001").wait_for()
    assert by_run.locator("tbody tr").count() == 1
    page.get_by_role("button", name="swept 3").click()
    page.wait_for_url("**/sweeps")
    site.store.storage.delete("results/journal/pretrain-00000001.json")


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
    page.keyboard.press("t")  # dark pages too give pictures for paper
    assert page.locator("html").get_attribute("data-theme") == "dark"
    axis = "document.querySelector('figure').figure.option().xAxis[0].axisLabel.color"
    on_screen = page.evaluate(axis)
    page.evaluate("dispatchEvent(new Event('beforeprint'))")
    assert page.locator("html").get_attribute("data-theme") == "light"
    assert page.evaluate(axis) != on_screen  # the chart as well, at once
    page.evaluate("dispatchEvent(new Event('afterprint'))")
    assert page.locator("html").get_attribute("data-theme") == "dark"
    for kind, begins in (("PNG", b"\x89PNG"), ("SVG", b"<svg")):
        with page.expect_download() as download:
            page.get_by_role("button", name=kind).click()
        picture = Path(download.value.path()).read_bytes()
        assert download.value.suggested_filename == f"curves-loss.{kind.lower()}"
        assert picture.startswith(begins)
    assert "#2f6bd8" in picture.decode()  # the light theme's first colour
    assert "Training loss (nats per token)" in picture.decode()  # beside the axis: a picture has no title
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
    page.get_by_text("This store has no data for this figure yet").wait_for()
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
    site.store.log_eval("full-1", "note", [{"note": "the baseline", "time": 1.0}])
    page.set_viewport_size({"width": 390, "height": 800})
    page.goto(f"{site.address}/figures/cost_vs_length")
    page.get_by_text("Choose runs").click()
    page.get_by_label("full-1 the baseline").check()
    assert page.evaluate("document.documentElement.scrollWidth") == 390  # all of the list is on a phone's screen


def test_a_table_asked_for_before_its_numbers_arrive(page, site):
    """Pressing Table while a small chart's answer, which has no rows, is on its way."""
    page.goto(site.address)
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
