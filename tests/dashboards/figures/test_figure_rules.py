"""Which runs, depths and seeds figures put together, how they call them, and how sure they say they are."""

from __future__ import annotations

from typing import Any

import pytest

from lt2_dashboards.figures.parts.dots import dots
from lt2_dashboards.figures.parts.store import architecture, evaluated
from lt2_dashboards.queries import Source
from lt2_dashboards.runs.page import compare_page, run_page
from lt2_platform.results.store import ResultsStore
from lt2_platform.storage import Storage
from tests.dashboards.drawn import figure, ours, series
from tests.dashboards.paper_store import add, cells, hybrid, readings, scores, uniform


def at_depth(n_loops: int, value: float, *, early_exit: bool = False) -> dict:
    return {"task": "piqa", "metric": "acc", "value": value, "n_loops": n_loops, "early_exit": early_exit}


def test_a_score_at_another_depth_is_not_the_models_own(tmp_path):
    """Wherever it is stored: evaluations while training once kept all depths under one name."""
    store = ResultsStore(Storage(str(tmp_path)))
    rows = [at_depth(n, n / 10) for n in (1, 2, 4, 8)]
    rate = {"metric": "decode_tokens_per_s", "batch_size": 1, "context": 1024, "early_exit": False}
    rates = [rate | {"value": 100.0 / n, "n_loops": n} for n in (4, 8)]
    add(store, "four", uniform("full"), at=100.0, training=rows + rates, depth=rows)
    add(store, "only-eight", uniform("full"), at=200.0, training=[at_depth(8, 0.8)])
    exits = [at_depth(4, 0.4), at_depth(4, 0.5, early_exit=True)]
    add(store, "halting", uniform("full"), at=300.0, halting={"type": "act"}, training=[*exits[::-1]])
    source = Source(str(tmp_path))
    shown = {row[0]: row[6] for row in ours(figure(source, "downstream"))}  # PIQA
    assert shown == {"four": 40.0, "halting": 50.0}
    assert [row[5] for row in figure(source, "throughput").rows if row[0] == "four"] == [25.0]


def test_a_table_over_depths_names_them(tmp_path):
    store = ResultsStore(Storage(str(tmp_path)))
    rows = [at_depth(1, 0.1), at_depth(4, 0.4), at_depth(4, 0.5, early_exit=True)]
    rows.append(rows[-1] | {"value": 0.45, "exit_threshold": 0.6})
    add(store, "four", uniform("full"), at=100.0, depth=rows, diagnostics=readings(4, 5))
    source = Source(str(tmp_path))
    names = [f"depth/piqa/acc/{each}" for each in ("1 loop", "4 loops", "4 loops, early exit")]
    names.append(f"{names[-1]} at 0.6")
    assert [row["key"] for row in compare_page(source, ["four"])["evals"]] == names
    stored = source.snapshot().query("SELECT metric FROM numbers WHERE contains(metric, '/') ORDER BY metric")
    assert [metric for (metric,) in stored] == names


