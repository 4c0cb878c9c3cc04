"""The curriculum of state-based recall learns, advances, stops, and resumes."""

import pytest

from lt2_platform.evaluate import state_recall_programs
from lt2_platform.evaluate.config import StateRecallConfig
from lt2_platform.evaluate.state_recall import run_curriculum
from lt2_platform.evaluate.state_recall_programs import current

FULL = {"type": "uniform", "mixer": {"type": "full"}}


def config(**fields):
    small = {"dim": 16, "n_layers": 1, "num_heads": 2, "stages": (5, 6), "eval_every": 4, "eval_examples": 8}
    return StateRecallConfig.model_validate({"layout": FULL, "batch_size": 4, "warmup_steps": 2, **small, **fields})


def test_stages_advance_stop_and_end():
    entry = lambda n, score: {"n": n, "swaps": n, "all": score}  # noqa: E731
    limited = config(max_steps=8)
    assert current(limited, []) == ((5, 5), 4)
    assert current(limited, [entry(5, 0.5)]) == ((5, 5), 4)
    assert current(limited, [entry(5, 0.5), entry(5, 0.6)]) is None
    assert current(limited, [entry(5, 0.5), entry(5, 0.95)]) == ((6, 6), 4)
    assert current(limited, [entry(5, 0.95), entry(6, 0.9)]) is None


def test_a_curriculum_resumes_to_the_same_bits(tmp_path):
    gdn = {"type": "uniform", "mixer": {"type": "gdn"}}
    settings = config(threshold=0.3, max_steps=40, lr=1e-2, layout=gdn, n_loops=2)
    whole = run_curriculum(settings, out=str(tmp_path / "whole"))
    assert whole["n_max"] == 6
    assert whole["stage"] == 2
    assert [entry["n"] for entry in whole["history"]] == sorted(entry["n"] for entry in whole["history"])
    assert run_curriculum(settings, out=str(tmp_path / "whole")) == whole

    def interrupt(entry, found):
        if entry["step"] >= 8:
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        run_curriculum(settings, out=str(tmp_path / "cut"), evaluated=interrupt)
    told = []
    tell = lambda entry, found: told.append((entry, found))  # noqa: E731
    assert run_curriculum(settings, out=str(tmp_path / "cut"), evaluated=tell) == whole
    assert told == [(entry, entry["step"] < 8) for entry in whole["history"]]  # what the cut-off life evaluated too
    told.clear()
    assert run_curriculum(settings, out=str(tmp_path / "cut"), evaluated=tell) == whole
    assert told == [(entry, True) for entry in whole["history"]]


def test_opening_programs_come_first_and_are_no_stage(tmp_path, monkeypatch):
    entry = lambda swaps, score: {"n": 6, "swaps": swaps, "all": score}  # noqa: E731
    settings = config(opening=((6, 1), (6, 3)), stages=(6, 7), max_steps=8)
    assert current(settings, []) == ((6, 1), 4)
    assert current(settings, [entry(1, 0.95)]) == ((6, 3), 4)
    assert current(settings, [entry(1, 0.95), entry(3, 0.9)]) == ((6, 6), 4)
    assert current(settings, [entry(1, 0.95), *[entry(3, 0.5)] * 2]) is None
    monkeypatch.setattr(state_recall_programs, "accuracy", lambda *_, **__: {"all": 1.0, "final": 1.0, "moved": 1.0})
    found = run_curriculum(config(opening=((6, 2),), stages=(6,), max_steps=4), out=str(tmp_path / "passed"))
    assert [(entry["n"], entry["swaps"]) for entry in found["history"]] == [(6, 2), (6, 6)]
    assert (found["n_max"], found["stage"]) == (6, 1)
    assert config().model.rope_theta == 10_000
    assert config(rope_theta=100).model.rope_theta == 100
    scores = iter([1.0, 0.0])  # the opening is passed, the stage of as many bits is not
    monkeypatch.setattr(
        state_recall_programs, "accuracy", lambda *_, **__: {"all": next(scores), "final": 0.0, "moved": 0.0}
    )
    found = run_curriculum(config(opening=((6, 2),), stages=(6,), max_steps=4), out=str(tmp_path / "failed"))
    assert (found["n_max"], found["stage"]) == (0, 0)


@pytest.mark.parametrize("opening", [((8, 8),), ((9, 1),), ((5, 2), (6, 1)), ((5, 0),), ((4, 1),), ((5, 1), (5, 1))])
def test_bad_openings(opening):
    with pytest.raises(ValueError, match="must grow, from at least 5"):
        config(opening=opening, stages=(8, 16))


def test_what_cannot_be_built_is_named_at_once():
    with pytest.raises(ValueError, match="fla's kernel needs a power of two >= 16"):
        config(layout={"type": "uniform", "mixer": {"type": "nsa", "num_heads": 4, "num_kv_heads": 1}}, num_heads=4)
    assert not config(n_loops=1).model.loop_residual
    assert config(n_loops=2).model.loop_residual


def test_a_model_that_fails_the_first_stage_has_no_n_max(tmp_path):
    failed = run_curriculum(config(threshold=1.0, max_steps=4), out=str(tmp_path))
    assert (failed["n_max"], failed["stage"], failed["steps"]) == (0, 0, 4)


def test_a_stage_ends_at_max_steps_also_between_evaluations(tmp_path):
    found = run_curriculum(config(threshold=1.0, max_steps=10), out=str(tmp_path / "rest"))
    assert [entry["step"] for entry in found["history"]] == [4, 8, 10]
    assert found["steps"] == 10
    short = run_curriculum(config(threshold=1.0, max_steps=3), out=str(tmp_path / "short"))
    assert [entry["step"] for entry in short["history"]] == [3]


def test_the_next_stage_has_all_of_its_steps_after_one_that_ended_early(tmp_path, monkeypatch):
    scores = iter([0.0, 0.0, 1.0, 0.0, 0.0, 0.0])  # the first stage is passed by its last evaluation, at step 10
    monkeypatch.setattr(
        state_recall_programs, "accuracy", lambda *_, **__: {"all": next(scores), "final": 0.0, "moved": 0.0}
    )
    found = run_curriculum(config(max_steps=10), out=str(tmp_path))
    assert [(entry["n"], entry["step"]) for entry in found["history"]] == [
        (5, 4), (5, 8), (5, 10), (6, 14), (6, 18), (6, 20),
    ]  # fmt: skip
    assert found["n_max"] == 5


@pytest.mark.parametrize("stages", [(), (4, 8), (16, 8)])
def test_bad_stages(stages):
    with pytest.raises(ValueError, match="must grow, from at least 5"):
        config(stages=stages)
