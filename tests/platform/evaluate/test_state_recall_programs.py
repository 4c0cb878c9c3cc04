"""State-based recall: programs are what the interpreter says they are, and accuracies are those of known models."""

from dataclasses import replace
from types import SimpleNamespace

import numpy as np
import pytest
import torch

from lt2.train.loop import TrainState
from lt2_platform.evaluate import state_recall_programs as module
from lt2_platform.evaluate.config import RECALL_WORDS, StateRecallConfig, program_length
from lt2_platform.evaluate.state_recall_programs import BIT, EVALUATION, WORDS, accuracy, batches, programs, read

CONFIG = StateRecallConfig(layout={"type": "uniform", "mixer": {"type": "full"}}, batch_size=4)  # type: ignore[arg-type]


@pytest.mark.parametrize("size", [(5, 5), (8, 8), (13, 13), (9, 2), (6, 11)])
def test_python_itself_agrees_with_every_assert(size):
    made = programs(*size, 4, np.random.default_rng(3))
    assert len(WORDS) == RECALL_WORDS
    assert made["tokens"].shape == (4, program_length(*size))
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
    first, second = (next(batches(CONFIG, (6, 6), step)) for step in (0, 1))
    stream = batches(CONFIG, (6, 6), 0)
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

    made = programs(6, 6, 40, np.random.default_rng([0, 6, 6, EVALUATION]))
    # The last answer is not followed inside the input only if the program ended there; it ends with a newline.
    assert accuracy(Oracle(True), (6, 6), examples=40, seed=0) == {"all": 1.0, "final": 1.0, "moved": 1.0}
    truth = np.take_along_axis(made["tokens"], made["asked"], 1) == BIT + 1
    expected = {"all": truth.mean(), "final": truth[:, -1].mean(), "moved": truth[made["moved"]].mean()}
    assert accuracy(Oracle(False), (6, 6), examples=40, seed=0) == pytest.approx(expected)


@pytest.mark.parametrize(("warmup", "rates"), [(4, [0.0025, 0.005, 0.01, 0.01]), (0, [0.01] * 4)])
def test_practice_warms_up_and_says_what_it_was(monkeypatch, warmup, rates):
    def train(model, objective, batches, optimizer, rate, settings, state):
        assert [rate(step) for step in (0, 1, 3, 9)] == rates
        return replace(state, step=settings.steps, loss=1.5)

    monkeypatch.setattr(module, "train", train)
    monkeypatch.setattr(module, "accuracy", lambda model, size, **options: {"all": 0.5, "final": options["seed"]})
    config = CONFIG.model_copy(update={"lr": 0.01, "warmup_steps": warmup, "seed": 7})
    model = SimpleNamespace(embed=SimpleNamespace(weight=torch.zeros(1)))
    state, entry = module.practise(config, model, None, (6, 3), TrainState(step=8), 4)  # type: ignore[arg-type]
    assert entry == {"n": 6, "swaps": 3, "step": 12, "loss": 1.5, "all": 0.5, "final": 7}
    assert state.step == 12
