"""Losses by position: against cross entropy written out, over spans that are cut by hand."""

from __future__ import annotations

from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from torch.nn.functional import cross_entropy

from lt2.config import ConfigError
from lt2.voting import vote_steps
from lt2_platform.data.stream import PackedDataset
from lt2_platform.data.tokenizers.tokenize import ByteTokenizer
from lt2_platform.evaluate import positions
from lt2_platform.evaluate.checkpoints import Evaluated
from lt2_platform.evaluate.config import PositionsConfig
from lt2_platform.evaluate.positions import length_for, parts_of, positions_rows, spans
from lt2_platform.evaluate.spans import difference
from lt2_platform.evaluate.tasks import TaskContext, run_tasks
from tests.platform.evaluate.tiny import model
from tests.platform.train.packed import write_dataset

TOKENIZER = {"name": "byte", "sha256": ByteTokenizer().sha256, "vocab_size": 259, "bos_id": 1, "eos_id": 2}


@pytest.fixture
def dataset(tmp_path) -> PackedDataset:
    """Four rows of 13 tokens: 5 of one document, 8 of the next."""
    return PackedDataset(write_dataset(tmp_path / "data", tokenizer=TOKENIZER | {"file": None}), "validation")


def context(dataset) -> TaskContext:
    return TaskContext("memory", ByteTokenizer(), dataset, "unused", lambda values: None)


def by_hand(net, dataset, length: int, **options) -> torch.Tensor:
    """(S, length) nats of the spans of 4 or fewer predicted tokens, each read alone."""
    rows = torch.from_numpy(dataset.batch(range(4))["tokens"])
    starts = [start for begin, end in ((0, 5), (5, 13)) for start in range(begin, end - length, length)]
    tokens = torch.stack([row[start : start + length + 1] for row in rows for start in starts])
    with torch.no_grad():
        losses = [
            cross_entropy(net.logits(net(span[None, :-1], **options).hidden)[0], span[1:], reduction="none")
            for span in tokens
        ]
    return torch.stack(losses)


