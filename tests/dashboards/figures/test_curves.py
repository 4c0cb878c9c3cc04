"""Training curves: what is drawn is what was logged, by every axis, smoothed and over seeds; gaps are named."""

from __future__ import annotations

import math

import numpy as np
import pytest

from lt2.analysis.accounting import training_flops
from lt2.config import ModelConfig
from lt2_dashboards.figures import FIGURES, Figure, draw
from lt2_dashboards.figures.curves import SEED_MEANS, curves
from lt2_dashboards.figures.parts.names import titled
from lt2_dashboards.figures.parts.seed_means import by_seed, mean_and_deviation
from lt2_dashboards.queries import Source
from lt2_platform.results.store import ResultsStore
from lt2_platform.storage import Storage
from tests.dashboards.conftest import layout


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


def test_without_named_runs_the_newest_are_drawn(source, tmp_path):
    assert list(lines(draw(curves, source, {}))) == ["live-4", "stalled-5", "gdn-3", "hybrid-2", "full-1"]
    assert list(lines(draw(curves, source, {"metric": "tokens"}))) == []
    empty = draw(curves, Source(str(tmp_path)), {})
    assert (empty.option["empty"], empty.produce) == ("No run shown here has logged 'loss'.", "lt2 run quickstart")


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
    assert by_tokens.notes == ["silent is not on this axis: it logged no tokens."]
    steps = curves(source, runs=["once"], points=100)
    assert [at / 256 for at, _ in lines(by_tokens)["once"]] == [step for step, _ in lines(steps)["once"]]
    by_flops = curves(source, runs=runs, x="flops")
    for name, n_loops in (("once", 1), ("thrice", 3)):
        model = ModelConfig.model_validate({**sizes, "n_loops": n_loops})
        assert lines(by_flops)[name][-1][0] == pytest.approx(768_000 * training_flops(model, 64), rel=1e-5)
    assert by_flops.columns[3] == "training FLOPs"
    assert by_flops.option["xAxis"]["name"].startswith("training FLOPs (of the objective, without teachers")
    assert by_flops.rows[0][3] == pytest.approx(
        256 * training_flops(ModelConfig.model_validate(sizes | {"n_loops": 1}), 64)
    )
    assert by_flops.notes[1] == "foreign is not on this axis: its settings say no train.global_batch_size."
    with store.create_run(
        "unknown", {"config": {"model": {"layout": {}}, "train": {"global_batch_size": 1}}}
    ) as writer:
        writer.log(1, {"loss": 1.0, "tokens": 10})
    (note,) = curves(Source(str(tmp_path)), runs=["unknown"], x="flops").notes
    said = "unknown is not on this axis: its model cannot be counted: settings: vocab_size: Field required"
    assert note.startswith(said)


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


@pytest.mark.parametrize(
    ("metric", "title"),
    [
        ("save_stall", "Waiting for checkpoints (s)"),
        ("rho_norm_0", "Norm of rho, loop 1"),
        ("kl_loop_2", "KL to the teacher, loop 3 (nats per token)"),
        ("align_loop_0", "Distance to the attention, loop 1"),
        ("align_layer_0", "Distance to the attention, layer 0"),
        ("mine_0", "mine_0"),
    ],
)
def test_metrics_are_titled_in_words(tmp_path, metric, title):
    store = ResultsStore(Storage(str(tmp_path)))
    with store.create_run("one", {}) as writer:
        writer.log(1, {metric: 0.5})
    assert curves(Source(str(tmp_path)), runs=["one"], metric=metric).title == title


def test_lines_of_one_step_are_called_by_what_they_differ_in(tmp_path):
    store = ResultsStore(Storage(str(tmp_path)))
    for seed, (mixer, ffn_hidden) in enumerate([("gdn", 127), ("gdn", 127), ("kda", 124)]):
        kind = {"model": {"ffn_hidden": ffn_hidden, "gate": None if mixer == "gdn" else "x", "mixer": {"type": mixer}}}
        with store.create_run(f"r-{seed}", {"config": kind | {"train": {"seed": seed}}}) as writer:
            writer.log(1, {"loss": 2.0})
    source, runs = Source(str(tmp_path)), ["r-0", "r-1", "r-2"]
    each = [line["name"] for line in curves(source, runs=runs).option["series"]]
    assert each == [
        "r-0 (gdn, seed=0, ffn_hidden=127)",
        "r-1 (gdn, seed=1, ffn_hidden=127)",
        "r-2 (kda, gate=x, seed=2)",
    ]
    means = list(lines(curves(source, runs=runs, seeds=True)))
    assert means == ["r-0 (gdn, ffn_hidden=127, gate=null) and 1 more seed", "r-2 (kda, gate=x, ffn_hidden=124)"]


