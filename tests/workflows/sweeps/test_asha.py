"""Early stopping that is cut off at any result and begun again decides as if it had not been."""

from __future__ import annotations

import random
from types import SimpleNamespace

import pytest

from lt2_platform.storage import Storage
from lt2_workflows.sweeps.asha import KeptAsha
from lt2_workflows.sweeps.config import Asha

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


def test_the_best_goes_on_to_its_end_and_says_how_it_ended(tmp_path):
    session = Session(Storage(str(tmp_path)), "a")
    assert session.decide("a", 10**9, 0.5)
    last = session.scheduler.on_trial_result(None, session.trials["a"], {"outcome": {"state": "done"}})
    assert last == "CONTINUE"
