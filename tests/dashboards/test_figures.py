"""Figures: what is drawn is what is stored, and what the paper printed."""

from __future__ import annotations

import csv
import io
import json
import math
import re
from pathlib import Path
from statistics import fmean

import numpy as np
import pytest
from scipy import stats

from lt2.analysis.accounting import training_flops
from lt2.config import ConfigError, ModelConfig
from lt2_dashboards.export import static_html
from lt2_dashboards.figures import FIGURES, Figure, draw
from lt2_dashboards.figures.curves import SEED_MEANS, curves
from lt2_dashboards.figures.downstream import downstream
from lt2_dashboards.figures.figure import describe
from lt2_dashboards.figures.paper import DOWNSTREAM, PATTERNS, RATIOS, TASKS
from lt2_dashboards.figures.seed_means import mean_and_deviation
from lt2_dashboards.queries import Source
from lt2_platform.results.store import ResultsStore
from lt2_platform.storage import Storage

from .conftest import HOSTILE, add_run, body, layout


@pytest.fixture(scope="module")
def source(root) -> Source:
    return Source(str(root))


def lines(figure: Figure) -> dict[str, list]:
    return {series["name"]: series["data"] for series in figure.option["series"] if "band" not in series}


def test_a_curve_is_what_was_logged(source):
    figure = curves(source, runs=["full-1", "hybrid-2"])
    assert list(lines(figure)) == ["full-1", "hybrid-2"]
    expected = [[step, pytest.approx(2 + 8 / step + 1e-3, rel=1e-5)] for step in range(1, 51)]
    assert lines(figure)["full-1"] == expected
    assert figure.columns == ["run", "step", "hours", "min", "mean", "max"]
    assert len(figure.rows) == 100
    assert figure.rows[0][4] == 2 + 8 + 1e-3  # the table has every digit


def test_curve_over_time_and_smoothed(source):
    by_time = lines(curves(source, runs=["full-1"], x="time"))["full-1"]
    assert by_time[35] == [pytest.approx(36 / 3600, rel=1e-4), pytest.approx(2 + 8 / 36 + 1e-3, rel=1e-5)]
    smooth = lines(curves(source, runs=["full-1"], smooth=1))["full-1"]
    first, second = 2 + 8 + 1e-3, 2 + 4 + 1e-3
    assert smooth[0][1] == pytest.approx(first)  # no pull towards zero at the start
    assert smooth[1][1] == pytest.approx((0.5 * first + second) / 1.5, rel=1e-5)


def test_curves_by_tokens_and_by_flops(tmp_path):
    store = ResultsStore(Storage(str(tmp_path)))
    sizes = {"vocab_size": 100, "dim": 32, "n_layers": 2, "num_heads": 2, "layout": layout("gdn")}
    for name, n_loops in (("once", 1), ("thrice", 3)):
        config = {"model": {**sizes, "n_loops": n_loops}, "train": {"global_batch_size": 4}}
        with store.create_run(name, {"config": config}) as writer:
            for step in range(1, 3001):  # more than a curve keeps: points are the ends of buckets
                writer.log(step, {"loss": 1 / step, "tokens": 4 * 64 * step})
    with store.create_run("silent", {}) as writer:
        writer.log(1, {"loss": 1.0})
    with store.create_run("foreign", {"config": {"model": {"layout": {"type": "of another world"}}}}) as writer:
        writer.log(1, {"loss": 1.0, "tokens": 10})
    source, runs = Source(str(tmp_path)), ["once", "thrice", "silent", "foreign"]
    by_tokens = curves(source, runs=runs, x="tokens", points=100)
    assert by_tokens.option["xAxis"]["name"] == "tokens"
    last = [line[-1][0] for line in lines(by_tokens).values()]
    assert last == [768_000, 768_000, 10]
    assert by_tokens.notes == ["silent is not on this axis: it has logged no tokens."]
    steps = curves(source, runs=["once"], points=100)
    assert [at / 256 for at, _ in lines(by_tokens)["once"]] == [step for step, _ in lines(steps)["once"]]
    by_flops = curves(source, runs=runs, x="flops")
    for name, n_loops in (("once", 1), ("thrice", 3)):
        model = ModelConfig.model_validate({**sizes, "n_loops": n_loops})
        assert lines(by_flops)[name][-1][0] == pytest.approx(768_000 * training_flops(model, 64), rel=1e-5)
    assert by_flops.columns[3] == "training FLOPs"
    assert by_flops.option["xAxis"]["name"].startswith("training FLOPs (3 × forward, without teachers")
    assert by_flops.rows[0][3] == pytest.approx(
        256 * training_flops(ModelConfig.model_validate(sizes | {"n_loops": 1}), 64)
    )
    assert by_flops.notes[1] == "foreign is not on this axis: its settings say no train.global_batch_size."
    with store.create_run(
        "unknown", {"config": {"model": {"layout": {}}, "train": {"global_batch_size": 1}}}
    ) as writer:
        writer.log(1, {"loss": 1.0, "tokens": 10})
    (note,) = curves(Source(str(tmp_path)), runs=["unknown"], x="flops").notes
    assert note.startswith("unknown is not on this axis: its model cannot be counted")


