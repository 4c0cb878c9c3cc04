"""The paper's tables: averages recomputed, contradictions said, ours beside it."""

import math

import pytest

from lt2_platform.evaluate.paper import long_context as paper_recall
from lt2_platform.evaluate.paper.formats import as_csv, as_latex
from lt2_platform.evaluate.paper.main_table import COLUMNS, DOWNSTREAM, TASK_LABELS, average, compared, scores_of


@pytest.mark.parametrize("scale", sorted(DOWNSTREAM))
def test_averages_are_means_and_differences_from_print_are_noted(scale):
    rows = {row["model"]: row for row in compared({}, scale)}
    for model, numbers in DOWNSTREAM[scale].items():
        if numbers is None:
            assert rows[model]["note"] == "training diverged"
            continue
        assert rows[model]["Avg"] == pytest.approx(sum(numbers[1:9]) / 8)
        assert (f"printed {numbers[9]}" in rows[model]["note"]) == (abs(rows[model]["Avg"] - numbers[9]) >= 0.01)


def test_known_contradictions():
    small = {row["model"]: row for row in compared({}, "0.6B")}
    assert small["Transformer"]["Avg"] == pytest.approx(52.61, abs=0.005)
    assert "printed 51.34" in small["Transformer"]["note"]
    large = {row["model"]: row for row in compared({}, "1.3B")}
    assert "average 61.39, PPL 9.31" in large["Looped Hybrid (Full+GDN)"]["note"]


def test_scores_take_the_customary_metric_and_the_later_row():
    rows = [
        {"task": "arc_challenge", "metric": "acc", "value": 0.1},
        {"task": "arc_challenge", "metric": "acc_norm", "value": 0.3},
        {"task": "piqa", "metric": "acc", "value": 0.6},
        {"task": "piqa", "metric": "acc", "value": 0.7},
        {"task": "perplexity", "metric": "perplexity", "value": 11.0},
        {"task": "copa", "metric": "acc", "value": 0.9},
    ]
    assert scores_of(rows) == {"ARC-C": 30.0, "PIQA": 70.0, "PPL": 11.0}
    assert average({"PIQA": 70.0}) is None


def test_neither_a_quick_look_nor_an_older_checkpoint_replaces_full_results():
    whole = {"task": "arc_easy", "metric": "acc", "value": 0.6, "step": 900, "n": 2376, "limit": None}
    others = [
        {**whole, "value": 0.1, "n": 10, "limit": 10},
        {**whole, "value": 0.2, "step": 100},
        {**whole, "value": 0.3, "step": 100, "n": 10, "limit": 10},
    ]
    for other in others:
        assert scores_of([whole, other]) == scores_of([other, whole]) == {"ARC-E": 60.0}
    assert scores_of([whole, *others, {**whole, "value": 0.7}]) == {"ARC-E": 70.0}  # again, the later
    assert scores_of([whole, {**others[0], "step": 901}]) == {"ARC-E": 10.0}  # a newer checkpoint has nothing else
    before = {key: value for key, value in whole.items() if key != "limit"}  # a store of before rows had a limit
    assert scores_of([before, others[0]]) == scores_of([before, {**before, "n": 10, "value": 0.1}]) == {"ARC-E": 60.0}


def test_formats():
    ours = {"my_run": dict.fromkeys(TASK_LABELS, 99.0) | {"PPL": 5.0}}
    rows = compared(ours, "1.3B")
    latex = as_latex(rows, COLUMNS)
    assert r"my\_run & \textbf{5.00} & \textbf{99.00}" in latex
    assert latex.count(r"\\") == len(rows) + 1
    assert latex.count(r"\midrule") == 2  # below the names, and above ours
    header, *_, last = as_csv(rows, COLUMNS).splitlines()
    assert header == f"model,source,{','.join(COLUMNS)},note"
    assert last.startswith("my_run,ours,5.0,99.0")


def test_a_model_that_diverged_takes_nobodys_place_as_the_best():
    rows = [
        {"model": model, "source": "ours", "PPL": value} for model, value in (("a", math.nan), ("b", 5.0), ("c", 0))
    ]
    lines = as_latex(rows, ("PPL",)).splitlines()
    assert [line for line in lines if "textbf" in line] == [r"c & \textbf{0.00} \\"]


def test_the_long_context_table_has_every_printed_number_in_its_column():
    rows = {row["model"]: row for row in paper_recall.compared({})}
    assert len(rows) == 8
    hybrid = rows["Looped Hybrid (GDN+DSA)"]
    assert [hybrid[column] for column in paper_recall.KNOWLEDGE.values()] == [51.6, 48.0, 60.4, 66.9, 33.0, 28.4]
    assert [hybrid.get(f"NIAH-3 {k}k") for k in (1, 2, 4, 8)] == [100.0, 99.6, 60.3, None]
    assert hybrid["Avg"] == pytest.approx((51.6 + 48.0 + 60.4 + 66.9 + 33.0 + 28.4) / 6)


def test_recall_is_averaged_over_the_six_tasks_and_only_then():
    rows = [{"task": task, "metric": "contains", "value": 0.1 * i} for i, task in enumerate(paper_recall.KNOWLEDGE)]
    rows += [{"task": "niah_single_2_4096", "metric": "contains", "value": 0.25}]
    whole = paper_recall.scores_of([*rows, {"task": "swde", "metric": "context_cut", "value": 3}])
    assert (whole["SWDE"], whole["NIAH-2 4k"]) == (0.0, 25.0)
    ours, partial = paper_recall.compared({"whole": whole, "partial": paper_recall.scores_of(rows[1:])})[-2:]
    assert (ours["Avg"], ours["note"]) == (pytest.approx(25.0), "")
    assert (partial["Avg"], partial["note"]) == (None, "no SWDE")
