"""Figures: what is drawn is what is stored, and what the paper printed."""

from __future__ import annotations

import csv
import io
import json
import math
import re
from pathlib import Path
from statistics import fmean

import pytest
from scipy import stats

from lt2.config import ConfigError
from lt2_dashboards.export import static_html
from lt2_dashboards.figures import FIGURES, Figure, draw
from lt2_dashboards.figures.curves import curves
from lt2_dashboards.figures.downstream import downstream
from lt2_dashboards.figures.figure import describe
from lt2_dashboards.figures.parts.paper import DOWNSTREAM, PATTERNS, RATIOS, TASKS
from lt2_dashboards.queries import Source
from lt2_dashboards.runs import table
from lt2_platform.results.store import ResultsStore
from lt2_platform.storage import Storage
from tests.dashboards.conftest import HOSTILE, add_run, body, layout


@pytest.fixture(scope="module")
def source(root) -> Source:
    return Source(str(root))


def test_downstream_puts_ours_beside_the_paper(source):
    figure = downstream(source)
    rows = {row[0]: row for row in figure.rows}
    assert "full-1" not in rows  # it has a perplexity, but no task
    ours = rows["hybrid-2"]
    assert ours[1:3] == ["this store", 10.0]
    scores = dict(zip(figure.columns[3:], ours[3:]))
    assert scores["ARC-E"] == 50.0
    assert scores["HellaSwag"] == 60.0  # acc_norm where the run has it
    assert scores["average"] == pytest.approx(51.25)
    assert rows["Looped Hybrid (Full+GDN)"][1:11] == ["paper", *DOWNSTREAM["1.3B"]["Looped Hybrid (Full+GDN)"][:-1]]
    assert downstream(source, size="0.6B").rows[-1][0] == "Looped Hybrid (GDN+DSA)"
    assert "Looped RetNet: training diverged in the paper." in downstream(source, size="0.6B").notes


def test_incomplete_rows_have_no_average(source):
    (full, *_) = downstream(source, runs=["full-1"]).rows
    assert full == ["full-1", "this store", 11.0, *[None] * 17]


def test_downstream_shows_errors_and_says_what_is_no_fair_comparison(tmp_path):
    store = ResultsStore(Storage(str(tmp_path)))
    store.create_run("quick", {}).close()
    place = {"task": "hellaswag", "step": 5}
    both = [("acc", 0.4, 0.03), ("acc_norm,none", 0.5, 0.05)]
    few = [{**place, "metric": m, "value": v, "stderr": e, "n": 60, "limit": 60} for m, v, e in both]
    store.log_eval("quick", "validation", few)
    figure = downstream(Source(str(tmp_path)))
    assert figure.rows[0][figure.columns.index("HellaSwag ±")] == pytest.approx(5.0)  # of acc_norm, in percent
    assert figure.rows[0][figure.columns.index("ARC-E ±")] is None
    whiskers, ours = [series for series in figure.option["series"] if series["name"] == "quick"]
    at = figure.option["yAxis"][0]["data"].index("HellaSwag") + 0.5
    assert whiskers["data"] == [[45.0, at], [55.0, at], [None, None]]
    assert ours["data"][0]["detail"] == "± 5"
    assert any("quick (60)" in note for note in figure.notes)
    assert any("not with the paper's" in note for note in figure.notes)
    # Of all items now, and nobody computed an error: neither the old error nor the old limit is left.
    store.log_eval("quick", "validation", [{**place, "metric": "acc_norm", "value": 0.6, "n": 9999, "limit": None}])
    figure = downstream(Source(str(tmp_path)))
    assert figure.rows[0][figure.columns.index("HellaSwag")] == 60.0
    assert figure.rows[0][figure.columns.index("HellaSwag ±")] is None
    assert not any("quick (60)" in note for note in figure.notes)


