"""The diagnostics task: readings of held-out documents from their beginnings."""

from __future__ import annotations

import math
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch

from lt2.analysis.diagnostics import Reading, unrolled
from lt2.config import ConfigError
from lt2_platform.data.stream import PackedDataset
from lt2_platform.data.tokenizers.tokenize import ByteTokenizer
from lt2_platform.evaluate import diagnostics
from lt2_platform.evaluate.checkpoints import Evaluated
from lt2_platform.evaluate.config import DiagnosticsConfig
from lt2_platform.evaluate.diagnostics import beginnings, diagnostics_rows
from lt2_platform.evaluate.tasks import TaskContext, run_tasks
from tests.platform.evaluate.tiny import model
from tests.platform.train.packed import write_dataset


@pytest.fixture
def dataset(tmp_path, monkeypatch) -> PackedDataset:
    monkeypatch.setattr(diagnostics, "SHORTEST", 6)  # rows of this dataset: 5 tokens of one document, 8 of the next
    return PackedDataset(write_dataset(tmp_path / "data"), "validation")


def context(dataset) -> TaskContext:
    return TaskContext("memory", ByteTokenizer(), dataset, "unused", lambda values: None)


def test_documents_are_read_from_their_beginning(dataset):
    spans = list(beginnings(dataset, bos_id=None, count=3, length=7))
    rows = dataset.batch([0, 1, 2])["tokens"]
    assert [span.tolist() for span in spans] == [row[5:12].tolist() for row in rows]  # never the row's document 0
    first = int(rows[1, 0])
    assert first != int(rows[0, 0])
    again = list(beginnings(dataset, bos_id=first, count=9, length=99))
    assert len(again) == 4  # document 0 of row 1 begins with BOS, but is too short


def test_the_splits_first_row_begins_a_document_without_bos_too(dataset, monkeypatch):
    monkeypatch.setattr(diagnostics, "SHORTEST", 5)
    spans = list(beginnings(dataset, bos_id=None, count=9, length=99))
    assert [len(span) for span in spans] == [5, 8, 8, 8, 8]  # no other row's document 0 may count as begun there
    assert spans[0].tolist() == dataset.batch([0])["tokens"][0, :5].tolist()
    bos = int(dataset.batch([1])["tokens"][0, 0])
    begun = sum(int(tokens[0]) == bos for tokens in dataset.batch([1, 2, 3])["tokens"])
    assert len(list(beginnings(dataset, bos_id=bos, count=9, length=99))) == 5 + begun  # with one, each row may tell
    monkeypatch.setattr(diagnostics, "ROWS_READ", 2)
    assert len(list(beginnings(dataset, bos_id=None, count=9, length=99))) == 3


def test_padding_is_no_document():
    tokens, docs = np.arange(24)[None], np.array([[0] * 7 + [-1] * 17])
    split: Any = SimpleNamespace(n_sequences=1, batch=lambda rows: {"tokens": tokens, "doc_ids": docs})
    assert list(beginnings(split, bos_id=None, count=9, length=99)) == []  # 7 are too few, and 17 are padding


def test_readings_are_those_of_the_library(dataset):
    net = model()
    rows = diagnostics_rows(DiagnosticsConfig(documents=2), net, context(dataset))
    spans = list(beginnings(dataset, bos_id=ByteTokenizer().bos_id, count=2, length=512))
    alone = [unrolled(net, torch.from_numpy(span)[None]) for span in spans]
    found = {(row["metric"], row["loop"], row["layer"]): row for row in rows}
    assert len(found) == len(rows) == 2 * 2 * 2 + 2  # max_abs and rms everywhere, mass at one layer of two, both loops
    for place, (one, two) in enumerate(zip(*alone)):
        at = divmod(place, 2)
        assert found["max_abs", *at]["value"] == max(one.max_abs, two.max_abs)
        assert found["rms", *at]["value"] == pytest.approx((one.rms + two.rms) / 2)
        assert found["rms", *at]["mixer"] == one.mixer
        if one.first_token_mass is not None and two.first_token_mass is not None:
            expected = (one.first_token_mass + two.first_token_mass) / 2
            assert found["first_token_mass", *at]["value"] == pytest.approx(expected)


def test_a_document_counts_by_its_tokens_and_its_first_token_by_those_after_it():
    rows = diagnostics._rows((Reading(1, 2, "full", 0.2, 1.0, 1.0), Reading(1, 2, "full", 0.8, 4.0, 4.0)), [3, 5])
    assert {row["metric"]: row["value"] for row in rows} == {
        "first_token_mass": pytest.approx((2 * 0.2 + 4 * 0.8) / 6), "max_abs": 4.0, "rms": pytest.approx(23 / 8),
    }  # fmt: skip
    assert [(row["loop"], row["layer"], row["mixer"], row["n"]) for row in rows] == [(1, 2, "full", 2)] * 3


@pytest.mark.parametrize("place", [0, 1])
def test_a_reading_that_is_no_number_shows_whichever_document_has_it(place):
    readings = [Reading(0, 0, "gdn", None, 1.0, 1.0), Reading(0, 0, "gdn", None, 2.0, 1.0)]
    assert diagnostics._rows(tuple(readings), [3, 4])[0]["value"] == 2.0
    readings[place] = Reading(0, 0, "gdn", None, math.nan, math.nan)
    assert all(math.isnan(row["value"]) for row in diagnostics._rows(tuple(readings), [3, 4]))


def test_readings_are_an_evaluation_of_their_own(dataset):
    rows = run_tasks([DiagnosticsConfig(documents=1)], model(), context(dataset))
    score = {"task": "own", "metric": "m", "value": 1.0, "n_loops": 2, "early_exit": False, "unit": "points"}
    stored = Evaluated([*rows, score], 3, 2, 99).evaluations()
    assert stored["validation"] == [score | {"step": 3, "parameters": 99}]
    assert len(stored["diagnostics"]) == len(rows)
    assert set(stored) == {"validation", "diagnostics"}


def test_what_cannot_be_read_is_named(dataset, monkeypatch):
    with pytest.raises(ConfigError, match="give the evaluation its data"):
        diagnostics_rows(DiagnosticsConfig(), model(), context(None))
    monkeypatch.setattr(diagnostics, "SHORTEST", 16)
    with pytest.raises(ConfigError, match=r"no held-out document of .* has its first 16 tokens"):
        diagnostics_rows(DiagnosticsConfig(), model(), context(dataset))
