"""The figure of losses by position: which rows a line is of, and what stands beside the first line."""

from __future__ import annotations

import json
from typing import Any

import pytest

from lt2_dashboards.figures import Figure
from lt2_dashboards.queries import Source
from lt2_dashboards.runs.page import compare_page
from lt2_platform.results.rows import result_rows
from lt2_platform.results.store import ResultsStore
from lt2_platform.storage import Storage
from tests.dashboards.drawn import figure, series


@pytest.fixture
def store(tmp_path) -> ResultsStore:
    return ResultsStore(Storage(str(tmp_path)))


def curve(*losses: float, n_loops: int = 4, **more: Any) -> list[dict[str, Any]]:
    """Rows of positions 1, 2, 3 to 4, …"""
    ends = [2**power for power in range(len(losses))]
    place = {"task": "positions", "metric": "loss", "n_loops": n_loops, "early_exit": False, "step": 10}
    place |= {"data": "abc", "length": ends[-1]}
    return [
        place | {"value": loss, "first": end // 2 + 1, "position": end, "n": 100 * end, "stderr": 0.1} | more
        for loss, end in zip(losses, ends)
    ]


def add(store: ResultsStore, run: str, *rows: dict[str, Any], seq_len: int = 4, halting: Any = None) -> None:
    config = {"model": {"n_loops": 4, "halting": halting}, "data": {"seq_len": seq_len}}
    store.create_run(run, {"config": config}).close()
    store.log_eval(run, "positions", list(rows))


def drawn(store: ResultsStore, **query: str) -> Figure:
    return figure(Source(store.storage.root), "positions", **query)


def test_lines_over_positions_and_their_distance_from_the_first(store):
    add(store, "a", *curve(3.0, 2.0, 1.5))
    add(store, "b", *curve(3.5, 2.0, 1.25))
    found = drawn(store, runs="b,a")
    upper, lower = series(found, "a")
    assert upper["data"] == [[0.0, 3.0], [1.0, 2.0], [2.0, 1.5]]
    assert lower["data"] == [[0.0, -0.5], [1.0, 0.0], [2.0, 0.25]]
    assert series(found, "b")[1]["data"] == [[0.0, 0.0], [1.0, 0.0], [2.0, 0.0]]
    assert found.option["panels"]["titles"] == ["loss (nats per token)", "above b (nats per token)"]
    assert "markLine" not in series(found, "b")[0]
    assert found.rows[0] == ["b", "4 loops", 1, 1, 3.5, 0.1, 100, None, None]
    assert len(found.rows) == 6
    assert found.columns[-2:] == ["above b", "its standard error"]
    assert [row[-2:] for row in found.rows] == [[None, None]] * 3 + [[-0.5, None], [0.0, None], [0.25, None]]
    assert len(drawn(store, runs="a").columns) == len(drawn(store, runs="a").rows[0]) == 7
    assert drawn(store, runs="a").option["panels"]["titles"] == ["loss (nats per token)"]


def test_distances_have_the_standard_error_of_the_same_spans(store):
    for run, loss, groups in (("a", 2.0, "1.0/1 3.0/1"), ("b", 2.5, "1.2/1 3.8/1"), ("old", 2.2, None)):
        add(store, run, *curve(loss, n=2, **({"groups": groups} if groups else {})))
    found = drawn(store, runs="a,b,old")
    _, whisker, lower = series(found, "b")
    assert lower["data"] == [[0.0, 0.5]]
    assert whisker["data"][:2] == [[0.0, pytest.approx(0.2)], [0.0, pytest.approx(0.8)]]
    assert found.rows[1][-2:] == [0.5, pytest.approx(0.3)]
    assert len(series(found, "a")) == len(series(found, "old")) == 2
    assert any("Whiskers: one standard error of the distance from a" in note for note in found.notes)


def test_a_model_that_diverged_has_no_points_and_no_whiskers(store):
    add(store, "a", *curve(2.0, n=2, groups="1.0/1 3.0/1"))
    add(store, "b", *curve(float("nan"), n=2, groups="1.2/1 nan/1"))
    found = drawn(store, runs="a,b")
    json.dumps(found.option, allow_nan=False)
    assert [point for _, point in series(found, "b")[0]["data"]] == [None]


def test_the_length_of_training_is_marked_where_lines_go_on_beyond_it(store):
    add(store, "a", *curve(3.0, 2.0, 1.5), seq_len=2)
    add(store, "b", *curve(3.5, 2.0, 1.25), seq_len=4)
    found = drawn(store, runs="b,a")
    assert [each.get("markLine") for each in found.option["series"]] == [{"data": [{"xAxis": 1.0}]}, *[None] * 3]
    assert "Dashed: the length of the rows in training." in found.notes
    assert "Dashed: the length of the rows in training." not in drawn(store, runs="b").notes


def test_a_model_is_drawn_as_it_was_trained_and_on_request_at_every_depth(store):
    add(store, "plain-1", *curve(3.0, 2.0), *curve(4.0, 3.5, n_loops=1))
    exits = [curve(2.9, 1.9, early_exit=True), curve(3.1, 2.1, early_exit=True, exit_threshold=0.5)]
    add(store, "exits-1", *curve(3.0, 2.0), *exits[0], *exits[1], halting={"type": "exit_gate"})
    assert [row[1:5:3] for row in drawn(store, runs="plain-1").rows] == [["4 loops", 3.0], ["4 loops", 2.0]]
    assert [row[4] for row in drawn(store, runs="exits-1").rows] == [2.9, 1.9]
    names = [each["name"] for each in drawn(store, runs="plain-1,exits-1", depths="true").option["series"]]
    assert list(dict.fromkeys(names)) == [
        "plain-1: 1 loop",
        "plain-1: 4 loops",
        "exits-1: 4 loops",
        "exits-1: 4 loops, early exit at 0.5",
        "exits-1: 4 loops, early exit",
    ]


def test_a_line_is_of_one_evaluation(store):
    """Of the newest checkpoint: octaves of an older, longer one are not the end of its line."""
    add(store, "a", *curve(3.0, 2.0, 1.0, 0.5, step=5))
    store.log_eval("a", "positions", curve(2.5, 1.5))
    assert [row[4] for row in drawn(store).rows] == [2.5, 1.5]
    store.log_eval("a", "positions", curve(9.0, 9.0, step=7))
    assert [row[4] for row in drawn(store).rows] == [2.5, 1.5]


def test_lines_of_other_spans_have_no_distance(store):
    add(store, "a", *curve(3.0, 2.0))
    for run, other in (("text", {"data": "xyz"}), ("longer", {"length": 8}), ("fewer", {"n": 7})):
        add(store, run, *curve(3.5, 2.5, **other))
    found = drawn(store, runs="a,text,longer,fewer")
    assert [len(series(found, run)[1]["data"]) for run in ("a", "text", "longer", "fewer")] == [2, 0, 0, 0]
    assert "Evaluated on other spans than a, so not in the lower chart: text, longer, fewer." in found.notes
    assert any("different held-out texts (data abc, xyz)" in note for note in found.notes)
    alike = drawn(store, runs="a")
    assert not any("other spans" in note or "several texts" in note for note in alike.notes)


def test_the_newest_runs_are_drawn_and_other_tasks_are_named(store):
    for number in range(10):
        add(store, f"r{number}", *curve(3.0, 2.0))
    add(store, "other", *curve(3.0, 2.0, task="positions-64"))
    assert len({row[0] for row in drawn(store).rows}) == 8
    assert {row[0] for row in drawn(store, task="positions-64").rows} == {"other"}
    nothing = drawn(store, task="mine")
    assert nothing.option["empty"] == (
        "No run has losses by position of the task 'mine' yet. There are: positions, positions-64."
    )
    assert nothing.produce.startswith("lt2 positions RUN")


def test_points_of_a_curve_are_no_results(store):
    add(store, "a", *curve(3.0, 2.0))
    source = Source(store.storage.root)
    assert compare_page(source, ["a"])["evals"] == []
    assert source.snapshot().query("SELECT * FROM numbers") == []
    assert source.snapshot().query("SELECT * FROM own") == []
    assert list(result_rows(store.index())) == []


def test_lines_of_several_numbers_of_loops_say_so(store):
    """Beside the kinds of mixers, which alone may fill a name."""
    kinds = {"kda": "full", "gdn": "window", "la": "full"}
    for loops, (mixer, attention) in enumerate(kinds.items(), start=1):
        layout = {
            "type": "loops" if mixer == "la" else "hybrid",
            "mixer": {"type": mixer},
            "attention": {"type": attention},
        }
        run, config = f"pretrain-{loops}", {"model": {"n_loops": loops, "layout": layout}, "data": {"seq_len": 4}}
        store.create_run(run, {"config": config}).close()
        store.log_eval(run, "positions", curve(2.0, 1.0, n_loops=loops))
    names = {each["name"] for each in drawn(store).option["series"]}  # legends cut what is long
    assert names == {
        "pretrain-1 (n_loops=1, full, kda, hybrid)",
        "pretrain-2 (n_loops=2, window, gdn, hybrid)",
        "pretrain-3 (n_loops=3, full, la, loops)",
    }
