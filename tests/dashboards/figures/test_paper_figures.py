"""The paper's figures over a store with what each producer writes, and over an empty one."""

from __future__ import annotations

import json
import math

import pytest

from lt2.analysis.accounting import cache_bytes as exact_cache_bytes
from lt2.config import ConfigError, ModelConfig
from lt2_dashboards.figures import FIGURES, training
from lt2_dashboards.figures.cost import PAPER_LAYOUTS, cache_bytes, mixing_flops
from lt2_dashboards.figures.parts import paper as reference
from lt2_dashboards.queries import Source
from lt2_platform.evaluate.harness.tasks.suites import SUITES
from lt2_platform.evaluate.paper import long_context as paper_recall
from lt2_platform.evaluate.paper.main_table import DOWNSTREAM
from lt2_platform.results.store import ResultsStore
from lt2_platform.storage import Storage
from tests.dashboards.drawn import figure, ours, series
from tests.dashboards.paper_store import add, fill_paper, uniform
from tests.lt2.mixers.samples import config as sample_mixer
from tests.lt2.mixers.samples import shipped_types


@pytest.fixture(scope="module")
def source(tmp_path_factory) -> Source:
    root = tmp_path_factory.mktemp("paper")
    fill_paper(root)
    return Source(str(root))


NEEDS_PARAMETERS = {"curves"}
PRODUCED_ELSEWHERE = {"cost_vs_length", "layouts", "sweep", "seeds"}  # drawn from settings and from any runs


@pytest.mark.parametrize("name", sorted(set(FIGURES) - NEEDS_PARAMETERS))
def test_an_empty_store_says_which_command_makes_the_data(name, tmp_path):
    found = figure(Source(str(tmp_path / "none")), name)
    if name not in PRODUCED_ELSEWHERE:
        assert any(command in found.produce for command in ("lt2 ", "scripts/", "python benchmarks/"))
    assert found.rows or found.option["empty"]
    json.dumps(found.option, allow_nan=False)


@pytest.mark.parametrize("name", sorted(set(FIGURES) - NEEDS_PARAMETERS))
def test_with_data_every_figure_draws_it(name, source):
    found = figure(source, name)
    assert found.produce == ""
    assert not found.option.get("empty")
    assert all(len(row) == len(found.columns) for row in found.rows)
    assert any("paper" not in each for each in found.option["series"])
    json.dumps(found.option, allow_nan=False)


def test_pareto_keeps_what_no_smaller_model_beats(source):
    found = figure(source, "pareto")
    # The newest first, a model from elsewhere last; hybrid-b has no accuracies.
    assert [row[0] for row in ours(found)] == ["plain", "wide", "gated", "hybrid-a", "student", "teacher"]
    (frontier,) = series(found, "this store, frontier")
    assert frontier["data"] == [[500.0, 31.0], [1000.0, 51.0], [2000.0, 61.0], [4000.0, 61.0]]
    best = figure(source, "pareto", quality="perplexity")
    (frontier,) = series(best, "this store, frontier")
    assert frontier["data"] == [[500.0, 13.0], [1000.0, 9.0], [2000.0, 8.0], [4000.0, 8.0]]
    paper = {row[0]: row for row in best.rows if row[1] == "paper" and row[3] == 1.3e9}
    assert paper["Looped Hybrid (Full+GDN)"][4] == 9.12
    assert any("Looped Hybrid (Full+GDN)" in note and "PPL 9.31" in note for note in best.notes)


def test_downstream_averages_are_recomputed(source):
    found = figure(source, "downstream", size="0.6B")
    rows = {row[0]: row for row in found.rows}
    printed = DOWNSTREAM["0.6B"]["Transformer"]
    assert rows["Transformer"][found.columns.index("average")] == pytest.approx(math.fsum(printed[1:9]) / 8)
    assert any("prints other averages" in note and "Transformer 51.34" in note for note in found.notes)
    assert rows["hybrid-a"][5] == pytest.approx(58.0)  # acc_norm of HellaSwag
    assert rows["Looped RetNet"][2:] == [None] * 18


