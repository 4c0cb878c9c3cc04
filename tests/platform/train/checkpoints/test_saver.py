"""The callback that saves, alone: when it tries, when it tries again, what it hands on. Its clock is the test's."""

import errno
import threading

import pytest
import torch

from lt2.train.loop import TrainState
from lt2_platform.train.checkpoints import checkpoint, saving
from lt2_platform.train.checkpoints.retention import Keep
from lt2_platform.train.checkpoints.shards import StorageRefusedError
from tests.platform.train.packed import TOKENIZER, model_config, train_config

MODEL = torch.nn.Linear(1, 1)
OPTIMIZER = torch.optim.SGD(MODEL.parameters())
ABOUT = checkpoint.About(model_config(), TOKENIZER)


class Clock:
    """In place of the module `time`: only sleeping, and what the test adds, takes time."""

    def __init__(self):
        self.now = 1000.0

    def monotonic(self) -> float:
        return self.now

    def perf_counter(self) -> float:
        self.now += 0.001
        return self.now

    def sleep(self, seconds: float) -> None:
        self.now += seconds


class Disk:
    """In place of checkpoint.write: notes the step of every try and refuses the first ones."""

    def __init__(self, refusals):
        self.refusals, self.tries, self.options, self.free = refusals, [], {}, threading.Event()
        self.free.set()

    def write(self, folder, tensors, state, about, **options):
        assert about is ABOUT
        assert self.free.wait(60)
        self.tries.append(state.step)
        self.options = options
        if self.refusals:
            self.refusals -= 1
            raise StorageRefusedError(errno.ENOSPC, "full")
        return f"{folder}/{state.step}"


@pytest.fixture
def made(tmp_path, monkeypatch):
    """(clock, disk, saver) of a run that saves every fourth step."""

    def make(refusals=0, *, fields=None, **train):
        clock = Clock()
        disk = Disk(refusals)
        monkeypatch.setattr(saving, "time", clock)
        monkeypatch.setattr(checkpoint, "write", disk.write)
        config = train_config(**{"steps": 100, "checkpoint_every": 4, "async_save": False} | train)
        options = {"report": None, "validation_losses": dict, "flush": lambda: None} | (fields or {})
        saver = saving.Saver(str(tmp_path), ABOUT, config, **options)
        return clock, disk, saver

    return make


def at(saver, step):
    """The end of a step that is logged, and saved where that is due."""
    state = TrainState(step=step, loss=1.0)
    saver.on_step(state, {})
    if step % 4 == 0:
        saver.on_checkpoint(state, MODEL, OPTIMIZER)
    return state


def test_a_refused_save_is_tried_after_1_2_4_and_at_most_60_seconds_at_steps_that_are_logged(made):
    clock, disk, saver = made(refusals=9)
    for step in range(4, 257):  # a second each
        at(saver, step)
        clock.now += 1.0
    assert disk.tries == [4, 5, 7, 11, 19, 35, 67, 127, 187, 247, 248, 252, 256]


def test_after_a_save_that_came_to_pass_the_next_refusal_waits_a_second_again(made):
    clock, disk, saver = made(refusals=3)
    for step in range(4, 12):
        at(saver, step)
        clock.now += 2.0
    disk.refusals = 1
    tries = len(disk.tries)
    at(saver, 12)
    clock.now += 1.5
    at(saver, 13)
    assert disk.tries[tries:] == [12, 13]


def test_no_step_is_tried_before_its_time_and_the_end_waits_for_it(made):
    clock, disk, saver = made(refusals=1)
    at(saver, 4)
    state = at(saver, 8)  # due, but a moment after the refusal
    assert disk.tries == [4]
    saver.on_end(state)
    assert disk.tries == [4, 8]
    assert 1 <= clock.now - 1000 < 1.2
    at(saver, 9)
    assert len(disk.tries) == 2  # nothing waits any more


