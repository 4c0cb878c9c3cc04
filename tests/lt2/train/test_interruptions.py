"""What interrupts the loop or ends it early: requests to save and stop, bad steps, skipped batches, data that ends."""

import math
from contextlib import nullcontext

import pytest
import torch

from lt2.config import ConfigError
from lt2.train.guard import Origin
from lt2.train.loop import SAVE, STOP, NonFiniteLossError, PreemptedError, TrainState, train
from lt2.train.loss import next_token_objective
from lt2.train.optim import adamw
from lt2.train.schedules import learning_rate
from tests.lt2.looped_toy import toy
from tests.lt2.train.test_loop import CONFIG, G, Recorder, batches, run


@pytest.mark.parametrize("asked", [1, 2, 3, 4, 5])
def test_what_asks_once_is_saved_once_whatever_else_is_due(asked):
    words = iter([SAVE if step == asked else 0 for step in range(1, 7)])
    recorder, _, _ = run(CONFIG.model_copy(update={"steps": 6, "log_every": 3}), stop=lambda: next(words))
    saved = asked if asked == 3 else asked + 1  # a step that is due is heard at once
    assert [state.step for state, _, _ in recorder.checkpoints] == sorted({saved, 6})
    assert [step for step, _ in recorder.steps] == sorted({3, saved, 6})


def test_a_loss_that_is_not_finite_stops_before_a_checkpoint():
    model = toy()
    with torch.no_grad():
        model.norm.weight[0] = math.nan
    with pytest.raises(NonFiniteLossError, match=r"step 1: loss nan.*lower train\.lr"):
        run(CONFIG.model_copy(update={"checkpoint_every": 1}), model=model)


@pytest.mark.parametrize(("asked", "ended"), [(1, 2), (3, 4), (4, 5), (5, 5)])
def test_what_stops_a_run_before_its_last_step_stops_it_saved(asked, ended):
    recorder, model, state = Recorder(), toy(), TrainState()
    arguments = (adamw(model, lr=1e-2), lambda step: 1e-2, CONFIG.model_copy(update={"log_every": 5}), state)
    stop = lambda: STOP if state.step + 1 == asked else 0  # noqa: E731
    told = pytest.raises(PreemptedError, match=f"stopped as asked after step {ended} of 5, which is saved")
    with told if ended < 5 else nullcontext():
        train(model, next_token_objective(), batches(), *arguments, [recorder], stop=stop)
    assert [saved.step for saved, _, _ in recorder.checkpoints] == [state.step] == [ended]
    assert recorder.ended == (ended == 5)


def test_a_gradient_that_is_not_finite_is_told_with_the_finite_loss():
    def objective(model, batch):
        loss, n_tokens, metrics = next_token_objective()(model, batch)
        return loss + (0 * model.norm.weight.sum()).sqrt(), n_tokens, metrics

    model, (loss, *_) = toy(), run()[0].losses
    with pytest.raises(NonFiniteLossError, match=f"step 1: loss {loss}, gradient norm nan; .* only the gradient"):
        train(model, objective, batches(), adamw(model, lr=1e-2), lambda step: 1e-2, CONFIG, TrainState())


def test_where_a_bad_number_came_from_in_words():
    block = Origin("block", loop=1, layer=2, mixer="gdn", rank=3, sequences=(4, 5), weight="rho")
    assert str(block) == (
        "first not finite: the output of loop 1, layer 2 (gdn), on rank 3, sequences [4, 5]; weight rho is not finite"
    )
    assert str(Origin("loss")) == "first not finite: the loss, of a finite state, on rank 0; all weights are finite"


def test_skipped_batches_are_as_if_they_were_not_in_the_data():
    skip = {G, 2 * G, 4 * G}
    model, recorder, state = toy(), Recorder(), TrainState()
    schedule = learning_rate(lr=CONFIG.lr, steps=CONFIG.steps, warmup_steps=CONFIG.warmup_steps)
    arguments = (adamw(model, lr=1e-2), schedule, CONFIG, state, [recorder])
    train(model, next_token_objective(), batches(), *arguments, skip=skip)
    left = (batch for index, batch in enumerate(batches()) if index * G not in skip)
    assert recorder.losses == run(data=left)[0].losses
    assert state.position == (CONFIG.steps + len(skip)) * G
    assert [saved.step for saved, _, _ in recorder.checkpoints] == [CONFIG.steps]


def test_what_asks_to_be_saved_gets_no_step_that_is_not_finite():
    """Asked at the first step, heard in the second, which is not finite and must not count as one that was made."""

    def objective(model, batch):
        loss, n_tokens, metrics = next_token_objective()(model, batch)
        return (loss * math.nan if batch.step == 1 else loss), n_tokens, metrics

    model, recorder, state = toy(), Recorder(), TrainState()
    with pytest.raises(NonFiniteLossError, match="step 2: loss nan") as told:
        train(
            model, objective, batches(), adamw(model, lr=1e-2), learning_rate(lr=1e-2, steps=5),
            CONFIG.model_copy(update={"log_every": 5}), state, [recorder], stop=lambda: SAVE if state.step == 0 else 0,
        )  # fmt: skip
    assert not recorder.checkpoints
    assert (told.value.step, told.value.position, told.value.origin.place) == (2, G, "loss")


def test_data_that_ends_early_is_named():
    with pytest.raises(ConfigError, match="the data ended at step 1 of 5"):
        run(data=iter([next(batches())]))
