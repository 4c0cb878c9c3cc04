"""Which result the figures over many runs show, of which runs, and when they refuse to compare them."""

from __future__ import annotations

import math
from typing import Any

import pytest

from lt2_dashboards.figures import FIGURES, draw
from lt2_dashboards.figures.figure import Figure
from lt2_dashboards.figures.parts import chosen
from lt2_dashboards.figures.parts.store import evaluated
from lt2_dashboards.figures.sweep import BEST_TO_WORST
from lt2_dashboards.queries import Source
from lt2_platform.results.store import ResultsStore
from lt2_platform.storage import Storage


@pytest.fixture
def store(tmp_path) -> ResultsStore:
    return ResultsStore(Storage(str(tmp_path)))


def add(store: ResultsStore, run: str, *, objective: str | None = "next_token", seed: int = 0, data: str = "x", **last):
    train: dict[str, Any] = {"seed": seed} | ({"objective": {"type": objective}} if objective else {})
    perplexity = last.pop("perplexity", None)
    with store.create_run(run, {"config": {"train": train, "data": {"fingerprint": data}}}) as writer:
        writer.log(1, last)
        if perplexity is not None:
            store.log_eval(run, "validation", [{"task": "perplexity", "metric": "perplexity", "value": perplexity}])


def figure(store: ResultsStore, name: str = "seeds", **query: str) -> Figure:
    return draw(FIGURES[name], Source(store.storage.root), query)


@pytest.mark.parametrize("name", ["seeds", "sweep"])
def test_losses_of_different_objectives_are_not_ranked(store, name):
    add(store, "a", objective=None, loss=3.0, ce=3.0)  # from before there were several
    add(store, "b", loss=2.9, ce=2.9)
    add(store, "c", objective="distill", loss=0.4, kl=0.4)
    found = figure(store, name)
    assert found.option["empty"].startswith("These runs minimise different things (distill, next_token)")
    assert (found.rows, found.title.split(" by ")[0]) == ([], "Training loss (nats per token)")
    assert len(figure(store, name, q="objective.type!=distill").rows) > 0
    assert len(figure(store, name, metric="ce").rows) > 0


@pytest.mark.parametrize(("metric", "best"), [("ce", "low"), ("accuracy", "high")])
def test_the_best_runs_come_first_and_are_blue_whichever_way_is_better(store, metric, best):
    for seed, (run, value) in enumerate((("middle", 0.5), ("low", 0.25), ("high", 0.75))):
        last: dict[str, Any] = {metric: value}
        add(store, run, seed=seed, **last)
    found = figure(store, "sweep", metric=metric)
    assert [row[0] for row in found.rows] == ["low", "middle", "high"][:: 1 if best == "low" else -1]
    assert found.option["series"][0]["data"][-1]["name"] == best  # over the others
    colours = found.option["visualMap"]["inRange"]["color"]
    assert colours[0 if best == "low" else -1] == BEST_TO_WORST[0]


@pytest.mark.parametrize(
    ("metric", "told"),
    [
        ("loss", "These runs minimise different things (next_token, next_token at [1, 4] loops), so"),
        ("ce", "Steps of these runs have different depths (all loops, [1, 4]), so"),
    ],
)
def test_losses_at_several_depths_are_not_ranked_with_those_at_one(store, metric, told):
    add(store, "a", loss=3.0, ce=3.0)
    train = {"objective": {"type": "next_token", "loops": [1, 4]}}
    with store.create_run("b", {"config": {"train": train, "data": {"fingerprint": "x"}}}) as writer:
        writer.log(1, {"loss": 2.9, "ce": 2.9})
    for name in ("seeds", "sweep"):
        assert figure(store, name, metric=metric).option["empty"].startswith(told)
    assert len(figure(store, metric=metric, q="objective.type=next_token objective.loops~[").rows) == 1


