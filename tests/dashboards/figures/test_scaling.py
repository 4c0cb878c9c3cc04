"""A result over training compute: which runs, how they are grouped, and the law through them."""

from __future__ import annotations

import json
import math
from typing import Any

import numpy as np
import pytest

from lt2.analysis.accounting import training_flops
from lt2.config import ModelConfig
from lt2_dashboards.figures.figure import Figure
from lt2_dashboards.queries import Source
from lt2_platform.results.store import ResultsStore
from lt2_platform.storage import Storage
from tests.dashboards.drawn import figure, series
from tests.dashboards.paper_store import hybrid, uniform

SEQ_LEN, BATCH = 32, 2


@pytest.fixture
def store(tmp_path) -> ResultsStore:
    return ResultsStore(Storage(str(tmp_path)))


def config(layout: dict[str, Any], *, dim: int, n_loops: int = 4, seed: int = 0, **train: Any) -> dict[str, Any]:
    model = {"vocab_size": 300, "dim": dim, "n_layers": 5, "num_heads": 2, "n_loops": n_loops, "layout": layout}
    return {
        "model": model,
        "train": {"global_batch_size": BATCH, "seed": seed, **train},
        "data": {"seq_len": SEQ_LEN, "fingerprint": "x"},
    }


def flops(layout: dict[str, Any], *, dim: int, tokens: float, n_loops: int = 4) -> float:
    model = config(layout, dim=dim, n_loops=n_loops)["model"]
    return training_flops(ModelConfig.model_validate(model), SEQ_LEN) * tokens


def add(store: ResultsStore, run: str, layout: dict[str, Any], loss: float, *, tokens: float, dim: int = 64,
        state: str = "finished", models: dict[str, str] | None = None, **settings: Any) -> None:  # fmt: skip
    info = {"config": config(layout, dim=dim, steps=round(tokens), **settings)} | ({"models": models} if models else {})
    writer = store.create_run(run, info)
    writer.log(10, {"tokens": tokens, "loss": loss + 0.25})
    writer.close(state=state)
    rows = [{"task": "perplexity", "metric": name, "value": value, "n_loops": settings.get("n_loops", 4),
             "early_exit": False} for name, value in (("loss", loss), ("perplexity", math.exp(loss)))]  # fmt: skip
    store.log_eval(run, "validation", rows)


def drawn(store: ResultsStore, **query: str) -> Figure:
    return figure(Source(store.storage.root), "scaling", **query)


def test_a_law_is_found_again(store):
    layout = uniform("full")
    for dim, tokens in ((16, 1e3), (32, 1e4), (64, 1e5)):
        add(store, f"r{dim}", layout, 9.0 * flops(layout, dim=dim, tokens=tokens) ** -0.07, tokens=tokens, dim=dim)
    found = drawn(store)
    assert found.title == "Validation loss (nats per token) by training FLOPs"
    assert [row[2] for row in found.rows] == [
        pytest.approx(flops(layout, dim=dim, tokens=tokens)) for dim, tokens in ((16, 1e3), (32, 1e4), (64, 1e5))
    ]
    assert "Transformer, 4 loops -0.07 ± " in next(note for note in found.notes if "power laws" in note)
    points, curve = series(found, "Transformer, 4 loops")
    assert curve["data"][0] == pytest.approx(points["data"][0]["value"], rel=1e-5)
    assert curve["data"][-1] == pytest.approx(points["data"][-1]["value"], rel=1e-5)
    assert [row[2] for row in drawn(store, x="tokens").rows] == [1e3, 1e4, 1e5]


def test_only_runs_that_no_cheaper_one_of_their_own_beats_bend_the_line(store):
    layout = uniform("gdn")
    for number, (tokens, loss) in enumerate(((1e3, 4.0), (2e3, 4.5), (4e3, 3.0), (4e3, 3.5), (8e3, 2.0), (1.6e4, 2.0))):
        add(store, f"r{number}", layout, loss, tokens=tokens, lr=number)
    found = drawn(store)
    assert [(row[3], row[5]) for row in found.rows] == [
        (4.0, "yes"), (4.5, "no"), (3.0, "yes"), (3.5, "no"), (2.0, "yes"), (2.0, "no"),
    ]  # fmt: skip
    (curve,) = (each for each in found.option["series"] if each["type"] == "line")
    at, values = np.log([1e3, 4e3, 8e3]), np.log([4.0, 3.0, 2.0])
    slope, start = np.polyfit(at, values, 1)
    per_token = flops(layout, dim=64, tokens=1.0)
    for place, value in curve["data"]:
        assert math.log(value) == pytest.approx(start + slope * math.log(place / per_token), abs=1e-5)


