"""State-based recall: programs are what the interpreter says they are; the curriculum learns, stops, and resumes."""

import numpy as np
import pytest
import torch

from lt2_platform.evaluate import state_recall
from lt2_platform.evaluate.config import StateRecallConfig
from lt2_platform.evaluate.state_recall import BIT, accuracy, batches, current, length, programs, read, run_curriculum

FULL = {"type": "uniform", "mixer": {"type": "full"}}


def config(**fields):
    small = {"dim": 16, "n_layers": 1, "num_heads": 2, "stages": (5, 6), "eval_every": 4, "eval_examples": 8}
    return StateRecallConfig.model_validate({"layout": FULL, "batch_size": 4, "warmup_steps": 2, **small, **fields})


@pytest.mark.parametrize("size", [(5, 5), (8, 8), (13, 13), (9, 2), (6, 11)])
def test_python_itself_agrees_with_every_assert(size):
    made = programs(*size, 4, np.random.default_rng(3))
    assert made["tokens"].shape == (4, length(*size))
    assert made["asked"].shape == made["moved"].shape == (4, size[1])
    for tokens, asked, moved in zip(made["tokens"], made["asked"], made["moved"]):
        source = read(tokens).replace("bit", "")
        lines = source.replace("s = ", "bits = ", 1).replace("assert s", "assert bits").splitlines()
        variables: dict = {}
        before, seen = None, []
        for line in lines:
            if line.startswith("assert"):
                seen.append(variables["a"] != before)
            before = variables.get("a")
            exec(line, variables)  # an assert that fails raises
        assert seen == moved.tolist()
        assert set(tokens[asked] - BIT) <= {0, 1}
        assert len({variables[name] for name in "abcde"}) == 5


def test_batches_are_a_function_of_their_step_and_learn_only_answers():
    first, second = (next(batches(config(), (6, 6), step)) for step in (0, 1))
    stream = batches(config(), (6, 6), 0)
    next(stream)
    assert torch.equal(next(stream).tokens, second.tokens)
    assert not torch.equal(first.tokens, second.tokens)
    assert first.loss_mask.sum(1).tolist() == [6] * 4
    assert set(first.tokens[first.loss_mask].tolist()) <= {BIT, BIT + 1}


def test_accuracy_of_a_model_that_knows_and_of_one_that_always_says_one(monkeypatch):
    class Oracle(torch.nn.Module):
        """Says the next token, or always bit1; its hidden states are one-hot."""

        def __init__(self, knows):
            super().__init__()
            self.embed, self.knows = torch.nn.Embedding(64, 64), knows

        def forward(self, tokens):
            following = tokens.roll(-1, 1) if self.knows else torch.full_like(tokens, BIT + 1)
            return type("Output", (), {"hidden": torch.nn.functional.one_hot(following, 64).float()})

        def logits(self, hidden):
            return hidden

    made = programs(6, 6, 40, np.random.default_rng([0, 6, 6, state_recall.EVALUATION]))
    # The last answer is not followed inside the input only if the program ended there; it ends with a newline.
    assert accuracy(Oracle(True), (6, 6), examples=40, seed=0) == {"all": 1.0, "final": 1.0, "moved": 1.0}
    truth = np.take_along_axis(made["tokens"], made["asked"], 1) == BIT + 1
    expected = {"all": truth.mean(), "final": truth[:, -1].mean(), "moved": truth[made["moved"]].mean()}
    assert accuracy(Oracle(False), (6, 6), examples=40, seed=0) == pytest.approx(expected)


def test_stages_advance_stop_and_end():
    entry = lambda n, score: {"n": n, "swaps": n, "all": score}  # noqa: E731
    limited = config(max_steps=8)
    assert current(limited, []) == (5, 5)
    assert current(limited, [entry(5, 0.5)]) == (5, 5)
    assert current(limited, [entry(5, 0.5), entry(5, 0.6)]) is None
    assert current(limited, [entry(5, 0.5), entry(5, 0.95)]) == (6, 6)
    assert current(limited, [entry(5, 0.95), entry(6, 0.9)]) is None


def test_a_curriculum_resumes_to_the_same_bits(tmp_path):
    gdn = {"type": "uniform", "mixer": {"type": "gdn"}}
    settings = config(threshold=0.3, max_steps=40, lr=1e-2, layout=gdn, n_loops=2)
    whole = run_curriculum(settings, out=str(tmp_path / "whole"))
    assert whole["n_max"] == 6
    assert whole["stage"] == 2
    assert [entry["n"] for entry in whole["history"]] == sorted(entry["n"] for entry in whole["history"])
    assert run_curriculum(settings, out=str(tmp_path / "whole")) == whole

    def interrupt(entry):
        if entry["step"] >= 8:
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        run_curriculum(settings, out=str(tmp_path / "cut"), evaluated=interrupt)
    told = []
    assert run_curriculum(settings, out=str(tmp_path / "cut"), evaluated=told.append) == whole
    assert told == whole["history"]  # what the cut-off life had evaluated too
    assert run_curriculum(settings, out=str(tmp_path / "cut"), evaluated=told.append) == whole
    assert told == 2 * whole["history"]


def test_opening_programs_come_first_and_are_no_stage(tmp_path, monkeypatch):
    entry = lambda swaps, score: {"n": 6, "swaps": swaps, "all": score}  # noqa: E731
    settings = config(opening=((6, 1), (6, 3)), stages=(6, 7), max_steps=8)
    assert current(settings, []) == (6, 1)
    assert current(settings, [entry(1, 0.95)]) == (6, 3)
    assert current(settings, [entry(1, 0.95), entry(3, 0.9)]) == (6, 6)
    assert current(settings, [entry(1, 0.95), *[entry(3, 0.5)] * 2]) is None
    monkeypatch.setattr(state_recall, "accuracy", lambda *_, **__: {"all": 1.0, "final": 1.0, "moved": 1.0})
    found = run_curriculum(config(opening=((6, 2),), stages=(6,), max_steps=4), out=str(tmp_path / "passed"))
    assert [(entry["n"], entry["swaps"]) for entry in found["history"]] == [(6, 2), (6, 6)]
    assert (found["n_max"], found["stage"]) == (6, 1)
    assert state_recall.model_config(config()).rope_theta == 10_000
    assert state_recall.model_config(config(rope_theta=100)).rope_theta == 100
    scores = iter([1.0, 0.0])  # the opening is passed, the stage of as many bits is not
    monkeypatch.setattr(state_recall, "accuracy", lambda *_, **__: {"all": next(scores), "final": 0.0, "moved": 0.0})
    found = run_curriculum(config(opening=((6, 2),), stages=(6,), max_steps=4), out=str(tmp_path / "failed"))
    assert (found["n_max"], found["stage"]) == (0, 0)


@pytest.mark.parametrize("opening", [((8, 8),), ((9, 1),), ((5, 2), (6, 1)), ((5, 0),), ((4, 1),), ((5, 1), (5, 1))])
def test_bad_openings(opening):
    with pytest.raises(ValueError, match="must grow, from at least 5"):
        config(opening=opening, stages=(8, 16))


def test_a_model_that_fails_the_first_stage_has_no_n_max(tmp_path):
    failed = run_curriculum(config(threshold=1.0, max_steps=4), out=str(tmp_path))
    assert (failed["n_max"], failed["stage"], failed["steps"]) == (0, 0, 4)


@pytest.mark.parametrize("stages", [(), (4, 8), (16, 8)])
def test_bad_stages(stages):
    with pytest.raises(ValueError, match="must grow, from at least 5"):
        config(stages=stages)