def test_the_papers_numbers_are_plausible():
    for rows in DOWNSTREAM.values():
        for model, row in rows.items():
            if row is not None:
                assert len(row) == 2 + len(TASKS), model
                assert row[-1] == pytest.approx(fmean(row[1:-1]), abs=3.0), model  # as printed, not recomputed
    assert DOWNSTREAM["1.3B"]["Looped Hybrid (Full+GDN)"][0] == 9.12
    assert DOWNSTREAM["0.6B"]["Transformer"] == (13.14, 63.09, 30.72, 47.43, 69.53, 56.24, 35.6, 68.2, 50.07, 51.34)
    assert min(RATIOS, key=lambda row: row[1])[0] == "1:4"
    assert {name: ppl for name, ppl, _ in PATTERNS}["interleave"] == 9.31


def test_hybrid_ablations_place_runs_by_layout(source):
    figure = draw(FIGURES["hybrid"], source, {"by": "ratio"})
    ours = [row for row in figure.rows if row[1] == "this store"]
    assert ours == [
        ["hybrid-2", "this store", "1:4", None, "T = 1", 10.0, None],
        ["full-1", "this store", "1:0", None, "T = 1", 11.0, None],
    ]
    pattern = draw(FIGURES["hybrid"], source, {"by": "pattern"})
    assert [row for row in pattern.rows if row[1] == "this store"] == [
        ["hybrid-2", "this store", "interleave", None, "T = 1", 10.0, None]
    ]
    assert ["1.3B", "paper", "bookend", None, "T = 4, 1.3B", 9.27, None] in pattern.rows


def test_sweep_has_an_axis_for_every_setting_that_differs(source):
    figure = draw(FIGURES["sweep"], source, {"metric": "loss"})
    names = [axis["name"] for axis in figure.option["parallelAxis"]]
    assert names[-1] == "Training loss"
    assert "lr" in names  # as in the table below
    assert "note" not in names
    assert {row[0] for row in figure.rows} == {"full-1", "hybrid-2", "live-4", "stalled-5"}  # not the NaN
    lr = figure.columns.index("train.lr")
    assert {row[0]: row[lr] for row in figure.rows}["hybrid-2"] == "0.002"
    assert [row[0] for row in draw(FIGURES["sweep"], source, {"q": "lr>1.5e-3"}).rows] == ["hybrid-2"]
    assert "No run" in draw(FIGURES["sweep"], source, {"metric": "nonsense"}).option["empty"]


def test_settings_are_in_the_order_of_their_numbers_and_told_by_their_last_parts(tmp_path):
    store = ResultsStore(Storage(str(tmp_path)))
    for steps, mixer in ((200, "gdn"), (20, "gdn"), (1000, "la"), (None, "la")):
        config = {"mixer": {"type": mixer}, "train": {} if steps is None else {"steps": steps}}
        config |= {"layout": {"type": f"of {mixer}"}}
        with store.create_run(f"r-{steps}", {"config": config}) as writer:
            writer.log(1, {"loss": 1.0 if steps is None else 1.0 / steps})
    axes = {axis["name"]: axis for axis in draw(FIGURES["sweep"], Source(str(tmp_path)), {}).option["parallelAxis"]}
    assert axes["steps"]["data"] == ["20", "200", "1000", "not set"]
    seeds = ResultsStore(Storage(str(tmp_path / "seeds")))
    for seed, rate in ((0, 0.5), (1, 0.75)):
        with seeds.create_run(f"r-{seed}", {"config": {"train": {"seed": seed, "lr": rate}}}) as writer:
            writer.log(1, {"loss": 1.0 + seed})
    drawn = draw(FIGURES["sweep"], Source(seeds.storage.root), {}).option["parallelAxis"]
    assert {axis["name"]: axis.get("minInterval") for axis in drawn} == {
        "seed": 1,
        "lr": None,
        "Training loss": None,
    }
    best, *_, worst = draw(FIGURES["seeds"], Source(str(tmp_path)), {}).option["yAxis"]["data"]
    assert sorted(best.split(", ")) == ["la", "of la", "steps=1000"]
    assert "steps" not in worst


