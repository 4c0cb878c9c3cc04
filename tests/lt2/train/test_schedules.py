import math

import pytest
from pydantic import ValidationError

from lt2.explain import explain
from lt2.train.config import TrainConfig
from lt2.train.schedules import ConstantSchedule, LinearSchedule, WSDSchedule, learning_rate


def test_the_cosine_warms_up_linearly_and_ends_on_the_floor():
    lr = learning_rate(lr=2.0, steps=110, warmup_steps=10, min_lr_ratio=0.1)
    assert [lr(s) for s in range(10)] == pytest.approx([0.2 * (s + 1) for s in range(10)], rel=1e-12)
    assert lr(10) == 2.0
    assert lr(109) == pytest.approx(0.2, rel=1e-12)
    assert lr(10 + 99 / 3) == pytest.approx(0.2 + 1.8 * 0.75, rel=1e-12)  # cos(60°) = 1/2
    assert all(lr(s) > lr(s + 1) for s in range(10, 109))
    assert lr(10_000) == pytest.approx(0.2, rel=1e-12)


def test_the_straight_line_and_no_decay():
    line = learning_rate(LinearSchedule(), lr=2.0, steps=12, warmup_steps=1, min_lr_ratio=0.5)
    assert [line(step) for step in range(12)] == pytest.approx([2.0, *(2 - step / 10 for step in range(11))], rel=1e-12)
    flat = learning_rate(ConstantSchedule(), lr=2.0, steps=4, warmup_steps=2)
    assert [flat(step) for step in range(5)] == [1.0, 2.0, 2.0, 2.0, 2.0]


@pytest.mark.parametrize(("steps", "warmup_steps"), [(1, 0), (5, 4)])
def test_the_last_step_is_at_the_full_rate_where_it_is_the_first_after_warm_up(steps, warmup_steps):
    assert learning_rate(lr=2.0, steps=steps, warmup_steps=warmup_steps)(steps - 1) == 2.0


@pytest.mark.parametrize(
    ("shape", "half"), [("linear", 0.5), ("cosine", 0.5), ("sqrt", 1 - math.sqrt(0.5))], ids=lambda value: str(value)
)
def test_wsd_decays_over_the_last_steps_only(shape, half):
    rate = learning_rate(WSDSchedule(decay_steps=10, shape=shape), lr=2.0, steps=40, warmup_steps=4, min_lr_ratio=0.1)
    assert [rate(step) for step in range(4)] == [0.5, 1.0, 1.5, 2.0]
    assert {rate(step) for step in range(4, 30)} == {2.0}
    assert rate(30) < 2.0
    assert rate(34) == pytest.approx(0.2 + 1.8 * half, rel=1e-12)
    assert all(rate(step) > rate(step + 1) for step in range(29, 39))
    assert rate(39) == pytest.approx(0.2, rel=1e-12)


def test_wsd_begins_to_decay_where_a_constant_run_of_its_length_ends():
    trunk = learning_rate(ConstantSchedule(), lr=1.0, steps=30, warmup_steps=4)
    branch = learning_rate(WSDSchedule(decay_steps=10), lr=1.0, steps=40, warmup_steps=4)
    assert [trunk(step) for step in range(30)] == [branch(step) for step in range(30)]
    assert branch(30) < 1.0


def test_a_decay_that_does_not_fit_is_refused():
    fields = {"steps": 10, "global_batch_size": 2, "warmup_steps": 3}
    TrainConfig.model_validate(fields | {"schedule": {"type": "wsd", "decay_steps": 7}})
    with pytest.raises(ValidationError, match="warmup_steps 3 and decay_steps 8 are more than 10 steps"):
        TrainConfig.model_validate(fields | {"schedule": {"type": "wsd", "decay_steps": 8}})
    with pytest.raises(ValidationError) as error:
        TrainConfig.model_validate(fields | {"schedule": {"type": "wsd", "decay_step": 7}})
    assert "decay_steps" in explain(error.value, "train")