def test_depth_follows_the_compute(source):
    found = figure(source, "depth")
    assert [row[:2] + row[4:6] for row in found.rows] == [
        ["hybrid-a", 1, 1e6, 11.0],
        ["hybrid-a", 2, 2e6, 10.0],
        ["hybrid-a", 4, 4e6, 8.0],
    ]
    assert [point["label"]["formatter"] for point in found.option["series"][-1]["data"]] == ["1", "2", "4"]


def test_models_run_at_several_depths_are_told_apart_by_what_they_differ_in(tmp_path):
    store = ResultsStore(Storage(str(tmp_path)))
    for run, loops in (("pretrain-1", None), ("pretrain-2", [1, 4]), ("wide-3", None)):
        row = {"task": "perplexity", "metric": "perplexity", "value": 9.0, "n_loops": 1, "flops_per_token": 1e6}
        store.create_run(run, {"config": {"train": {"objective": {"loops": loops}}}}).close()
        store.log_eval(run, "depth", [row])
    found = figure(Source(store.storage.root), "depth")
    assert sorted(row[0] for row in found.rows) == ["pretrain-1", "pretrain-2", "wide-3"]
    names = [series["name"] for series in found.option["series"]]
    assert sorted(names) == ["pretrain-1 (loops=null)", "pretrain-2 (loops=[1, 4])", "wide-3"]


def test_hybrids_by_ratio_with_repeats_and_by_level(source):
    rows, two = ours(figure(source, "hybrid")), "2 of 5 layers (2:3 for 1:1)"
    assert ["wide", "this store", "1:1", two, "T = 4, 4k", 12.0, None] in rows
    assert ["plain", "this store", "1:0", None, "T = 4, 500", 13.0, None] in rows
    mean = ["mean of 2", "this store", "1:4", None, "T = 4, 1k", 10.5, pytest.approx(0.5**0.5)]
    assert mean in rows  # not the gated, nor the student
    level = figure(source, "hybrid", by="level")
    assert ["narrowing", "this store", "coarse to fine", None, "T = 4, 1k", 10.5, None] in ours(level)
    assert ["1.3B", "paper", "fine to coarse", None, "T = 4, 1.3B", 9.42, None] in level.rows
    average = ours(figure(source, "hybrid", quality="average"))
    assert [
        "wide",
        "this store",
        "1:1",
        "2 of 5 layers (2:3 for 1:1)",
        "T = 4, 4k",
        pytest.approx(41.0),
        None,
    ] in average


def test_the_gate_is_shown_where_both_sides_were_trained(source):
    found = figure(source, "output_gate")
    gates = {row[0]: row[3] for row in ours(found)}
    assert gates == {"gated": "elementwise", "hybrid-a": "none", "hybrid-b": "none"}
    assert ["1.3B", "paper", "Looped Hybrid (GDN+DSA)", "yes", 9.53] in found.rows


def test_throughput_marks_the_last_length_that_fitted(source):
    found = figure(source, "throughput")
    assert found.option["panels"]["titles"] == [
        f"{phase}, batch {batch} (tokens/s)" for batch in (1, 8) for phase in ("prefill", "decode")
    ]
    at_one, at_eight = (
        next(each for each in found.option["series"] if each["name"] == "plain" and each["xAxisIndex"] == panel)
        for panel in (1, 3)
    )
    assert [point["value"] for point in at_one["data"]] == [[10.0, 50.0], [11.0, 40.0]]  # 2^10, 2^11 tokens
    assert {point["symbol"] for point in at_one["data"]} == {"circle"}
    assert [point["symbol"] for point in at_eight["data"]] == ["emptyRect"]
    shown = [(axis["min"], axis["max"]) for axis in found.option["xAxis"]]
    assert shown == [(10, 11), (10, 11), (10, 11), (10, 13)]  # the paper's decode rates at batch 8 stand at 8k
    assert ["plain", "this store", "decode", 8, 2048, None, None, None, "cpu", "yes"] in found.rows
    assert ["Looped Hybrid (GDN+DSA)", "paper", "decode", 8, 8192, 125.0] in [row[:6] for row in found.rows]


