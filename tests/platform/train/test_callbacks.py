"""What rank 0 tells whoever launched it, and when; and which sequences validation reads. Nothing is trained."""

from __future__ import annotations

import json
import threading

import pytest
import torch
from botocore.exceptions import EndpointConnectionError

from lt2.model import build
from lt2.train.loop import TrainState
from lt2_platform.data.stream import PackedDataset
from lt2_platform.evaluate.validation import perplexity
from lt2_platform.storage import Storage
from lt2_platform.train import callbacks
from lt2_platform.train.callbacks import Evaluator, Logger
from tests.platform.train.packed import model_config, train_config, write_dataset


class Writer:
    def __init__(self):
        self.rows = []

    def log(self, step, metrics):
        self.rows.append((step, metrics))


@pytest.fixture
def clock(monkeypatch):
    now = [1000.0]
    monkeypatch.setattr(callbacks.time, "monotonic", lambda: now[0])
    return now


def test_progress_is_written_now_and_then_and_at_the_end(tmp_path, clock, monkeypatch):
    written, write = [], Storage.write_bytes

    def writing(storage, path, data):
        written.append(json.loads(data))
        if written[-1]["step"] == 5:
            raise EndpointConnectionError(endpoint_url="http://away")
        write(storage, path, data)

    monkeypatch.setattr(Storage, "write_bytes", writing)
    logger = Logger(Writer(), Storage(str(tmp_path)), train_config(steps=90), began=3)
    metrics = {"loss": 2.5, "tokens_per_s": 7.0, "step_time": 2.0}
    for step, waited in ((4, 0), (5, 0.4), (5, 0.1), (6, 60), (7, 0.4), (8, 0.1), (9, 0.49), (90, 0)):
        clock[0] += waited
        logger.on_step(TrainState(step=step, position=step * 8, tokens=step * 96), metrics)
        assert logger.writing is not None
        logger.writing.wait()
    # Refused at step 5, it is left alone for a minute.
    assert [values["step"] for values in written] == [4, 5, 8, 90]
    assert written[0].pop("time") > 1e9
    assert written[0] == {"step": 4, "steps": 90, "loss": 2.5, "tokens_per_s": 7.0, "eta_s": None, "began": 3}
    assert [values["eta_s"] for values in written[1:]] == [None, 164.0, 0]  # at step 8 it is the fifth step of five
    rows = logger.writer.rows
    assert [step for step, _ in rows] == [4, 5, 5, 6, 7, 8, 9, 90]
    assert rows[0][1] == metrics | {"tokens": 4 * 96}


def test_a_store_that_hangs_does_not_hold_up_the_steps(tmp_path, clock, monkeypatch):
    written, answers, write = [], threading.Event(), Storage.write_bytes

    def writing(storage, path, data):
        assert answers.wait(30)
        written.append(json.loads(data)["step"])
        write(storage, path, data)

    monkeypatch.setattr(Storage, "write_bytes", writing)
    logger = Logger(Writer(), Storage(str(tmp_path)), train_config(steps=9), began=0)
    metrics = {"loss": 2.5, "tokens_per_s": 7.0, "step_time": 2.0}
    for step in range(1, 9):
        clock[0] += 2.0
        logger.on_step(TrainState(step=step, position=step * 8, tokens=step * 96), metrics)
    assert written == []
    answers.set()
    logger.on_step(TrainState(step=9, position=72, tokens=864), metrics)
    assert written == [1, 9]


def test_what_is_no_refusal_of_the_store_ends_the_run(tmp_path, clock, monkeypatch):
    def writing(storage, path, data):
        raise ValueError("another attempt has taken over")

    monkeypatch.setattr(Storage, "write_bytes", writing)
    logger = Logger(Writer(), Storage(str(tmp_path)), train_config(steps=9), began=0)
    metrics = {"loss": 2.5, "tokens_per_s": 7.0, "step_time": 2.0}
    logger.on_step(TrainState(step=1, position=8, tokens=96), metrics)
    assert logger.writing is not None
    logger.writing.wait()
    with pytest.raises(ValueError, match="another attempt has taken over"):
        logger.on_step(TrainState(step=2, position=16, tokens=192), metrics)


def test_the_mean_over_the_first_steps_predicts_nothing(tmp_path, clock):
    """Where only each tenth step is logged, the first mean has the first step's compiling in it."""
    logger = Logger(Writer(), Storage(str(tmp_path)), train_config(steps=90, log_every=10), began=3)
    for step, left in ((10, None), (20, 140.0)):
        clock[0] += 1
        metrics = {"loss": 2.5, "tokens_per_s": 7.0, "step_time": 2.0}
        logger.on_step(TrainState(step=step, position=step * 8, tokens=step * 96), metrics)
        assert logger.writing is not None
        logger.writing.wait()
        assert json.loads((tmp_path / "progress.json").read_text())["eta_s"] == left


@pytest.mark.parametrize("fields", [{"eval_sequences": 2}, {"eval_sequences": 3, "document_mask": True}])
def test_validation_reads_the_first_sequences_as_training_does(tmp_path, fields):
    data = write_dataset(tmp_path / "data")
    model, config = build(model_config(), seed=0), train_config(**fields)
    logger = Logger(Writer(), Storage(str(tmp_path)), config, began=0)
    for evaluator in (Evaluator(data, config, logger), Evaluator(data, config, None)):  # of rank 0 and of others
        evaluator.last = {3: 9.0}
        evaluator.on_eval(TrainState(step=4), model)
        known = perplexity(
            model,
            PackedDataset(data, "validation"),
            max_sequences=config.eval_sequences,
            document_mask=config.document_mask,
        )
        assert evaluator.last == {4: known["loss"]}
    assert logger.writer.rows == [(4, {"validation_loss": known["loss"]})]
    others = {perplexity(model, PackedDataset(data, "validation"), max_sequences=n)["loss"] for n in (1, 2, 3)}
    assert len(others) == 3
    assert torch.is_grad_enabled()