def test_refusals_end_the_run_once_its_patience_is_over(made):
    clock, _, saver = made(refusals=99, save_patience_s=3.0)
    at(saver, 4)
    clock.now += 2.9
    at(saver, 5)
    clock.now += 2.0
    with pytest.raises(StorageRefusedError, match=r"for 5 s \(train.save_patience_s\): .*full"):
        at(saver, 6)


@pytest.mark.parametrize("async_save", [False, True])
def test_a_step_that_is_saved_or_on_its_way_is_not_saved_again(made, async_save):
    _, disk, saver = made(async_save=async_save)
    saver.trained, saver.refused_since = (MODEL, OPTIMIZER), 0.0  # a save was refused, and is due to be tried again
    if async_save:
        disk.free.clear()
    state = at(saver, 3)
    saver.on_checkpoint(state, MODEL, OPTIMIZER)  # that somebody asked for at this very step
    at(saver, 5)  # nor another beside it
    disk.free.set()
    saver.settle(state)
    assert disk.tries == [3]
    assert saver.pending is None


def test_a_due_step_waits_for_its_evaluation(made):
    clock, disk, saver = made(refusals=1)
    at(saver, 4)
    clock.now += 5
    saver.on_step(TrainState(step=8), {})
    assert len(disk.tries) == 1
    saver.on_step(TrainState(step=9), {})
    assert disk.tries == [4, 9]


def test_an_outcome_is_heard_at_the_next_logged_step_and_the_state_is_of_then(made):
    said = []
    _, disk, saver = made(async_save=True, fields={"report": said.append})
    disk.free.clear()
    state = at(saver, 4)
    state.step = 5  # the loop goes on in its own
    saver.on_step(state, {})
    assert saver.pending is not None
    assert said == []
    disk.free.set()
    saver.pending[1].wait()
    saver.on_step(state, {})
    assert saver.pending is None
    assert [(each["step"], each["checkpoint"][-2:]) for each in said] == [(4, "/4")]
    saver.on_end(at(saver, 8))
    assert saver.pending is None
    assert disk.tries == [4, 8]


def test_reports_are_seconds_apart_but_for_the_last(made):
    said = []
    clock, _, saver = made(steps=16, fields={"report": said.append})
    for step in range(4, 17):
        at(saver, step)
        clock.now += 1.0  # so that every other save comes within REPORT_SECONDS of a report
    assert [each["step"] for each in said] == [4, 12, 16]


def test_the_loop_is_kept_waiting_by_what_is_said(made):
    _, _, saver = made()
    metrics: dict[str, float] = {}
    saver.on_checkpoint(TrainState(step=4), MODEL, OPTIMIZER)
    saving.SaveCost(saver).on_step(TrainState(step=5), metrics)
    assert metrics["save_stall"] > 0
    assert saver.take_stalled() == 0
    saver.on_step(TrainState(step=5), {})
    assert saver.take_stalled() > 0


def test_what_is_handed_on(made):
    order = []
    fields = {
        "validation_losses": lambda: {4: 2.5},
        "flush": lambda: order.append(f"flush before {disk.tries}"),
        "pinned": lambda: {"step-00000002"},
        "data_files": lambda state: order.append(state.step) or {"cursors.json": b"2"},
    }
    _, disk, saver = made(fields=fields, keep_checkpoints=7)
    at(saver, 4)
    options = disk.options
    assert order == [4, "flush before []"]
    assert options.pop("pinned")() == {"step-00000002"}
    assert options == {
        "files": {"cursors.json": b"2"},
        "keep": Keep(7),
        "validation_loss": 2.5,
        "group": None,
    }
    at(saver, 8)
    assert disk.options["validation_loss"] is None


def test_an_error_elsewhere_waits_for_what_is_being_written(made):
    _, disk, saver = made(async_save=True)
    disk.free.clear()
    with pytest.raises(ZeroDivisionError), saver:  # noqa: PT012
        at(saver, 4)
        threading.Timer(0.1, disk.free.set).start()
        raise ZeroDivisionError
    assert disk.tries == [4]