@pytest.mark.parametrize("kind", shipped_types())
def test_cache_bytes_are_the_librarys(kind):
    sizes = {"vocab_size": 8, "dim": 64, "num_heads": 4, "n_layers": 2, "n_loops": 3, "max_seq_len": 4096}
    model = ModelConfig.model_validate({**sizes, "layout": {"type": "uniform", "mixer": sample_mixer(kind)}})
    assert cache_bytes(model, 100) == exact_cache_bytes(model, 100)
    assert mixing_flops(model, 100) > 0


def test_cost_by_length_is_linear_where_it_should_be(source):
    found = figure(source, "cost_vs_length", runs="plain")
    table = {(row[0], row[2]): row[3:] for row in found.rows}
    assert table["Looped GDN", 2**20][1] == table["Looped GDN", 2**10][1]
    assert table["Looped GDN", 2**20][0] == pytest.approx(2**10 * table["Looped GDN", 2**10][0])
    assert table["Looped Transformer", 2**20][1] == 4 * 20 * 2 * 2048 * 2 * 2**20  # loops, layers, K and V, width, bf16
    assert table["Transformer", 2**12][1] * 4 == table["Looped Transformer", 2**12][1]
    assert ("plain", 2**10) in table
    assert set(PAPER_LAYOUTS) < {row[0] for row in found.rows}
    with pytest.raises(ConfigError, match="no run 'gone'"):
        figure(source, "cost_vs_length", runs="gone")


def test_layers_from_the_bench(source):
    found = figure(source, "layer_cost", what="decoding")
    assert found.rows[0] == ["bench-mixers-1", "full", 512, 2.0, 50, ""]
    assert series(found, "gdn")[0]["data"] == [[9.0, 2.0], [10.0, 2.0]]


def test_stability_counts_spikes_beside_the_papers_words(source, monkeypatch):
    rows = {row[0]: row for row in figure(source, "stability").rows}
    assert rows["Looped RetNet"][1:] == ["this store", "retnet", 1e-3, pytest.approx(3.0125), 1.0, 9.0, 1, 0,
                                         reference.STABILITY["retnet",]]  # fmt: skip
    assert rows["Looped DeltaNet"][1:3] == ["paper", None]
    assert [row[2] for row in figure(source, "stability", runs="plain,retnet").rows[:2]] == ["plain", "retnet"]
    monkeypatch.setattr(training, "MAX_LINES", 1)
    assert any(note.startswith("Not drawn: Looped") for note in figure(source, "stability").notes)


def test_the_sawtooth_runs_through_the_loops(source):
    found = figure(source, "loop_diagnostics")
    line = next(each for each in found.option["series"] if "plain" in each["name"] and each["xAxisIndex"] == 2)
    assert line["name"] == "plain: Looped Transformer, no gate"
    assert [point["value"] for point in line["data"]] == [[n, float(n)] for n in range(1, 21)]
    assert [mark["xAxis"] for mark in line["markLine"]["data"]] == [5.5, 10.5, 15.5]
    assert series(found, "paper, about 20 times the start")[0]["data"] == [[1, 20.0], [20, 20.0]]
    assert found.rows[0] == ["plain", "none", 1, 1, "full", "first_token_mass", 1.0]


def test_state_recall_by_architecture_and_loops(source):
    found = figure(source, "state_recall")
    assert ours(found) == [["NSA", "this store", 2, 2, 16, "recall-2"]]
    assert ["Hybrid (GDN+Window)", "paper", 8, 5, 128, None] in found.rows
    assert ["Transformer", "paper", "best", 4, 64, None] in found.rows