def test_seeds_are_one_point_with_a_bar(store):
    for seed, loss in ((0, 2.0), (1, 3.0)):
        add(store, f"s{seed}", uniform("gdn"), loss, tokens=1e3, seed=seed)
    found = drawn(store)
    ((_, _, _, value, deviation, _, runs),) = found.rows
    assert (value, deviation, sorted(runs.split(", "))) == (2.5, pytest.approx(math.sqrt(0.5)), ["s0", "s1"])
    bar, _ = series(found, "GDN, 4 loops")
    assert [point[1] for point in bar["data"][:2]] == [1.79289, 3.20711]  # six digits are drawn


def test_layouts_loops_and_ratios_are_lines_of_their_own_and_sizes_are_not(store):
    add(store, "a", hybrid(ratio="1:4"), 3.0, tokens=1e3)
    add(store, "b", hybrid(ratio="1:1"), 3.0, tokens=1e3)
    add(store, "c", uniform("full"), 3.0, tokens=1e3, n_loops=1)
    add(store, "d", uniform("full", num_heads=2), 3.0, tokens=1e3)
    add(store, "e", uniform("full", num_heads=4), 3.0, tokens=2e3, dim=128)
    found = drawn(store)
    names = {each["name"] for each in found.option["series"]}
    assert {row[0] for row in found.rows} == names  # the table tells them apart, too
    assert names == {
        "Hybrid (Full+GDN), 4 loops (ratio=1:4)", "Hybrid (Full+GDN), 4 loops (ratio=1:1)", "Transformer, 1 loop",
        "Transformer, 4 loops",
    }  # fmt: skip


def test_what_the_best_layout_saves_is_said_where_both_were_measured(store):
    """Half the FLOPs, by construction; nothing is said beyond the range that the cheaper one was measured over."""
    for number in range(3):
        for layout, factor in ((uniform("gdn"), 0.5), (uniform("full"), 1.0)):
            spent = 4.0**number * 1e9
            tokens = factor * spent / flops(layout, dim=64, tokens=1.0)
            add(store, f"{layout['mixer']['type']}{number}", layout, 9.0 * spent**-0.1, tokens=tokens)
    said = "GDN, 4 loops matches the loss of Transformer, 4 loops at 8e+09 training FLOPs with 0.50 of them."
    assert drawn(store).notes[-1] == said
    assert not any("of them." in note for note in drawn(store, q="layout.mixer.type=gdn").notes)


def test_runs_that_are_not_over_or_did_not_begin_by_themselves_are_left_out_and_named(store):
    add(store, "whole", uniform("full"), 3.0, tokens=1e3)
    add(store, "trunk", uniform("full"), 2.5, tokens=2e3, models={"continue_from": "steps/whole"})
    add(store, "cut", uniform("full"), 2.0, tokens=1e3, state="failed")
    add(store, "student", uniform("full"), 2.0, tokens=1e3, models={"teacher": "steps/whole"})
    found = drawn(store)
    assert [row[6] for row in found.rows] == ["whole", "trunk"]
    assert sorted(note for note in found.notes if note.startswith("Left out")) == [
        "Left out, because they have not ended: cut.",
        "Left out, because they start from or learn from other models, whose cost is not counted: student.",
    ]


def test_no_law_through_two_budgets_nor_through_accuracies(store):
    for number in range(3):
        add(store, f"r{number}", uniform("full"), 3.0 - number / 2, tokens=10.0 ** (3 + number))
    store.log_eval("r0", "own", [{"task": "piqa", "metric": "acc", "value": 0.5}])
    assert not any("power laws" in note for note in drawn(store, metric="own/piqa/acc").notes)
    assert not any("power laws" in note for note in drawn(store, metric="validation/perplexity/perplexity").notes)
    assert any("power laws" in note for note in drawn(store).notes)
    assert any("power laws" in note for note in drawn(store, metric="loss").notes)


def test_a_store_without_such_runs_says_how_to_get_some(store):
    found = drawn(store)
    assert found.produce == "lt2 sweep examples/equal_flops.py:scaling"
    assert found.option["empty"].startswith("No finished run that matches and started from scratch has the result")
    assert json.dumps(found.option)