@pytest.mark.parametrize(("length", "batch_size"), [(3, 8), (4, 3), (2, 1)])
def test_losses_are_those_of_every_span_read_alone(dataset, length, batch_size):
    net = model()
    rows = positions_rows(PositionsConfig(length=length, batch_size=batch_size), net, context(dataset))
    nats = by_hand(net, dataset, length)
    S = len(nats)
    assert 4 * {2: 5, 3: 3, 4: 2}[length] == S
    expected = [("loss", None, nats), ("late_loss", None, nats[:, length // 2 :])]
    ends = {2: [1, 2], 3: [1, 2, 3], 4: [1, 2, 4]}[length]
    expected += [("loss", end, nats[:, begin:end]) for begin, end in zip([0, *ends], ends)]
    assert [(row["metric"], row.get("position")) for row in rows] == [(name, end) for name, end, _ in expected]
    for row, (_, _, part) in zip(rows, expected):
        assert row["value"] == pytest.approx(part.mean().item(), rel=1e-5)
        assert row["n"] == part.numel()
        assert row["stderr"] == pytest.approx(part.mean(1).std().item() / S**0.5, rel=1e-4)
        assert (row["length"], row["unit"], row["data"]) == (length, "nats/token", "f" * 12)


def test_what_is_asked_for_bounds_the_spans(dataset):
    net = model()
    half = PositionsConfig(length=3, batch_size=2, held_out="report")
    some = PositionsConfig(length=3, batch_size=2, max_spans=5)
    for config, kept in ((some, slice(5)), (half, slice(6, 12))):
        rows = positions_rows(config, net, context(dataset))
        nats = by_hand(net, dataset, 3)[kept]  # three of every row
        assert (rows[0]["n"], rows[0]["value"]) == (nats.numel(), pytest.approx(nats.mean().item(), rel=1e-5))


def test_rows_of_one_document_give_one_span_each_by_default(dataset):
    batch = dataset.batch
    whole: Any = SimpleNamespace(**vars(dataset), batch=lambda ids: batch(ids) | {"doc_ids": np.zeros((len(ids), 13))})
    rows = positions_rows(PositionsConfig(), model(), context(whole))
    assert (rows[0]["length"], rows[0]["n"]) == (12, 4 * 12)
    assert [row["position"] for row in rows[2:]] == [1, 2, 4, 8, 12]
    assert [row["first"] for row in rows[2:]] == [1, 2, 3, 5, 9]


def test_the_length_is_halved_until_there_are_spans_enough(dataset, monkeypatch):
    """Documents of 4 and 7 predicted tokens in rows of 12."""
    rows = range(dataset.n_sequences)
    assert length_for(dataset, rows) == 6  # too few in all: the longest of which there is one
    monkeypatch.setattr(positions, "ENOUGH", 12)
    assert length_for(dataset, rows) == 3
    monkeypatch.setattr(positions, "LOOKED_AT", 3)
    assert length_for(dataset, rows) == 6
    monkeypatch.setattr(positions, "ENOUGH", 3)
    assert length_for(dataset, rows) == 6
    (row, *_) = positions_rows(PositionsConfig(), model(), context(dataset))
    assert (row["length"], row["n"]) == (6, 4 * 6)


def test_no_document_of_that_length_names_the_longest(dataset):
    with pytest.raises(
        ConfigError, match="no held-out document has 9 tokens in one row of 13; set the task's length to at most 7, or"
    ):
        positions_rows(PositionsConfig(length=8), model(), context(dataset))
    assert positions_rows(PositionsConfig(length=7), model(), context(dataset))[0]["n"] == 4 * 7


def test_padding_is_no_document():
    ids = np.array([[0, 0, 0, 1, 1, 1, -1, -1, -1]])
    split: Any = SimpleNamespace(batch=lambda rows: {"tokens": np.arange(9)[None], "doc_ids": ids})
    found = [span["tokens"].tolist() for span in spans(split, range(1), 2)]
    assert found == [[0, 1, 2], [3, 4, 5]]


def test_tokens_that_are_not_learned_do_not_count(dataset):
    """Of conversations: spans then count different numbers of tokens, and a position that nobody learns has no row."""
    net, batch = model(), dataset.batch
    learned = np.random.default_rng(0).random((4, 13)) < 0.5
    learned[:, [1, 6]] = False  # the first predicted token of every span
    masked: Any = SimpleNamespace(**vars(dataset), batch=lambda ids: batch(ids) | {"loss_mask": learned[ids]})
    rows = positions_rows(PositionsConfig(length=4), net, context(masked))
    counted = torch.from_numpy(np.stack([mask[start + 1 : start + 5] for mask in learned for start in (0, 5)]))
    nats = by_hand(net, dataset, 4)
    assert rows[0]["value"] == pytest.approx((nats * counted).sum().item() / counted.sum().item(), rel=1e-5)
    assert rows[0]["n"] == counted.sum()
    assert [row.get("position") for row in rows] == [None, None, 2, 4]


def test_data_of_another_tokenizer_is_refused_before_any_of_it_is_read(dataset):
    other: Any = SimpleNamespace(sha256="0" * 64, vocabulary={}, name="other")
    with pytest.raises(ConfigError, match="was prepared with tokenizer 'byte', the model was trained with 'other'"):
        positions_rows(PositionsConfig(), model(), replace(context(dataset), tokenizer=other))


def test_a_random_layout_is_measured_by_its_vote(dataset):
    layout = {"type": "random", "attention": {"type": "full"}, "mixer": {"type": "gdn"}, "fraction": 0.5, "votes": 3}
    net = model(layout=layout)
    draws = torch.stack([-by_hand(net, dataset, 4, step=step) for step in vote_steps(net.config.layout)])  # type: ignore
    nats = np.log(3) - draws.logsumexp(0)
    (row, *_) = positions_rows(PositionsConfig(length=4), net, context(dataset))
    assert row["value"] == pytest.approx(nats.mean().item(), rel=1e-5)
    batch, learned = dataset.batch, np.tile([0, 1, 1, 0, 0, 0, 1, 1, 0, 0, 1, 1, 0], (4, 1)).astype(bool)  # of 5 and 8
    masked: Any = SimpleNamespace(**vars(dataset), batch=lambda ids: batch(ids) | {"loss_mask": learned[ids]})
    (some, *_) = positions_rows(PositionsConfig(length=4), net, context(masked))
    assert some["value"] == pytest.approx(nats[:, :2].mean().item(), rel=1e-5)
    assert row["votes"] == 3


def test_stored_are_results_and_at_every_depth_a_curve(dataset):
    rows = run_tasks([PositionsConfig(length=4)], model(), context(dataset), loops=[1, 2])
    stored = Evaluated(rows, step=3, n_loops=2, parameters=5).evaluations()
    assert [(row["metric"], row["n_loops"]) for row in stored["validation"]] == [("loss", 2), ("late_loss", 2)]
    assert {(row["n_loops"], row["position"]) for row in stored["positions"]} == {
        (n, p) for n in (1, 2) for p in (1, 2, 4)
    }
    assert len(stored["depth"]) == 4
    assert set(stored) == {"validation", "positions", "depth"}
    assert all(row["flops_per_token"] > 0 and row["step"] == 3 for row in stored["positions"])


def test_two_depths_are_compared_span_by_span(dataset):
    first, second = model(), model(seed=1)
    found = [positions_rows(PositionsConfig(length=3), net, context(dataset)) for net in (first, second)]
    nats = [by_hand(net, dataset, 3) for net in (first, second)]
    for place, (row, other) in enumerate(zip(*([row for row in rows if "position" in row] for rows in found))):
        apart = nats[1][:, place] - nats[0][:, place]
        paired = difference(row["groups"], other["groups"])
        assert paired is not None
        assert paired["value"] == pytest.approx(apart.mean().item(), abs=1e-4)
        assert paired["stderr"] == pytest.approx(apart.std().item() / len(apart) ** 0.5, rel=1e-2)


def test_octaves_end_at_the_length():
    assert [part[1:3] for part in parts_of(100)] == [
        (1, 100), (51, 100), (1, 1), (2, 2), (3, 4), (5, 8), (9, 16), (17, 32), (33, 64), (65, 100),
    ]  # fmt: skip


def test_data_is_needed():
    with pytest.raises(ConfigError, match="positions read held-out documents; give the evaluation its data"):
        positions_rows(PositionsConfig(), model(), context(None))