def test_what_most_runs_have_of_the_comparable_results_is_shown(store):
    for seed in (0, 1):
        add(store, f"a{seed}", seed=seed, loss=3.0, validation_loss=3.1)
    assert figure(store).title == "Validation loss (nats per token) by configuration"
    add(store, "evaluated", loss=2.0, perplexity=20.0)
    assert figure(store).title == "Validation loss (nats per token) by configuration"  # one of three has the other
    add(store, "also", loss=2.0, seed=1, perplexity=22.0)
    assert figure(store).title == "Validation perplexity by configuration"
    assert figure(store, metric="loss").title == "Training loss (nats per token) by configuration"


def test_runs_whose_losses_are_no_one_quantity_are_ranked_by_what_few_of_them_have(store):
    for run, objective in (("a", "align"), ("b", "distill"), ("c", "distill")):
        add(store, run, objective=objective, loss=0.4)
    assert figure(store).option["empty"].startswith("These runs minimise different things")
    add(store, "teacher", loss=2.0, perplexity=20.0)
    assert figure(store).title == "Validation perplexity by configuration"
    assert figure(store, metric="loss").option["empty"].startswith("These runs minimise different things")


def test_only_the_runs_of_the_result_that_is_shown_are_looked_up(store, monkeypatch):
    add(store, "a", loss=3.0, validation_loss=3.1, perplexity=22.0)
    looked, plain = [], chosen.matching
    monkeypatch.setattr(
        chosen, "matching", lambda *args, **given: looked.append(given["metric"]) or plain(*args, **given)
    )
    assert [len(figure(store, metric=metric).rows) for metric in ("", "loss")] == [1, 1]
    assert looked == ["validation/perplexity/perplexity", "loss"]


@pytest.mark.parametrize("name", ["seeds", "sweep"])
def test_a_store_without_runs_says_what_makes_some(store, name):
    found = figure(store, name)
    assert (found.option["empty"], found.produce, found.notes) == (
        "No run that matches has the result 'loss'.",
        "lt2 sweep ratio",
        [],
    )
    assert not figure(store, name, q="other").produce


def test_what_does_not_count_is_told(store):
    for seed, loss in enumerate((2.0, math.inf, math.nan)):
        add(store, f"r{seed}", seed=seed, loss=loss)
    open_run = store.create_run("live", {"config": {"train": {"seed": 9}, "data": {"fingerprint": "x"}}})
    open_run.log(1, {"loss": 2.5})
    open_run.flush()
    notes = figure(store).notes
    assert notes[0] == "Left out, because their value is NaN or infinite: r2, r1."
    assert "1 run did not finish; the last logged value is shown." in notes


def test_runs_on_other_data_are_no_repeats_and_their_scale_is_told(store):
    for seed, data in ((0, "x"), (1, "x"), (2, "y")):
        add(store, f"r{seed}", seed=seed, data=data, loss=2.0 + seed)
    found = figure(store)
    assert [row[found.columns.index("names")] for row in found.rows] == ["r1, r0", "r2"]
    assert any(note.startswith("These runs read different data (data.fingerprint)") for note in found.notes)
    assert not any("different data" in note for note in figure(store, q="fingerprint=x").notes)


def test_what_sweeps_recorded_of_the_cost_stands_beside_the_result(store):
    for seed, run in enumerate("abc"):
        add(store, run, seed=seed, loss=2.0)
    assert "training FLOPs" not in figure(store).columns
    for run, flops in (("a", 1e15), ("b", 3e15)):
        store.log_eval(run, "sweep", [{"task": "sweep-1", "metric": "training_flops", "value": flops}])
    found = figure(store)
    (row,) = found.rows
    assert dict(zip(found.columns, row, strict=True))["training FLOPs"] == 2e15
    assert found.option["series"][-1]["data"]


def test_a_best_configuration_of_one_run_is_told(store):
    alone = "The best has only one run, so its uncertainty is unknown: run it with another seed."
    add(store, "a", loss=2.0, data="y")
    assert alone not in figure(store).notes  # there is nothing to compare it with
    for seed in (0, 1):
        add(store, f"b{seed}", loss=3.0 + seed, seed=seed)
    assert alone in figure(store).notes
    add(store, "a1", loss=2.1, data="y", seed=1)
    assert alone not in figure(store).notes