def test_quality_by_parameters_on_reasoning_with_models_of_elsewhere(source):
    found = figure(source, "pareto", quality="reasoning")
    assert sorted(found.rows) == [
        ["eval-Large-4B-12345678", "this store", "external models", 4e9, pytest.approx(50.0)],
        ["eval-Smol-1B-12345678", "this store", "external models", 1e9, pytest.approx(20.0)],
        ["hybrid-a", "this store", "Looped Hybrid (Full+GDN)", 1000.0, pytest.approx(40.0)],
    ]
    (line,) = series(found, "this store, frontier")
    assert line["data"][:2] == [[1000.0, 40.0], [4e9, 50.0]]
    empty = figure(source, "pareto", quality="average")
    assert "external models" not in {row[2] for row in empty.rows}


def test_layouts_show_every_loop_and_layer(source):
    found = figure(source, "layouts", runs="narrowing,hybrid-a")
    rows = {(row[0], row[2]): row[4] for row in found.rows}
    assert rows["Depth-level (Full+GDN, 1:4)", 4] == "16 GDN, 4 Full"
    assert rows["Loop-level, coarse to fine", 2] == "20 Window 512"
    assert rows["narrowing", 4] == "5 Window 16"
    assert rows["hybrid-a", 1] == "4 GDN, 1 Full"
    panel = found.option["panels"]["titles"].index("hybrid-a")
    drawn = {each["name"]: each["data"] for each in found.option["series"] if each["xAxisIndex"] == panel}
    assert [cell["value"] for cell in drawn["Full"]] == [["5", f"loop {loop}"] for loop in (1, 2, 3, 4)]
    assert len(drawn["GDN"]) == 16


def test_recall_and_ruler(source):
    found = figure(source, "long_context")
    (row,) = ours(found)
    assert row[:3] == ["hybrid-a", "this store", 50.0]
    assert dict(zip(found.columns, row))["NIAH-1 1k"] == 100.0
    assert set(paper_recall.TASKS) == {*SUITES["recall"], *SUITES["needles"]}
    paper = next(row for row in found.rows if row[0] == "Looped GDN")
    at = dict(zip(found.columns, paper))
    assert (at["DROP"], at["NIAH-1 4k"], at["NIAH-1 8k"], at["NIAH-2 1k"], at["NIAH-3 4k"], at["NIAH-3 8k"]) == (
        25.9, 99.8, None, 100, 35.8, None,
    )  # fmt: skip
    ruler = figure(source, "ruler")
    assert ruler.columns[2:] == ["multikey 1", "vt", "average", "multikey 1 ±", "vt ±"]
    assert ruler.rows == [["hybrid-a", "this store", 75.0, 25.0, 50.0, None, 5.0]]
    assert [each["data"][:2] for each in series(ruler, "hybrid-a") if each["type"] == "line"] == [
        [[20.0, 1.5], [30.0, 1.5]]
    ]
    assert dict(zip(found.columns, row))["NIAH-1 1k ±"] == 1.0
    assert "There are results at 1024, 4096 tokens" in figure(source, "ruler", length="8192").option["empty"]


def test_needles_of_other_lengths_than_the_papers_are_shown(tmp_path):
    store = ResultsStore(Storage(str(tmp_path)))
    long = [{"task": f"niah_single_2_{n}", "metric": "contains", "value": v} for n, v in ((512, 0.9), (16384, 0.4))]
    add(store, "a", uniform("full"), at=1.0, validation=long)
    found = figure(Source(str(tmp_path)), "long_context")
    drawn, paper = (dict(zip(found.columns, row, strict=True)) for row in (ours(found)[0], found.rows[-1]))
    assert (drawn["NIAH-2 512"], drawn["NIAH-2 1k"], drawn["NIAH-2 16k"]) == (90.0, None, 40.0)
    assert (paper["NIAH-2 512"], paper["NIAH-2 4k"], paper["NIAH-2 16k"]) == (None, 81, None)
    assert not {"NIAH-1 512", "NIAH-3 16k"} & set(found.columns)  # nobody has them