def test_only_runs_that_differ_in_their_seeds_are_averaged(tmp_path):
    """One store holds sweeps over loops and over ratios, of two sizes and two learning rates."""
    store = ResultsStore(Storage(str(tmp_path)))

    def pair(name: str, ppl: float, parameters: int = 1000, *, ratio: str = "1:4", **fields: Any) -> None:
        train = fields.pop("train", {})
        for seed in (0, 1):
            add(store, f"{name}-{seed}", hybrid(ratio=ratio), at=100.0, train=train | {"seed": seed},
                validation=scores(ppl + seed, None, parameters), **fields)  # fmt: skip

    for n_loops in (1, 2, 4, 8):
        pair(f"loops-{n_loops}", 20.0 - n_loops, n_loops=n_loops)
    pair("wider", 9.0, 1010, ratio="1:1", n_loops=2)
    pair("larger", 5.0, 2000, n_loops=2, n_layers=10)
    pair("faster", 30.0, train={"lr": 0.01})
    found = figure(Source(str(tmp_path)), "hybrid")
    means = {(row[2], row[4]): row[5] for row in ours(found) if row[0].startswith("mean of")}
    assert {row[0] for row in ours(found) if row[0].startswith("mean of")} == {"mean of 2"}
    assert means == {
        ("1:4", "T = 1, 1k"): 19.5,
        ("1:4", "T = 2, 1k"): 18.5,
        ("1:1", "T = 2, 1.01k"): 9.5,
        ("1:4", "T = 2, 2k"): 5.5,
        ("1:4", "T = 4, 1k, lr=0.001"): 16.5,
        ("1:4", "T = 4, 1k, lr=0.01"): 30.5,
        ("1:4", "T = 8, 1k"): 12.5,
    }
    whiskers, runs, line = series(found, "this store, T = 2, 1k to 1.01k")
    assert [point and point["value"] for point in line["data"]] == [None, 9.5, 18.5, None, None, None]
    assert line["data"][2]["detail"] == "mean of 2, ± 0.707"
    assert whiskers["data"][3:5] == [["1:1", 8.79289], ["1:1", 10.2071]]
    assert (line["yAxisIndex"], whiskers["yAxisIndex"]) == (1, 1)
    assert {point["name"].partition(":")[0] for point in runs["data"]} == {
        "loops-2-0",
        "loops-2-1",
        "wider-0",
        "wider-1",
    }
    assert {"name": "wider-0: T = 2, 1.01k, attention in 2 of 5 layers (2:3 for 1:1)", "value": ["1:1", 9.0]} in runs[
        "data"
    ]
    drawn = {(each["name"], each["colorIndex"]) for each in found.option["series"] if "colorIndex" in each}
    assert sorted(colour for _, colour in drawn) == [0, 1, 2, 3, 4, 5]  # a line and its runs alike, no two lines
    add(store, "single", hybrid(), at=100.0, n_loops=2, n_layers=15, validation=scores(7.0, None, 3000))
    (alone,) = series(figure(Source(str(tmp_path)), "hybrid"), "this store, T = 2, not repeated")
    assert (len(alone["data"]), alone["colorIndex"]) == (1, 6)


@pytest.mark.parametrize("models", [1, 2, 40])
def test_equal_scores_of_several_models_stand_apart_beside_their_label(models):
    ours = {f"model-{n}": [50.0, 70.0] for n in range(models)}
    drawn = dots(["piqa", "vt"], {}, ours, unit="%", errors={run: [2.0, None] for run in ours})["series"]
    places = [
        [at for _, at in (point["value"] for point in each["data"])] for each in drawn if each["type"] == "scatter"
    ]
    bars = [each["data"][0][1] for each in drawn if each["type"] == "line"]
    for label, found in enumerate(zip(*places)):
        assert len(set(found)) == models
        assert all(label < at < label + 1 for at in found)
        assert sum(found) / models == pytest.approx(label + 0.5)
    assert bars == [first for first, _ in places]


@pytest.mark.parametrize(
    ("layout", "n_layers", "told"),
    [
        (hybrid(ratio="1:6"), 20, "2 of 20 layers (1:9 for 1:6)"),
        (hybrid(ratio="1:4"), 20, "4 of 20 layers"),
        (hybrid(ratio="1:4", pattern="bookend"), 21, "4 of 21 layers (4:17 for 1:4)"),
        (hybrid(ratio="0:1"), 5, "0 of 5 layers"),
        (hybrid(ratio="0:0"), 5, None),
        (hybrid(ratio="many"), 5, None),
        (uniform("gdn"), 5, None),
    ],
)
def test_a_run_tells_in_how_many_layers_its_attention_really_is(tmp_path, layout, n_layers, told):
    add(ResultsStore(Storage(str(tmp_path))), "one", layout, at=1.0, n_layers=n_layers)
    assert run_page(Source(str(tmp_path)), "one")["attention_in"] == told


