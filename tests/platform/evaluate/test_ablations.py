"""Means over seeds, the paper's numbers beside them, and the tables themselves."""

from __future__ import annotations

import csv
import io
import math

import pytest
from scipy import stats

from lt2.config import ConfigError
from lt2_platform.evaluate import ablations
from lt2_platform.evaluate.paper.main_table import TASKS, compared


def trial(label, ppl, seed=0, state="done", **metrics):
    return {
        "group": "", "label": label, "seed": seed, "state": state, "parameters": 10,
        "metrics": {"perplexity/perplexity": ppl, **metrics} if state == "done" else {},
    }  # fmt: skip


def test_means_spreads_and_the_papers_values():
    rows = ablations.summarize(
        [trial("1:4", 9.0), trial("1:4", 9.5, 1), trial("1:4", 0, 2, "failed"), trial("2:1", 8.0)], "ratio"
    )
    first, second = rows
    assert (first["n"], first["failed"], first["PPL"]) == (2, 1, 9.25)
    assert first["PPL_std"] == pytest.approx(math.sqrt(0.125))
    assert (first["PPL_paper"], first["Avg_paper"]) == (9.31, 61.39)
    assert (second["PPL"], second["PPL_std"], second["PPL_paper"]) == (8.0, None, None)


def test_what_counts_something_is_told_from_measures():
    trials = [trial("a", 9.0, **{"recall/stage": 2, "mean": 1}), trial("a", 8.0, 1, **{"recall/stage": 2, "mean": 2})]
    rows = ablations.summarize([*trials, trial("b", 7.0, **{"odd": math.nan, "recall/stage": 0})], None)
    assert ablations.counts(rows) == {"recall/stage"}


def test_configurations_of_one_label_are_told_apart_by_their_group():
    trials = [trial("gate", 9.0) | {"group": "Looped Transformer"}, trial("gate", 8.0) | {"group": "GDN+DSA"}]
    rows = [(row["group"], row["label"], row["PPL"], row["PPL_paper"]) for row in ablations.summarize(trials, "gate")]
    assert rows == [("Looped Transformer", "gate", 9.0, 9.39), ("GDN+DSA", "gate", 8.0, 9.53)]


@pytest.mark.parametrize("scale", ["0.6B", "1.3B"])
def test_the_averages_of_the_papers_mixers_are_those_of_its_main_table(scale):
    rows = ablations.TABLES[f"mixers-{scale.lower()}"].rows
    main = {row["model"]: round(row["Avg"], 2) for row in compared({}, scale) if "Avg" in row}
    assert {name: average for (_, name), (_, average) in rows.items()} == main


def test_what_the_paper_contradicts_stands_by_its_mixers():
    assert [note.split(":")[0] for note in ablations.TABLES["mixers-1.3b"].notes] == [
        "Looped Hybrid (Full+GDN)",
        "Looped Hybrid (GDN+DSA)",
        "Looped GDN",
    ]
    assert not ablations.TABLES["mixers-0.6b"].notes


def test_the_average_needs_all_eight_tasks():
    scores = {f"{task}/acc": 0.5 for task in TASKS} | {f"{task}/acc_norm": 0.7 for task in TASKS}
    # acc_norm counts for ARC-C, HellaSwag and OBQA
    assert ablations.headline(scores)["Avg"] == pytest.approx((5 * 50 + 3 * 70) / 8)
    del scores["boolq/acc"]
    assert ablations.headline(scores) == {}


def test_a_configuration_without_results_keeps_its_row():
    (row,) = ablations.summarize([trial("1:4", 0, state="failed")], None)
    assert (row["n"], row["failed"], row["PPL"], row["metrics"]) == (0, 1, None, {})
    assert list(csv.DictReader(io.StringIO(ablations.as_csv([row]))))[0]["PPL"] == ""


