"""Held-out loss against cross entropy written out, and what it needs of data and model."""

from __future__ import annotations

from types import SimpleNamespace

import numpy as np
import pytest
import torch
from torch.nn.functional import cross_entropy

from lt2.config import ConfigError
from lt2.voting import vote_steps
from lt2_platform.data.stream import PackedDataset
from lt2_platform.data.tokenizers import tokenize
from lt2_platform.evaluate.validation import check_counted, check_tokens, chunks, held_out_rows, perplexity
from tests.platform.evaluate.tiny import HYBRID, model
from tests.platform.train.packed import VOCAB, write_dataset


@pytest.fixture
def dataset(tmp_path) -> PackedDataset:
    return PackedDataset(write_dataset(tmp_path / "data"), "validation")


def by_hand(net, dataset, *, masked=False, **options) -> float:
    batch = dataset.batch(range(dataset.n_sequences))
    tokens, docs = torch.from_numpy(batch["tokens"]), torch.from_numpy(batch["doc_ids"])
    with torch.no_grad():
        output = net(tokens[:, :-1], doc_ids=docs[:, :-1] if masked else None, **options)
        losses = cross_entropy(net.logits(output.hidden).flatten(0, 1), tokens[:, 1:].flatten(), reduction="none")
    return losses[(docs[:, 1:] == docs[:, :-1]).flatten() | (not masked)].mean().item()


@pytest.mark.parametrize("masked", [False, True])
def test_documents_are_apart_where_asked(dataset, masked):
    net = model()
    found = perplexity(net, dataset, document_mask=masked)
    assert found["loss"] == pytest.approx(by_hand(net, dataset, masked=masked), rel=1e-5)
    assert found["tokens"] == 4 * (11 if masked else 12)  # two documents a row: the second's first token is nobody's
    assert by_hand(net, dataset, masked=True) != pytest.approx(by_hand(net, dataset), rel=1e-3)


def test_a_model_in_training_is_evaluated_as_it_will_run_and_goes_on_training(dataset):
    """ACT mixes states in training, and adds what pondering costs to the loss."""
    net = model(n_loops=3, halting={"type": "act"})
    expected = by_hand(net, dataset)
    for training in (False, True):
        net.train(training)
        assert perplexity(net, dataset)["loss"] == pytest.approx(expected, rel=1e-5)
        assert {module.training for module in net.modules()} == {training}


def test_losses_of_a_mixer_of_ones_own_are_no_part_of_it(dataset):
    net = model()
    expected = perplexity(net, dataset)
    net.register_forward_hook(lambda module, inputs, output: output.aux.update(mine=torch.tensor(5.0)))
    assert perplexity(net, dataset) == expected


def test_a_model_of_random_layout_is_evaluated_by_its_first_draw_unless_it_is_to_vote(dataset):
    layout = {"type": "random", "attention": {"type": "full"}, "mixer": {"type": "gdn"}, "fraction": 0.3, "votes": 4}
    net = model(layout=layout, n_layers=4)
    assert perplexity(net, dataset)["loss"] == pytest.approx(by_hand(net, dataset), rel=1e-5)
    draws = [by_hand(net, dataset, step=step) for step in vote_steps(net.config.layout)]  # type: ignore
    assert perplexity(net, dataset, vote=True)["loss"] < sum(draws) / 4  # by Jensen
    assert perplexity(model(layout=HYBRID), dataset, vote=True)["tokens"] == 48  # nothing is drawn


def test_data_with_more_kinds_of_token_than_the_model_is_refused(dataset):
    assert perplexity(model(vocab_size=VOCAB), dataset)["tokens"] == 48
    with pytest.raises(ConfigError, match="has 23 kinds of token, the model 22; evaluate it on data prepared with its"):
        perplexity(model(vocab_size=VOCAB - 1), dataset)


def test_parts_of_the_held_out_rows(tmp_path):
    def split(rows):
        return PackedDataset(write_dataset(tmp_path / f"{rows}", validation=rows), "validation")

    five, one = split(5), split(1)
    assert [held_out_rows(five, part) for part in ("all", "selection", "report")] == [
        range(5), range(2), range(2, 5),
    ]  # fmt: skip
    assert held_out_rows(one, "all") == range(1)
    for part in ("selection", "report"):
        with pytest.raises(ConfigError, match="one validation sequence has no halves; raise validation_fraction"):
            held_out_rows(one, part)
    with pytest.raises(ConfigError, match="d: no validation sequences; prepare two or more different documents"):
        held_out_rows(SimpleNamespace(n_sequences=0, uri="d", split="validation"), "all")  # type: ignore
    assert [rows.tolist() for rows in chunks(range(1, 6), 2)] == [[1, 2], [3, 4], [5]]
    with pytest.raises(ConfigError, match="no token of the 2 validation sequences asked for counts in the loss"):
        check_counted(0, five, range(2))


def test_the_datas_own_tokenizer_tells_whether_it_is_the_models(dataset, monkeypatch):
    dataset.manifest["tokenizer"] = {"name": "theirs", "sha256": "1", "file": "tokenizer/theirs.json"}
    read, model_has = [], SimpleNamespace(name="ours", sha256="2", vocabulary="v")
    monkeypatch.setattr(tokenize, "load_tokenizer", lambda place: read.append(place) or SimpleNamespace(vocabulary="v"))
    check_tokens(dataset, model_has)  # type: ignore
    assert read == [f"{dataset.uri}/tokenizer/theirs.json"]
    check_tokens(dataset, SimpleNamespace(sha256="1"))  # type: ignore
    assert len(read) == 1


def test_a_loss_of_no_tokens_is_refused(dataset, monkeypatch):
    batch = dataset.batch
    monkeypatch.setattr(dataset, "batch", lambda rows: batch(rows) | {"loss_mask": np.zeros((len(rows), 13), bool)})
    with pytest.raises(ConfigError, match="no token of the 4 validation sequences asked for counts in the loss"):
        perplexity(model(), dataset)