def test_of_cross_entropies_the_lowest_is_best(store):
    add(store, "a", ce=3.0, data="x")
    add(store, "b", ce=2.0, data="y")
    assert [row[-1] for row in figure(store, metric="ce").rows] == ["b", "a"]


def test_curves_of_different_objectives_say_so_and_have_no_unit_that_does_not_hold(store):
    add(store, "plain", loss=3.0)
    add(store, "distilled", objective="distill", loss=0.3)
    add(store, "aligned", objective="align", loss=0.01)
    add(store, "own", objective="mine", loss=7.0)
    titles = {run: figure(store, "curves", runs=run).title for run in ("plain", "distilled", "aligned", "own")}
    in_nats = "Training loss (nats per token)"
    assert titles == {"plain": in_nats, "distilled": in_nats, "aligned": "Training loss", "own": "Training loss"}
    both = figure(store, "curves", runs="plain,distilled")
    assert "Losses of different objectives (distill, next_token) are not comparable." in both.notes
    for run, config in (("theirs", {"evaluated": "folder"}), ("base", {"imported": {"folder": "hub"}})):
        store.create_run(run, {"config": config}).close()  # has no loss to compare
        beside = figure(store, "curves", runs=f"distilled,{run}").notes
        assert not any("not comparable" in note for note in beside)
    units = {row["run"]: row["unit"] for row in store.results() if row["metric"] == "loss"}
    assert units == {"plain": "nats/token", "distilled": "nats/token", "aligned": "", "own": ""}


def test_losses_with_and_without_what_mixers_add_are_told_apart(store):
    add(store, "gdn", loss=3.0, ce=3.0)
    assert not [note for note in figure(store).notes if "cross entropy" in note]
    add(store, "dsa", loss=3.7, ce=2.9)
    for found in (figure(store), figure(store, "curves", metric="loss", runs="gdn,dsa")):
        assert [note for note in found.notes if note.startswith("The loss of dsa is more than cross entropy")]
    assert not [note for note in figure(store, metric="ce").notes if "is more than cross entropy" in note]


def test_a_configurations_label_has_no_more_settings_than_tell_it_apart(store):
    for n_loops in (1, 2, 4):
        for kind in ("gdn", "full"):
            config = {"mixer": {"type": kind}, "loop_residual": n_loops > 1, "n_loops": n_loops}
            with store.create_run(f"{kind}-{n_loops}", {"config": config}) as writer:
                writer.log(1, {"loss": float(n_loops)})
    found = figure(store)
    labels = {f"{kind}, n_loops={n_loops}" for kind in ("gdn", "full") for n_loops in (1, 2, 4)}
    assert set(found.option["yAxis"]["data"]) == labels
    assert "loop_residual" in found.columns  # the table has all


def test_a_setting_is_not_left_out_for_the_width_that_was_matched_by_it(store):
    for name, ratio, width in (("a", "1:1", 134), ("b", "1:4", 128), ("c", "1:6", 127), ("wide", "1:6", 145)):
        with store.create_run(name, {"config": {"layout": {"ratio": ratio}, "ffn_hidden": width}}) as writer:
            writer.log(1, {"loss": 1.0})
    labels = figure(store).option["yAxis"]["data"]
    assert {"ratio=1:1, ffn_hidden=134", "ratio=1:6, ffn_hidden=127", "ratio=1:6, ffn_hidden=145"} < set(labels)


def test_a_word_that_two_kinds_share_is_in_a_label_once(store):
    gate = {"type": "exit_gate"}
    for run, halting, objective in (("a", gate, gate), ("b", None, {"type": "next_token"})):
        config = {"model": {"halting": halting}, "train": {"objective": objective}, "data": {"fingerprint": "x"}}
        with store.create_run(run, {"config": config}) as writer:
            writer.log(1, {"validation_loss": 3.0})
    assert set(figure(store).option["yAxis"]["data"]) == {"exit_gate", "next_token"}