def test_a_trial_that_the_scheduler_stopped_did_not_fail():
    (row,) = ablations.summarize([trial("a", 2.0), trial("a", 0, 1, "stopped"), trial("a", 0, 2, "failed")], None)
    assert (row["n"], row["stopped"], row["failed"]) == (1, 1, 1)


def test_what_a_trial_measured_before_it_was_stopped_does_not_count():
    values = {"a": (3.0, 3.2), "b": (2.0, 2.1)}
    trials = [trial(name, ppl, i) for name, each in values.items() for i, ppl in enumerate(each)]
    stopped = trial("a", 0, 2, "stopped") | {"metrics": {"perplexity/perplexity": 90.0, "x": 1.0}}
    alone, (row, _) = ablations.summarize(trials, None)[0], ablations.summarize([*trials, stopped], None)
    assert row == alone | {"stopped": 1}


def test_csv_has_every_metric_with_its_spread():
    rows = ablations.summarize([trial("a", 2.0, x=1.0), trial("a", 4.0, 1, x=1.0), trial("b", 3.0)], None)
    first, second = csv.DictReader(io.StringIO(ablations.as_csv(rows)))
    assert (first["perplexity/perplexity"], first["x"], first["x std"]) == ("3.0", "1.0", "0.0")
    assert second["x"] == ""


def test_plus_minus():
    shown = [ablations.plus_minus(*pair) for pair in ((9.314, 0.042), (9.314, None), (None, None))]
    assert shown == ["9.31 ± 0.04", "9.31", ""]


def test_tables_are_those_of_the_paper():
    best = {name: min(table.rows, key=lambda key: table.rows[key][0]) for name, table in ablations.TABLES.items()}
    assert best["ratio"] == ("", "1:4")
    assert best["pattern"] == ("", "bookend")
    assert best["level"] == ("", "random + vote")
    gates = ablations.TABLES["gate"].rows
    deltas = [
        round(gates[model, "gate"][0] - gates[model, "no gate"][0], 2) for model in dict.fromkeys(k[0] for k in gates)
    ]
    assert deltas == [-0.48, -0.28, -0.19]  # as the paper prints them
    with pytest.raises(ConfigError, match="no ablation table 'x'; it has ratio, pattern"):
        ablations.paper_table("x")


def test_rows_say_how_sure_the_best_is_of_being_better():
    values = {"a": (3.0, 3.2), "b": (2.0, 2.1), "c": (9.0,)}
    rows = ablations.summarize(
        [trial(name, ppl, i) for name, each in values.items() for i, ppl in enumerate(each)], None
    )
    expected = stats.ttest_ind(values["a"], values["b"], equal_var=False).pvalue
    assert [row["PPL_p"] for row in rows] == [pytest.approx(expected), None, None]
    assert [row["Avg_p"] for row in rows] == [None] * 3
    assert [ablations.p_text(value) for value in (None, 0.0132, 1e-9)] == ["", "0.013", "<0.001"]


def test_of_averages_the_highest_is_best():
    tasks = lambda value: {f"{task}/{metric}": value for task in TASKS for metric in ("acc", "acc_norm")}  # noqa: E731
    low, high = (
        [trial(name, 5.0, seed, **tasks(value + seed / 100)) for seed in (0, 1)]
        for name, value in (("l", 0.3), ("h", 0.6))
    )
    rows = ablations.summarize([*low, *high], None)
    assert rows[1]["Avg_p"] is None
    assert 0 < rows[0]["Avg_p"] < 0.01


def test_a_trial_that_diverged_is_neither_the_best_nor_like_the_best():
    values = {"a": (math.nan, 3.0), "b": (2.0, 2.1), "c": (math.inf, 2.2)}
    rows = ablations.summarize(
        [trial(name, ppl, i) for name, each in values.items() for i, ppl in enumerate(each)], None
    )
    assert [row["PPL_p"] for row in rows] == [None] * 3
    assert rows[1]["PPL"] == pytest.approx(2.05)
