"""A stage as a training run, from configs alone."""

from __future__ import annotations

from types import SimpleNamespace

import pytest

from lt2.config import ConfigError, ModelConfig
from lt2_platform.distill import run as stages
from lt2_platform.distill.run import NEW_MIXER, DistillRun, plan_stage, stage_config
from lt2_platform.train.checkpoints import checkpoint
from tests.platform.distill.stages import ALIGN, DISTILL, GDN
from tests.platform.train.packed import model_config, train_config

TEACHER = model_config(n_layers=4, layout={"type": "uniform", "mixer": {"type": "full"}})
KDA = {"type": "kda"}


def stage(objective=DISTILL, **fields) -> DistillRun:
    train = train_config(objective=objective, **fields.pop("train", {})).model_dump()
    return DistillRun.model_validate({**fields, "train": train})


def made(run: DistillRun, student: ModelConfig | None = None):
    layout = stage_config(run, TEACHER, student).model.layout
    return layout.mixer.type, layout.kept, layout.both  # type: ignore


def test_mixer_and_layers_are_the_stages_own_or_else_the_students():
    assert made(stage()) == ("gdn", (), False)
    assert stage_config(stage(), TEACHER, None).model.layout.mixer == NEW_MIXER  # type: ignore
    assert NEW_MIXER.conv_size == 0  # as in the paper
    assert made(stage(ALIGN, mixer=KDA, kept=[2])) == ("kda", (2,), True)
    student = ModelConfig.model_validate(stage_config(stage(mixer=KDA, kept=[1]), TEACHER, None).model.model_dump())
    assert made(stage(), student) == ("kda", (1,), False)
    assert made(stage(mixer=GDN, kept=[0, 3]), student) == ("gdn", (0, 3), False)
    assert made(stage(kept=[]), student) == ("kda", (), False)  # none, and not the student's


def test_what_cannot_be_a_stage_is_refused():
    with pytest.raises(ValueError, match="train.objective is next_token; give align"):
        stage({"type": "next_token"})
    with pytest.raises(ConfigError, match="the student to start from has layout 'uniform'"):
        made(stage(), TEACHER)
    long = {"type": "dsa", "warmup_steps": 9, "top_k": 4}
    with pytest.raises(ConfigError, match="warmup_steps 9 leaves none of 6 training steps sparse"):
        made(stage(mixer=long))


@pytest.mark.parametrize(
    ("objective", "student", "topk", "expected"),
    [
        (ALIGN, None, None, ("teacher", None, None)),
        (ALIGN, "student", "topk", ("student", None, None)),  # which asks nobody
        (DISTILL, None, None, ("teacher", "teacher", None)),
        (DISTILL, "student", None, ("student", "teacher", None)),
        (DISTILL, "student", "topk", ("student", None, "topk")),
    ],
)
def test_what_a_stage_begins_with_and_whom_it_asks(monkeypatch, objective, student, topk, expected):
    layout = stage_config(stage(), TEACHER, None).model.layout
    known = {"teacher": TEACHER, "student": TEACHER.model_copy(update={"layout": layout})}
    checked = []
    monkeypatch.setattr(checkpoint, "resolve", lambda place: place)
    monkeypatch.setattr(checkpoint, "read_info", lambda place: SimpleNamespace(model=known[place], tokenizer=place))
    monkeypatch.setattr(stages, "check_tokenizer", lambda *of: checked.append(of))
    monkeypatch.setattr("lt2_platform.distill.topk.check_teacher", lambda *of: checked.append(of))
    _, sources = plan_stage(stage(objective), teacher="teacher", data="data", student=student, topk=topk)
    assert (sources.start, sources.teacher, sources.topk) == expected
    assert checked == [("teacher", "data", "teacher"), *[(topk, "teacher")] * (expected[2] is not None)]
