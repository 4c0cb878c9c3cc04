"""The distance to a teacher against a KL written out, and what becomes of it."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
import torch

from lt2.config import ConfigError
from lt2_platform.data.stream import PackedDataset
from lt2_platform.distill import measure
from lt2_platform.distill.measure import log_distance, one_shot_scores, teacher_kl
from tests.platform.evaluate.tiny import model
from tests.platform.train.packed import write_dataset

HALTS = {"n_loops": 3, "halting": {"type": "exit_gate", "threshold": 0.5}}


@pytest.fixture
def dataset(tmp_path) -> PackedDataset:
    return PackedDataset(write_dataset(tmp_path / "data", validation=6), "validation")


@torch.no_grad()
def by_hand(student, teacher, dataset, rows, *, masked) -> tuple[list[float], int]:
    """KL of each loop in nats per token, and the tokens, one sequence at a time in fp64."""
    sums, n = torch.zeros(3, dtype=torch.float64), 0
    for row in rows:
        batch = dataset.batch([row])
        tokens, docs = torch.from_numpy(batch["tokens"]), torch.from_numpy(batch["doc_ids"])
        counted = (docs[0, 1:] == docs[0, :-1]) | (not masked)
        p, q = (
            [
                net.logits(state[0]).double().log_softmax(-1)
                for state in net.at_depth(3, halting=False)(
                    tokens[:, :-1], doc_ids=docs[:, :-1] if masked else None, per_loop=True
                ).loops
            ]
            for net in (teacher, student)
        )
        sums += torch.stack([(a.exp() * (a - b)).sum(-1)[counted].sum() for a, b in zip(p, q)])
        n += int(counted.sum())
    return (sums / n).tolist(), n


@pytest.mark.parametrize("masked", [False, True])
@pytest.mark.parametrize(("part", "rows"), [("selection", [0, 1]), ("report", [3, 4])])
def test_the_distance_is_the_kl_of_every_loop_over_the_whole_vocabulary(dataset, masked, part, rows):
    """Of models that halt every loop runs, whatever mode they are in."""
    student, teacher = model(seed=1, **HALTS).train(), model(seed=2, **HALTS).train()
    found = teacher_kl(
        student, teacher, dataset, held_out=part, max_sequences=2, batch_size=1, document_mask=masked
    )  # fmt: skip
    expected, tokens = by_hand(student.eval(), teacher.eval(), dataset, rows, masked=masked)
    assert found["kl_loops"] == pytest.approx(expected, rel=1e-4)
    assert (found["kl"], found["tokens"]) == (found["kl_loops"][-1], tokens)
    assert teacher_kl(student, student, dataset, held_out=part)["kl"] == pytest.approx(0, abs=1e-6)


@pytest.mark.parametrize(("name", "value"), [("n_loops", 2), ("vocab_size", 300)])
def test_models_that_cannot_be_compared_are_refused(dataset, name, value):
    other = model(**{"n_loops": 3, name: value})
    with pytest.raises(ConfigError, match=f"the student's {name} is {value}, the teacher's .*; they must be equal"):
        teacher_kl(other, model(n_loops=3), dataset, held_out="report")


def test_a_distance_of_no_tokens_is_refused(dataset, monkeypatch):
    batch = dataset.batch
    monkeypatch.setattr(
        dataset, "batch", lambda rows: {**batch(rows), "loss_mask": torch.zeros(len(rows), 13).bool().numpy()}
    )
    with pytest.raises(ConfigError, match="no token of the 3 validation sequences asked for counts in the loss"):
        teacher_kl(model(), model(), dataset, held_out="report")


def test_layers_are_chosen_by_one_half_and_the_result_is_of_the_other(monkeypatch, dataset):
    """`log_distance` of a stage: what is stored, and what it returns."""
    halves = {"selection": {"kl": 1.0, "kl_loops": [2.0, 1.0], "tokens": 5}}
    halves["report"] = {"kl": 3.0, "kl_loops": [4.0, 3.0], "tokens": 7}
    asked, stored = [], []
    monkeypatch.setattr(measure, "_load", lambda place: place)
    monkeypatch.setattr(
        measure, "teacher_kl", lambda *of, held_out, **how: asked.append((*of, how)) or halves[held_out]
    )
    monkeypatch.setattr(measure.checkpoint, "resolve", lambda place: f"{place}/newest")
    info = SimpleNamespace(state=SimpleNamespace(step=9))
    monkeypatch.setattr(measure.checkpoint, "read_info", lambda place: {"run/newest": info}[place])
    store: Any = SimpleNamespace(log_eval=lambda *of: stored.append(of))
    found = log_distance(
        "run", "teacher", dataset.uri, store=store, run_id="r", teacher_name="t", max_sequences=3
    )  # fmt: skip
    assert found == {"kl": 1.0, "kl_loops": [2.0, 1.0], "report_kl": 3.0}
    assert [(*of[:2], of[3]) for of in asked] == [("run/newest", "teacher", {"max_sequences": 3})] * 2
    ((run, name, rows),) = stored
    assert (run, name) == ("r", "distillation")
    assert [(row["metric"], row["value"]) for row in rows] == [
        ("teacher_kl", 3.0), ("teacher_kl_loop_0", 4.0), ("teacher_kl_loop_1", 3.0),
    ]  # fmt: skip
    same = {"task": "distillation", "n": 7, "unit": "nats/token", "teacher": "t", "step": 9}
    assert all(row.items() >= same.items() for row in rows)


def test_one_shot_scores_are_of_data_of_the_students_tokenizer(monkeypatch, dataset):
    info = SimpleNamespace(tokenizer={"name": "other", "sha256": "1"}, train={})
    monkeypatch.setattr(measure.checkpoint, "resolve", lambda place: place)
    monkeypatch.setattr(measure.checkpoint, "read_info", lambda place: info)
    with pytest.raises(ConfigError, match="the model student was trained with tokenizer 'other'"):
        one_shot_scores("student", "teacher", dataset.uri)