@pytest.mark.parametrize("name", ["hybrid", "output_gate"])
def test_an_axis_of_this_store_is_there_if_it_has_something_on_it(tmp_path, name):
    paper = figure(Source(str(tmp_path)), name).option
    assert [axis["name"] for axis in paper["yAxis"]] == ["perplexity, paper"]
    assert all("paper" in each["name"] for each in paper["series"])
    for gate in (None, "elementwise"):
        layout = hybrid(gate=gate)
        add(ResultsStore(Storage(str(tmp_path))), f"{gate}-1", layout, at=1.0, validation=scores(9.0, None, 1000))
    assert len(figure(Source(str(tmp_path)), name).option["yAxis"]) == 2


def test_a_gate_is_compared_at_one_depth(tmp_path):
    store = ResultsStore(Storage(str(tmp_path)))
    for n_loops, gate in ((2, None), (4, "elementwise"), (8, None), (8, "elementwise")):
        layout = uniform("mla", gate=gate)
        add(store, f"{gate}-{n_loops}", layout, at=1.0, n_loops=n_loops, validation=scores(9.0, None, 1000))
    assert {row[0] for row in ours(figure(Source(str(tmp_path)), "output_gate"))} == {"None-8", "elementwise-8"}


def test_throughput_has_bars_between_quartiles(tmp_path):
    store = ResultsStore(Storage(str(tmp_path)))
    rows = [row | {"q1": row["value"] - 5.0, "q3": row["value"] + 10.0} for row in cells({(1, 1024): 50.0})]
    add(store, "measured", uniform("gdn"), at=1.0, validation=rows)
    found = figure(Source(str(tmp_path)), "throughput")
    bars, medians = (each for each in series(found, "measured") if each["xAxisIndex"] == 1)
    assert bars["data"][:2] == [[10.0, 45.0], [10.0, 60.0]]
    assert medians["data"][0]["detail"] == "quartiles 45 to 60"
    assert any("quartile" in note for note in found.notes)
    assert not any("quartile" in note for note in figure(Source(str(tmp_path / "none")), "throughput").notes)


@pytest.mark.parametrize(
    ("layout", "n_loops", "title"),
    [
        (uniform("full"), 1, "Transformer"),
        (uniform("full"), 4, "Looped Transformer"),
        (hybrid(), 4, "Looped Hybrid (Full+GDN)"),
        (hybrid("dsa"), 4, "Looped Hybrid (GDN+DSA)"),
        (hybrid("window"), 1, "Hybrid (GDN+Window)"),
        (
            {"type": "random", "attention": {"type": "full"}, "mixer": {"type": "gdn"}},
            4,
            "Looped Random hybrid (Full+GDN)",
        ),
        ({"type": "kept", "attention": {"type": "full"}, "mixer": {"type": "gdn"}}, 4, "Looped Hybrid (Full+GDN)"),
        (uniform("somebodys"), 2, "Looped somebodys"),
    ],
)
def test_architectures_have_the_papers_names(layout, n_loops, title):
    found = architecture({"model": {"layout": layout, "n_loops": n_loops}})
    assert found is not None
    assert found.title == title
    assert architecture({"layout": layout, "n_loops": n_loops}) == found  # configs without a "model"


@pytest.mark.parametrize("config", [{}, {"layout": 3}, {"model": {"layout": {"type": "uniform"}}}, {"model": None}])
def test_configs_without_a_layout_have_no_architecture(config):
    assert architecture(config) is None


def test_depth_has_error_bars_and_names_what_there_is(tmp_path):
    store = ResultsStore(Storage(str(tmp_path)))
    store.create_run("r", {"config": {}}).close()
    row = {"task": "copa", "metric": "acc", "early_exit": False}
    rows = [row | {"n_loops": n, "flops_per_token": 10.0 * n, "value": 0.5, "stderr": 0.125} for n in (1, 2)]
    store.log_eval("r", "depth", rows)
    source = Source(str(tmp_path))
    bars, scores = figure(source, "depth", task="copa", metric="acc").option["series"]
    assert bars["data"][:3] == [[10.0, 0.375], [10.0, 0.625], [None, None]]
    assert [point["detail"] for point in scores["data"]] == ["± 0.125"] * 2
    assert figure(source, "depth").option["empty"].endswith("There are: copa, acc.")