@pytest.mark.parametrize(
    ("result", "title"),
    [
        ("validation/perplexity/perplexity", "Validation perplexity"),
        ("validation/perplexity", "Validation perplexity"),
        ("training/perplexity/loss", "Validation loss (nats per token)"),
        ("mine/perplexity/perplexity", "Validation perplexity (mine)"),
        ("depth/gsm8k/exact_match/strict-match/8 loops", "gsm8k exact_match/strict-match, 8 loops"),
        ("downstream/arc_easy/acc,none", "arc_easy acc"),
        ("sweep/sweep-1a2b3c4d/PPL", "sweep-1a2b3c4d PPL"),
        ("distillation/distillation/teacher_kl", "KL to the teacher (nats per token)"),
        ("own/score", "Own score"),
    ],
)
def test_results_are_titled_in_words(result, title):
    assert titled(result) == title


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


def test_runs_of_one_step_are_called_by_what_they_differ_in(tmp_path):
    store, source = ResultsStore(Storage(str(tmp_path))), Source(str(tmp_path))
    for run, lr in (("pretrain-1a", 1e-3), ("pretrain-2b", 2e-3), ("other-3c", 3e-3)):
        with store.create_run(run, {"config": {"train": {"lr": lr}}}) as writer:
            writer.log(1, {"loss": 1.0})
    found = curves(source, runs=["pretrain-1a", "pretrain-2b", "other-3c"])
    assert list(lines(found)) == ["pretrain-1a (lr=0.001)", "pretrain-2b (lr=0.002)", "other-3c"]
    assert [row[0] for row in found.rows] == ["pretrain-1a", "pretrain-2b", "other-3c"]
    assert list(lines(curves(source, runs=["pretrain-1a"]))) == ["pretrain-1a"]


def test_a_run_that_diverged_does_not_set_the_axis_for_the_others(tmp_path):
    store, source = ResultsStore(Storage(str(tmp_path))), Source(str(tmp_path))
    for run, losses in (("good", [6.0, 4.0, 3.0]), ("bad", [6.0, 4.0, 1e9]), ("worse", [6.5, 1e4]), ("one", [7.0])):
        with store.create_run(run, {"config": {}}) as writer:
            for step, loss in enumerate(losses):
                writer.log(step, {"loss": loss, "grad_norm": loss})
    found = curves(source, runs=["good", "bad", "worse", "one"])
    assert (found.option["yAxis"]["max"], found.notes) == (7.0, ["Above the axis: bad, worse."])
    assert found.links == {found.notes[0]: {"full": "1"}}
    for query in ({"full": True}, {"log": True}, {"metric": "grad_norm"}):
        assert "max" not in curves(source, runs=["good", "bad"], **query).option["yAxis"]
    assert "max" not in curves(source, runs=["bad", "worse"]).option["yAxis"]  # nothing else to see
    assert "max" not in curves(source, runs=["good", "one"]).option["yAxis"]


def test_many_lines_have_fewer_points_each(tmp_path):
    store = ResultsStore(Source(str(tmp_path)).storage)
    for number in range(20):
        with store.create_run(f"r{number}", {"config": {}}) as writer:
            for step in range(1_500):
                writer.log(step, {"loss": float(step)})
    drawn = lines(curves(Source(str(tmp_path)), runs=[f"r{number}" for number in range(20)]))
    assert all(200 < len(line) <= 400 for line in drawn.values())
    assert drawn["r0"][-1][0] == 1_499


def test_seeds_of_runs_from_before_a_setting_existed_belong_together():
    new = {"model": {"dim": 8, "rope_scaling": None}, "train": {"seed": 1}}
    old = {"model": {"dim": 8}, "train": {"seed": 0}}
    slow = {"model": {"dim": 8, "rope_scaling": {"type": "linear", "factor": 2.0}}, "train": {"seed": 2}}
    assert by_seed({"old": old, "new": new, "slow": slow}) == [["old", "new"], ["slow"]]