def test_configurations_over_their_seeds_best_first_with_the_odds_of_chance(tmp_path):
    store = ResultsStore(Storage(str(tmp_path)))
    losses = {(1e-3, 0): 2.0, (1e-3, 1): 2.2, (6e-3, 0): 1.0, (6e-3, 1): 1.1, (9e-3, 0): 3.0}
    # 60 settings that differ are more than a table has columns for: they still tell configurations apart.
    more = {f"option_{number}": number for number in range(60)}
    for (lr, seed), loss in losses.items():
        config = {"train": {"lr": lr, "seed": seed}, **{key: value * lr for key, value in more.items()}}
        with store.create_run(f"lr-{lr:g}-{seed}", {"config": config}) as writer:
            writer.log(1, {"loss": loss, "acc": -loss})
    figure = draw(FIGURES["seeds"], Source(str(tmp_path)), {"metric": "loss"})
    results = [row[-5:] for row in figure.rows]
    assert [(n, names) for n, *_, names in results] == [
        (2, "lr-0.006-1, lr-0.006-0"),
        (2, "lr-0.001-1, lr-0.001-0"),
        (1, "lr-0.009-0"),
    ]
    assert results[0][1:4] == [pytest.approx(1.05), pytest.approx(math.sqrt(0.005)), None]
    assert results[1][3] == pytest.approx(stats.ttest_ind([1.0, 1.1], [2.0, 2.2], equal_var=False).pvalue)
    assert results[2][1:4] == [3.0, None, None]  # of one run nobody knows the spread
    spans, means = figure.option["series"]
    assert len(spans["data"]) == 6
    assert [point["value"][0] for point in means["data"]] == [1.05, 2.1, 3.0]
    assert len(set(figure.option["yAxis"]["data"])) == 3
    upwards = draw(FIGURES["seeds"], Source(str(tmp_path)), {"metric": "acc"})
    assert [row[-4] for row in upwards.rows] == [pytest.approx(value) for value in (-1.05, -2.1, -3.0)]
    one = draw(FIGURES["seeds"], Source(str(tmp_path)), {"metric": "loss", "q": "lr=0.001"})
    assert one.option["yAxis"]["data"] == ["all settings"]
    assert "acc2" in draw(FIGURES["seeds"], Source(str(tmp_path)), {"metric": "acc2"}).option["empty"]
    with store.create_run("theirs", {"config": {"evaluated": "folder"}}) as writer:
        writer.log(1, {"loss": 9.0})
    beside = draw(FIGURES["seeds"], Source(str(tmp_path)), {"metric": "loss"})
    assert beside.option["yAxis"]["data"][-1] == "theirs"  # it has no settings


@pytest.mark.parametrize(
    ("query", "message"),
    [
        ({"runs": "full-1", "rnus": "x"}, "curves: no parameter 'rnus'; it takes runs, metric"),
        ({"runs": "full-1", "x": "loss"}, "curves: x='loss': Input should be 'step', 'tokens', 'flops' or 'time'"),
        ({"runs": "full-1", "smooth": "much"}, "curves: smooth='much'"),
        ({"runs": "nope"}, "no run 'nope'"),
        ({"runs": "x" * 201}, "longer than 200"),
    ],
)
def test_wrong_parameters_are_named(source, query, message):
    with pytest.raises(ConfigError) as error:
        draw(curves, source, query)
    assert message in str(error.value)


def test_every_figure_describes_itself_and_is_json(client):
    for name, function in FIGURES.items():
        about = describe(function)
        assert about["about"].endswith((".", ",", ":")) or about["about"]
        figure = body(client.get(f"/api/figures/{name}"))
        assert figure["rows"] or figure["option"]["empty"]
        assert all(len(row) == len(figure["columns"]) for row in figure["rows"])


def test_a_chart_can_be_had_without_its_table(client):
    assert "rows" not in body(client.get("/api/figures/curves?runs=full-1&rows=0"))
    few = body(client.get("/api/figures/curves?runs=full-1&points=1"))
    assert len(few["rows"]) == 50  # the table is not thinned