def test_runs_that_differ_in_their_seeds_only_are_drawn_as_one(tmp_path):
    store = ResultsStore(Storage(str(tmp_path)))
    for seed, (lr, steps, shift) in enumerate([(1e-3, 4, 0.0), (1e-3, 3, 1.0), (2e-3, 4, 5.0), (1e-3, 4, 2.0)]):
        with store.create_run(f"r{seed}", {"config": {"train": {"lr": lr, "seed": seed}}}) as writer:
            for step in range(1, steps + 1):
                writer.log(step, {"loss": 2.0 * step + shift})
    source, runs = Source(str(tmp_path)), ["r0", "r1", "r2", "r3"]
    figure = curves(source, runs=runs, seeds=True)
    low, wide, mean, alone = figure.option["series"]
    assert (mean["name"], mean["members"], mean["colorIndex"]) == ("r0 and 2 more seeds", ["r0", "r1", "r3"], 0)
    assert mean["data"] == [[1, 3.0], [2, 5.0], [3, 7.0]]  # as far as the shortest goes
    assert low["data"] == [[1, 2.0], [2, 4.0], [3, 6.0]]
    assert wide["data"] == [[1, 2.0], [2, 2.0], [3, 2.0]]  # from one deviation below to one above
    assert low["stackStrategy"] == wide["stackStrategy"] == "all"  # below zero too
    assert (alone["name"], alone["colorIndex"], len(alone["data"])) == ("r2", 2, 4)
    assert figure.notes == [SEED_MEANS]
    assert len(figure.rows) == 15  # of every run by itself
    assert list(lines(curves(source, runs=runs))) == runs
    assert [each["name"] for each in curves(source, runs=runs, seeds=True, log=True).option["series"]] == [
        "r0 and 2 more seeds",
        "r2",
    ]


def test_seeds_that_share_no_step_are_drawn_apart(tmp_path):
    store = ResultsStore(Storage(str(tmp_path)))
    for seed in (0, 1):
        with store.create_run(f"r{seed}", {"config": {"seed": seed}}) as writer:
            writer.log(1 + seed, {"loss": 2.0})
            writer.log(3, {"loss": math.nan, "other": 1.0})
    source = Source(str(tmp_path))
    assert list(lines(curves(source, runs=["r0", "r1"], seeds=True))) == ["r0", "r1"]
    (_, _, one) = curves(source, runs=["r0", "r1"], metric="other", seeds=True).option["series"]
    assert (one["name"], one["data"]) == ("r0 and 1 more seed", [[3, 1.0]])
    thirds = [(np.array([1]), np.array([1 / 3]))] * 3
    assert mean_and_deviation(thirds)[2].tolist() == [0.0]  # and not the rounding of the sum


def test_values_that_cannot_be_drawn_are_counted(source):
    figure = curves(source, runs=["gdn-3", "full-1"])
    assert lines(figure)["gdn-3"][-1] == [11, None]
    assert "gdn-3: 1 value is NaN or infinite and not drawn." in figure.notes
    missing = curves(source, runs=["full-1", "gdn-3"], metric="nonsense")
    assert missing.option["empty"] == "No run shown here has logged 'nonsense'."