def evaluated_on(data: str | None, n: int, value: float, **more: Any) -> list[dict[str, Any]]:
    row = {"task": "perplexity", "metric": "perplexity", "value": value, "n": n, **more}
    return [row | ({"data": data} if data else {})]


@pytest.mark.parametrize(("name", "query"), [("seeds", {}), ("pareto", {"quality": "perplexity"}), ("hybrid", {})])
def test_perplexities_of_one_name_on_other_text_are_told(store, name, query):
    layout = {"type": "uniform", "mixer": {"type": "full"}}
    for run in ("a", "b"):
        store.create_run(run, {"config": {"layout": layout, "data": {"fingerprint": run}}}).close()
        store.log_eval(run, "validation", evaluated_on("own", 90, 20.0, parameters=7))

    def told() -> list[str]:
        notes = figure(store, name, **query).notes
        return [note for note in notes if "texts" in note or "fingerprint" in note]

    assert told() == []  # trained on other data, and evaluated on the same
    store.log_eval("a", "validation", evaluated_on("own", 90, 20.0, parameters=7, step=2))
    assert told() == []
    store.log_eval("b", "validation", evaluated_on("other", 95, 30.0, parameters=7))
    assert told() == [
        "Evaluated on several texts under one name: b. One of them counts at each depth; `lt2 results RUN` lists all.",
        "Measured on different held-out texts (data other, own), so not comparable.",
    ]


def test_texts_of_older_evaluations_are_told_apart_by_their_tokens(store):
    store.create_run("a", {"config": {}}).close()
    for n in (90, 95, 90):
        store.log_eval("a", "validation", evaluated_on(None, n, 20.0))
    (note, *_) = figure(store).notes
    assert note.startswith("Evaluated on several texts under one name: a.")
    (run,) = evaluated(Source(store.storage.root).snapshot())
    assert run.perplexity == 20.0


def test_a_perplexity_with_a_name_of_its_own_is_no_other_value_of_the_models(store):
    store.create_run("a", {"config": {}}).close()
    store.log_eval(
        "a", "validation", [*evaluated_on("x", 90, 20.0), *evaluated_on("y", 95, 9.0, task="perplexity-32k")]
    )
    (run,) = evaluated(Source(store.storage.root).snapshot())
    assert (run.perplexity, run.scores["perplexity-32k", "perplexity"]) == (20.0, 9.0)


def test_at_each_depth_the_evaluation_that_counts_is_drawn(store):
    store.create_run("a", {"config": {}}).close()
    for n, value in ((90, 20.0), (9, 30.0)):
        store.log_eval("a", "depth", evaluated_on("x", n, value, n_loops=2, flops_per_token=5.0))
    found = figure(store, "depth")
    assert [row[5] for row in found.rows] == [20.0]
    assert any(note.startswith("Evaluated on several texts under one name: a.") for note in found.notes)


def test_runs_without_settings_are_no_repeats_of_each_other(store):
    for run, value in (("a", 20.0), ("b", 9.0)):
        store.create_run(run, {"config": {}}).close()
        store.log_eval(run, "validation", evaluated_on("x", 90, value))
    found = figure(store)
    assert [(row[-1], row[found.columns.index("runs")]) for row in found.rows] == [("b", 1), ("a", 1)]


def test_readings_inside_a_model_are_of_its_newest_checkpoint(store):
    store.create_run("a", {"config": {}}).close()
    for step, value in ((900, 2.0), (100, 1.0)):
        row = {"task": "diagnostics", "metric": "rms", "value": value, "step": step, "loop": 0, "layer": 0}
        store.log_eval("a", "diagnostics", [row])
    assert [row[-1] for row in figure(store, "loop_diagnostics").rows] == [2.0]
