"""An evaluation says where its held-out text may have been trained on: losses on it would be too good."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from lt2_platform.storage import Storage
from lt2_workflows.engine.context import StepContext
from lt2_workflows.loading import workflow_from_record
from lt2_workflows.steps.held_out import held_out_remark
from tests.platform.evaluate.tiny import MODEL

TRAIN = {"steps": 4, "global_batch_size": 2, "checkpoint_every": 2}
MIXED = {"type": "mixture", "sources": [{"weight": 1, "source": name} for name in ("books", "web")]}


def said(storage: Storage, first: Any, second: Any, *, of: str = "extend", on: str = "long") -> str:
    """What the evaluation of step `of` on data `on` says; `extend` starts from an average of `pretrain`."""
    prepare = {"type": "prepare", "source": "books", "seq_len": 64, "validation_fraction": 0.02}
    pretrain = {"type": "pretrain", "data": {"step": "short"}, "model": MODEL, "train": TRAIN}
    steps = {
        "short": prepare | first,
        "long": prepare | {"seq_len": 256} | second,
        "pretrain": pretrain,
        "average": {"type": "average", "checkpoint": {"step": "pretrain"}, "last": 2},
        "extend": pretrain | {"data": {"step": "long"}, "start": {"step": "average"}},
        "evaluate": {"type": "evaluate", "checkpoint": {"step": of}, "data": {"step": on}},
    }
    workflow = workflow_from_record({"workflow": "w", "steps": steps}, source="test")
    step: Any = workflow.steps["evaluate"]
    return held_out_remark(step.config.checkpoint, step.config.data, StepContext(storage, workflow, step))


@pytest.mark.parametrize(
    ("first", "second", "why"),
    [
        ({}, {}, None),
        ({"source": ["books", "web"]}, {}, None),  # the same documents of it are held out
        ({"validation_fraction": 0.05}, {}, None),  # which holds out more
        ({"source": "web"}, {"seed": 1}, None),  # other text
        ({"source": "books2"}, {"seed": 1}, None),
        ({}, {"seed": 1}, "books is in short too, which holds out others by another seed (0, here 1)"),
        (
            {},
            {"validation_fraction": 0.1},
            "books is in short too, which holds out fewer of it (validation_fraction 0.02",
        ),
        ({"source": MIXED}, {"source": "books/a.txt", "seed": 1}, "books/a.txt is in short too, which"),
        ({"tokenize": "on_the_fly"}, {}, "books is in short too, which holds out others, since one of the two is tok"),
    ],
)
def test_splits_of_shared_text_that_differ(tmp_path: Path, first: Any, second: Any, why: str | None):
    found = said(Storage(str(tmp_path)), first, second)
    assert found.startswith(f"HELD-OUT TEXT MAY HAVE BEEN TRAINED ON: {why}") if why else found == ""


def test_the_data_of_the_run_itself_and_of_later_ones_do_not_count(tmp_path: Path):
    storage, other = Storage(str(tmp_path)), {"seed": 1}
    assert said(storage, {}, other, of="pretrain", on="short") == ""
    assert said(storage, {}, other, of="pretrain", on="long") != ""
    assert said(storage, {}, other, of="extend", on="short") != ""


def test_a_source_of_a_mixture_of_which_nothing_is_held_out(tmp_path: Path):
    """Of few documents chance may hold out none, while the same source alone always holds out one."""
    storage = Storage(str(tmp_path))
    assert said(storage, {"source": MIXED}, {}) == ""  # not known before it is prepared
    workflow = {"short": {"type": "prepare", "source": MIXED, "seq_len": 64, "validation_fraction": 0.02}}
    folder = workflow_from_record({"workflow": "w", "steps": workflow}, source="test").steps["short"].folder
    for held_out in (7, 0):
        parts = [{"source": "text books", "held_out": held_out}, {"source": "text web", "held_out": 9}]
        storage.write_json(f"{folder}/out/manifest.json", {"mixture": parts})
        found = said(storage, {"source": MIXED}, {})
        assert found.endswith("holds out nothing of it; raise validation_fraction of both") == (held_out == 0)