def test_the_wait_for_checkpoints_is_titled_in_words(tmp_path):
    store = ResultsStore(Storage(str(tmp_path)))
    with store.create_run("saved", {}) as writer:
        writer.log(1, {"save_stall": 0.5})
    assert curves(Source(str(tmp_path)), runs=["saved"], metric="save_stall").title == "Waiting for checkpoints (s)"


def test_runs_that_were_deleted_do_not_take_the_others_away(source):
    figure = curves(source, runs=["gone", "full-1"])
    assert list(lines(figure)) == ["full-1"]
    assert figure.option["series"][0]["colorIndex"] == 1  # as in the table of runs
    assert figure.notes == ["There is no run 'gone': it may have been deleted."]


def test_only_losses_in_nats_are_said_to_be(tmp_path):
    store = ResultsStore(Storage(str(tmp_path)))
    for name in ("align", "next_token"):
        with store.create_run(name, {"config": {"train": {"objective": {"type": name}}}}) as writer:
            writer.log(1, {"loss": 0.5, "validation_loss": 0.5})
    source = Source(str(tmp_path))
    assert curves(source, runs=["next_token"]).title == "Training loss (nats per token)"
    assert curves(source, runs=["next_token", "align"]).title == "Training loss"
    assert curves(source, runs=["next_token"], metric="validation_loss").title == "Validation loss (nats per token)"


def test_long_curves_show_the_range_and_cut_off_the_start(tmp_path):
    store = ResultsStore(Source(str(tmp_path)).storage)
    with store.create_run("long", {"config": {}}) as writer:
        for step in range(8_000):
            writer.log(step, {"loss": 2 + 100 * math.exp(-step / 20) + (step % 4) * 0.1})
    figure = curves(Source(str(tmp_path)), runs=["long"])
    below, span, line = figure.option["series"]
    assert (below["band"], span["band"]) == (True, True)
    assert below["stack"] == span["stack"]
    assert len(line["data"]) == len(span["data"]) <= 2_000
    assert [value for _, value in span["data"]][-1] == pytest.approx(0.3)
    assert [value for _, value in below["data"]][-1] == pytest.approx(2.0)
    assert 2.1 < figure.option["yAxis"]["max"] < 3
    (note,) = figure.notes
    assert "above the axis" in note
    assert "full" not in note  # a control of the figure's page, and of no other that shows the note
    whole = draw(FIGURES["curves"], Source(str(tmp_path)), {"runs": "long", **figure.links[note]})
    assert whole.notes == []
    assert "max" not in whole.option["yAxis"]
    assert "max" not in curves(Source(str(tmp_path)), runs=["long"], log=True).option["yAxis"]


def test_many_lines_have_fewer_points_each(tmp_path):
    store = ResultsStore(Source(str(tmp_path)).storage)
    for number in range(20):
        with store.create_run(f"r{number}", {"config": {}}) as writer:
            for step in range(1_500):
                writer.log(step, {"loss": float(step)})
    drawn = lines(curves(Source(str(tmp_path)), runs=[f"r{number}" for number in range(20)]))
    assert all(200 < len(line) <= 400 for line in drawn.values())
    assert drawn["r0"][-1][0] == 1_499


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
    assert whiskers["data"] == [[45.0, "HellaSwag"], [55.0, "HellaSwag"], [None, None]]
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
    assert names[-1] == "loss"
    assert "train.lr" in names
    assert "train.note" not in names
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
    assert axes["train.steps"]["data"] == ["20", "200", "1000", "not set"]
    best, *_, worst = draw(FIGURES["seeds"], Source(str(tmp_path)), {}).option["yAxis"]["data"]
    assert sorted(best.split(", ")) == ["layout.type=of la", "mixer.type=la", "steps=1000"]
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


@pytest.mark.parametrize(
    ("query", "message"),
    [
        ({}, "curves: parameter 'runs' is missing"),
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
        runs = "?runs=full-1" if name == "curves" else ""
        figure = body(client.get(f"/api/figures/{name}{runs}"))
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


def test_the_figure_of_the_documentation_works(source):
    text = (Path(__file__).parents[2] / "docs" / "dashboard.md").read_text()
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
