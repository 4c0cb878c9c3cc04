"""Early stopping that is cut off at any result and begun again decides as if it had not been; what would never stop a
trial is refused.
"""

from __future__ import annotations

import random
from types import SimpleNamespace

import pytest

from lt2.config import ConfigError
from lt2_platform.storage import Storage
from lt2_workflows.commands.sweeps import sweep_workflow
from lt2_workflows.plan import describe_plan
from lt2_workflows.sweeps.asha import KeptAsha
from lt2_workflows.sweeps.config import Asha
from lt2_workflows.sweeps.step import check_sweep
from tests.workflows.conftest import FAKE_STEPS

CONFIG = Asha(grace_steps=4, reduction=2)
NAMES = "abcdef"
FOLDER = "steps/sweep-1/out/rungs"


class Session:
    """A scheduler's life, with new ids for its trials, as Tune gives them; `decide` says if a trial goes on."""

    def __init__(self, storage, running):
        self.scheduler = KeptAsha(CONFIG, storage, FOLDER, running)
        self.trials = {name: SimpleNamespace(trial_id=str(random.random()), config={"trial": name}) for name in running}
        for trial in self.trials.values():
            self.scheduler.on_trial_add(None, trial)

    def decide(self, name, step, loss):
        return self.scheduler.on_trial_result(None, self.trials[name], {"step": step, "loss": loss}) == "CONTINUE"


@pytest.fixture(scope="module")
def results():
    """(trial, step, loss) in the order of their coming; trials differ in how good they are and how far apart."""
    drawn = random.Random(0)
    levels = {name: drawn.uniform(1, 3) for name in NAMES}
    each = [
        [(name, step, levels[name] + 10 / step) for step in range(drawn.randint(1, 3), 40, drawn.randint(2, 5))]
        for name in NAMES
    ]
    mixed = []
    while any(each):
        mixed.append(drawn.choice([rest for rest in each if rest]).pop(0))
    return mixed


def decisions(storage, results, cut=None):
    """{trial: the step at which it was stopped}; with `cut`, by a second session from result number `cut` on."""
    session, stopped = Session(storage, NAMES), {}
    for number, (name, step, loss) in enumerate(results):
        if number == cut:
            session = Session(storage, [each for each in NAMES if each not in stopped])
        if name not in stopped and not session.decide(name, step, loss):
            stopped[name] = step
    return stopped


def test_cut_off_anywhere(tmp_path, results):
    expected = decisions(Storage(str(tmp_path / "whole")), results)
    assert 0 < len(expected) < len(NAMES)
    for cut in range(len(results)):
        assert decisions(Storage(str(tmp_path / f"cut{cut}")), results, cut) == expected


def test_one_that_was_to_be_stopped_when_the_driver_died_is_decided_on_again(tmp_path):
    storage = Storage(str(tmp_path))
    session = Session(storage, "ab")
    assert session.decide("a", 4, 1.0)
    assert not session.decide("b", 4, 2.0)
    again = Session(storage, "b")
    assert not again.decide("b", 5, 2.0)
    assert [result["went_on"] for result in storage.read_json(f"{FOLDER}/b.json")] == [False]


def test_a_result_counts_at_one_rung_and_not_later_at_those_below(tmp_path):
    session = Session(Storage(str(tmp_path)), "abc")
    assert all(session.decide("a", step, 0.5) for step in (17, 18, 19))  # a fast trial, whose first word comes late
    assert session.decide("b", 4, 2.0)  # the first at its rung
    assert session.decide("c", 4, 1.0)


def test_there_is_a_rung_at_any_step(tmp_path):
    session = Session(Storage(str(tmp_path)), "ab")
    assert session.decide("a", 4 * 2**10, 2.0)
    assert session.decide("b", 4 * 2**10, 1.0)
    assert session.decide("a", 4 * 2**20, 1.0)
    assert not session.decide("b", 4 * 2**20, 2.0)


def test_the_best_goes_on_to_its_end_and_says_how_it_ended(tmp_path):
    session = Session(Storage(str(tmp_path)), "a")
    assert session.decide("a", 10**9, 0.5)
    last = session.scheduler.on_trial_result(None, session.trials["a"], {"outcome": {"state": "done"}})
    assert last == "CONTINUE"


def asha(grid, steps, *more, recipe="quickstart"):
    return sweep_workflow(recipe, list(more), grid, None, {"asha": steps})


def check(*arguments, **more):
    check_sweep(asha(*arguments, **more).configs["sweep"])


def test_what_would_stop_nothing_is_refused_by_the_plan_too(tmp_path):
    grid = ["pretrain.train.steps=[60, 120]"]
    check(grid, 119)
    with pytest.raises(ConfigError, match=r"grace_steps 120 \(--asha\): .* pretrain has only 120 steps; lower it"):
        describe_plan(asha(grid, 120), Storage(str(tmp_path)))
    with pytest.raises(ConfigError, match=r"no step 'x'; give the one to stop early \(pretrain\)$"):
        check(grid, 1, "sweep.scheduler.step=x")
    fakes, first = {"recipe": f"{FAKE_STEPS}:chain"}, "sweep.scheduler.step=first"
    with pytest.raises(ConfigError, match="no step 'pretrain'; give the one to stop early$"):
        check(["first.lines=[1, 2]"], 1, **fakes)
    with pytest.raises(ConfigError, match="first is the same in all trials, so it runs once .* or leave --asha out"):
        check(["second.lines=[1, 2]"], 1, first, **fakes)
    check(["second.lines=[1]"], 1, first, **fakes)  # seeds may follow
    check(["first.lines=[1, 2]"], 10**6, first, **fakes)  # nothing tells how many steps it has