def test_csv_has_the_whole_table(client, source):
    answer = client.get("/api/figures/curves.csv?runs=full-1&metric=loss")
    assert answer.headers["content-disposition"] == 'attachment; filename="curves-loss.csv"'
    for metric, name in (
        ('a"b\n/../µ c', "curves-a-b-..-c.html"),
        ("☃", "curves.html"),
        ("x" * 99, f"curves-{'x' * 60}.html"),
    ):
        answer_ = client.get("/api/figures/curves.html", params={"runs": "full-1", "metric": metric})
        assert answer_.headers["content-disposition"] == f'attachment; filename="{name}"'
    rows = list(csv.reader(io.StringIO(answer.text)))
    figure = curves(source, runs=["full-1"])
    assert rows[0] == figure.columns
    assert [float(row[4]) for row in rows[1:]] == [row[4] for row in figure.rows]


def test_the_table_of_runs_as_csv_has_all_that_match_with_all_their_results(client, monkeypatch):
    monkeypatch.setattr(table, "PAGE_SIZE", 1)
    answer = client.get("/api/runs.csv?status=finished,failed&sort=-validation/perplexity")
    assert answer.headers["content-disposition"] == 'attachment; filename="runs.csv"'
    rows = list(csv.DictReader(io.StringIO(answer.text)))
    assert [row["run"] for row in rows] == ["full-1", "hybrid-2", "gdn-3"]
    found = rows[1]
    assert (found["status"], found["step"], found["train.lr"], found["model.layout.ratio"]) == (
        "finished",
        "50",
        "0.002",
        "1:4",
    )
    assert (found["validation/perplexity"], found["loss"]) == ("10.0", str(2 + 8 / 50 + 2e-3))
    assert (rows[2]["loss"], rows[0]["downstream/piqa/acc,none"], "model.dim" in found) == ("nan", "", False)
    assert re.fullmatch(r"\d{4}-\d\d-\d\d \d\d:\d\d:\d\d", found["started (UTC)"])
    assert len(client.get("/api/runs.csv?q=lr>1.5e-3").text.splitlines()) == 2
    assert client.get("/api/runs.csv?q=foo=1").status_code == 400


def test_the_figure_of_the_documentation_works(source):
    text = (Path(__file__).parents[3] / "docs" / "dashboard.md").read_text()
    (code,) = re.findall(r"```python\n(.*?)```", text, re.DOTALL)
    names: dict = {}
    exec(compile(code, "docs/dashboard.md", "exec"), names)
    figure = draw(names["loss_by_lr"], source, {})
    assert {row[0] for row in figure.rows} >= {"full-1", "hybrid-2"}
    assert figure.rows[0][1] == 1e-3
    assert [row[0] for row in draw(names["loss_by_lr"], source, {"runs": "full-1"}).rows] == ["full-1"]


def test_csv_cells_cannot_become_formulas():
    figure = Figure("t", {}, ["=a"], lambda: [["=1+1"], ["@x"], ["-x"], [-1.5], ["fine"]])
    assert figure.csv().splitlines() == ["'=a", "'=1+1", "'@x", "'-x", "-1.5", "fine"]


def test_html_export_stands_alone_and_escapes(tmp_path):
    store = ResultsStore(Source(str(tmp_path)).storage)
    add_run(store, "r", start=0.0, layout=layout("gdn"))
    metric = f"</script>{HOSTILE}"
    with store.create_run("s", {"config": {}}) as writer:
        writer.log(1, {metric: 1.0})
    page = static_html(draw(curves, Source(str(tmp_path)), {"runs": "s", "metric": metric}), origin=HOSTILE)
    assert HOSTILE not in page
    assert page.count("</script>") == 2  # the two that belong there
    assert not re.search(r'(src|href)="?(https?:)?//', page.split("<script>")[0])
    option = json.loads(re.search(r"const figure = (.*);", page)[1])
    assert option["option"]["series"][0]["data"] == [[1, 1.0]]