def test_depth_draws_early_exit_at_every_threshold_by_what_it_spent(tmp_path):
    store = ResultsStore(Storage(str(tmp_path)))
    store.create_run("r", {"config": {}}).close()
    row = {"task": "copa", "metric": "acc", "n_loops": 4, "early_exit": True, "value": 0.5}
    spent = {0.9: 30.0, 0.3: 10.0, None: 40.0}
    rows = [row | {"flops_per_token": flops} | ({"exit_threshold": at} if at else {}) for at, flops in spent.items()]
    store.log_eval("r", "depth", rows)
    found = figure(Source(str(tmp_path)), "depth", task="copa", metric="acc")
    points = found.option["series"][-1]["data"]
    assert [point["value"] for point in points] == [[10.0, 0.5], [30.0, 0.5], [40.0, 0.5]]
    assert [point["name"] for point in points] == [
        "r: early exit at 0.3", "r: early exit at 0.9", "r: early exit",
    ]  # fmt: skip
    assert [row[2] for row in found.rows] == ["yes at 0.3", "yes at 0.9", "yes"]


def test_pareto_links_to_the_quality_that_there_is(tmp_path):
    store = ResultsStore(Storage(str(tmp_path)))
    store.create_run("r", {"config": {}}).close()
    store.log_eval("r", "validation", [{"metric": "perplexity", "value": 9.0, "parameters": 1000}])
    found = figure(Source(str(tmp_path)), "pareto")
    assert found.notes[-1] == "1 runs have the perplexity."
    assert found.links == {found.notes[-1]: {"quality": "perplexity"}}


def test_a_perplexity_measured_while_a_run_trained_counts_as_its_accuracies_do(tmp_path):
    store = ResultsStore(Storage(str(tmp_path)))
    store.create_run("r", {"config": {"model": {"n_loops": 2}}}).close()
    place = {"n_loops": 2, "early_exit": False}
    perplexity, accuracy = {"task": "perplexity", "metric": "perplexity"}, {"task": "copa", "metric": "acc"}
    for step, value in ((20, 9.0), (10, 12.0)):
        rows = [perplexity | {"value": value}, accuracy | {"value": 0.5}]
        store.log_eval("r", "training", [place | row | {"step": step} for row in rows])
    (found,) = evaluated(Source(str(tmp_path)).snapshot())
    assert (found.perplexity, found.accuracy("copa")) == (9.0, 50.0)
    store.log_eval("r", "validation", [place | perplexity | {"step": 20, "value": 8.5}])
    (found,) = evaluated(Source(str(tmp_path)).snapshot())
    assert found.perplexity == 8.5


def test_a_run_that_was_measured_on_two_devices_is_a_line_for_each(tmp_path):
    store = ResultsStore(Storage(str(tmp_path)))
    for run, devices in (("both", ("card", "cpu")), ("one", ("cpu",))):
        store.create_run(run, {}).close()
        for rate, device in enumerate(devices, start=1):
            place = {"task": "throughput", "metric": "decode_tokens_per_s", "batch_size": 8, "context": 1024}
            store.log_eval(run, "evaluation", [place | {"value": 100.0 * rate, "device": device}])
    found = figure(Source(str(tmp_path)), "throughput")
    ours = [row for row in found.rows if row[1] == "this store"]
    assert sorted((row[0], row[5], row[8]) for row in ours) == [
        ("both", 100.0, "card"), ("both", 200.0, "cpu"), ("one", 100.0, "cpu")
    ]  # fmt: skip
    lines = [series["name"] for series in found.option["series"] if series.get("type") == "line"]
    assert set(lines) == {"both, card", "both, cpu", "one"}