def test_a_quick_look_at_needles_is_told_where_it_is_drawn(tmp_path):
    store = ResultsStore(Storage(str(tmp_path)))
    needles = [{"task": f"niah_single_1_{n}", "metric": "contains", "value": 0.5} for n in (1024, 4096)]
    add(store, "quick", uniform("full"), at=1.0, validation=[row | {"n": 4, "limit": 4} for row in needles])
    add(store, "whole", uniform("full"), at=2.0, validation=[row | {"n": 500, "limit": None} for row in needles])
    for name in ("long_context", "ruler"):
        notes = figure(Source(str(tmp_path)), name).notes
        assert [note for note in notes if note.startswith("Quick looks") and note.endswith("task: quick (4).")], name


def test_students_are_measured_by_their_teacher(source):
    found = figure(source, "distillation")
    kept = {row[2]: row[4:] for row in found.rows}
    assert kept["perplexity"] == [13.0, 26.0, 50.0, None]  # lower is better
    assert kept["piqa"] == [0.3, 0.15, pytest.approx(50.0), pytest.approx(5.0)]  # its standard error is 0.015
    assert kept["distillation"] == [0.0, 0.25, None, None]
    assert found.option["xAxis"]["max"] == 100  # the teacher's line is on the chart
    assert "Teacher: plain." in found.notes
    assert found.option["series"][0]["markLine"]["data"] == [{"xAxis": 100}]
    other = figure(source, "distillation", teacher="wide", runs="gated")
    assert {row[2]: row[6] for row in other.rows}["piqa"] == pytest.approx(62.5)
    with pytest.raises(ConfigError, match="no evaluation of 'nobody'"):
        figure(source, "distillation", teacher="nobody")


def test_what_is_kept_is_not_cut_off_where_its_error_passes_the_teacher(tmp_path):
    store = ResultsStore(Storage(str(tmp_path)))
    for run, acc in (("plain", 0.40), ("student", 0.38)):
        add(
            store,
            run,
            uniform("full"),
            at=1.0,
            validation=[{"task": "piqa", "metric": "acc", "value": acc, "stderr": 0.03}],
        )
    assert "max" not in figure(Source(str(tmp_path)), "distillation", teacher="plain", runs="student").option["xAxis"]


def test_students_of_one_step_are_told_apart_and_what_cannot_be_kept_is_not_drawn(tmp_path):
    store = ResultsStore(Storage(str(tmp_path)))
    nothing = {"task": "needles", "metric": "contains", "value": 0.0}
    acc = {"task": "piqa", "metric": "acc", "value": 0.4}
    add(store, "teacher-aa", uniform("full"), at=1.0, validation=[acc, nothing])
    kl = [{"task": "distillation", "metric": "teacher_kl", "value": 0.25, "teacher": "teacher-aa"}]
    begun = {"stage2-aa": None, "stage2-bb": None, "stage3-aa": "stage2-aa", "stage3-bb": "stage2-bb", "alone-aa": None}
    for run, start in begun.items():
        train = {"objective": {"k": 8 if run == "stage2-bb" else 64}}
        info = {"models": {"start": f"/s/steps/{start}/out"}} if start else {}
        store.create_run(run, {"config": {"train": train, "sources": {"start": start}}, **info}).close()
        store.log_eval(run, "distillation", kl)
        store.log_eval(run, "validation", [acc, nothing])
    found = figure(Source(str(tmp_path)), "distillation")
    names = {each["name"] for each in found.option["series"]}
    assert names == {
        *("stage2-aa (k=64)", "stage2-bb (k=8)", "stage3-aa (start=stage2-aa)", "stage3-bb (start=stage2-bb)"),
        "alone-aa",
    }
    assert found.option["yAxis"][0]["data"] == ["piqa, acc"]
    assert "Not drawn, because the teacher scores 0: needles, contains." in found.notes
    assert {row[0] for row in found.rows if row[2] == "needles"} == set(begun)
    store.log_eval("teacher-aa", "validation", [acc | {"value": 0.0}])
    empty = figure(Source(str(tmp_path)), "distillation")
    assert "0 on all tasks" in empty.option["empty"]
    assert not empty.produce
