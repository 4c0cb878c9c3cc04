"""Log-likelihoods and greedy continuations of token ids, by one model on one device.

Rows of different lengths are padded on the right: nothing in a causal model reads what comes after it, so a row's
numbers do not depend on its neighbours. Nothing here knows lm-eval or Ray.

Shapes: B rows, L tokens, V vocabulary.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

import torch
from torch import Tensor

from lt2.config import ConfigError
from lt2.generate import Stop, generate, right_padded
from lt2.model import LoopedLM
from lt2.voting import drawn_models, mean_probability
from lt2_platform.evaluate.tasks import Spent

LOGIT_ROWS = 512  # positions whose logits exist at once


@dataclass(frozen=True, order=True)
class Pair:
    """Score `continuation` after `context`: token ids, neither empty, together at most the model's max_length + 1."""

    context: tuple[int, ...]
    continuation: tuple[int, ...]


@dataclass(frozen=True)
class Scored:
    """Results of one batch in its order, and what they cost: tokens by the loops they ran, and Σ tokens · length."""

    results: list[Any]
    loops: dict[int, int]
    positions: float


class Scorer(Protocol):
    """A model that can be asked. `max_length` is how many tokens it can read at once."""

    model: Any
    max_length: int

    def loglikelihoods(self, pairs: Sequence[Pair]) -> Scored:
        """(log p of the continuation in nats, whether it is the greedy one) of each pair.

        Of K draws the probabilities are averaged token by token, and a third part has the K log-likelihoods.
        """
        ...

    def continuations(self, prompts: Sequence[Sequence[int]], max_new_tokens: int, stop: Stop) -> Scored:
        """Greedy continuations (lists of ids), each up to where `stop` says so, its last token included."""
        ...


class LoopedScorer:
    """Ours, at the depth of the model it is given (see LoopedLM.at_depth); one of random layout by its draws' vote."""

    def __init__(self, model: LoopedLM, *, max_length: int | None = None, eos_id: int | None = None):
        self.model, self.eos_id = model.eval(), eos_id
        self.draws = drawn_models(self.model)
        self.max_length = max_length or model.config.max_seq_len

    @torch.inference_mode()
    def loglikelihoods(self, pairs: Sequence[Pair]) -> Scored:
        input_ids, lengths = right_padded(inputs(pairs), self.model.embed.weight.device)
        with Spent(self.model) as spent:
            # Without a cache the model does not read lengths; they are for the count.
            hidden = [draw(input_ids, lengths=lengths).hidden for draw in self.draws]
        return Scored(score_rows(hidden, pairs, self.model.logits), dict(spent.loops), spent.positions)

    @torch.inference_mode()
    def continuations(self, prompts: Sequence[Sequence[int]], max_new_tokens: int, stop: Stop) -> Scored:
        with Spent(self.model) as spent:
            new = generate(self.model, prompts, max_new_tokens=max_new_tokens, eos_id=self.eos_id, stop=stop)
        return Scored(new, dict(spent.loops), spent.positions)


class TransformersScorer:
    """Any causal language model that transformers loads. Its rows are right-padded and masked too.

    Not all of their caches keep right-padded rows apart, so prompts are continued one at a time.
    """

    def __init__(self, model: Any, *, max_length: int, eos_id: int | None = None):
        self.model, self.max_length, self.eos_id = model.eval(), max_length, eos_id

    @torch.inference_mode()
    def loglikelihoods(self, pairs: Sequence[Pair]) -> Scored:
        input_ids, lengths = right_padded(inputs(pairs), self.model.device)
        mask = torch.arange(input_ids.shape[1], device=input_ids.device) < lengths[:, None]
        logits = self.model(input_ids=input_ids, attention_mask=mask.long(), use_cache=False).logits  # (B, L, V)
        return Scored(score_rows([logits], pairs, lambda rows: rows), {}, 0.0)

    @torch.inference_mode()
    def continuations(self, prompts: Sequence[Sequence[int]], max_new_tokens: int, stop: Stop) -> Scored:
        return Scored([self.continuation(prompt, max_new_tokens, stop) for prompt in prompts], {}, 0.0)

    def continuation(self, prompt: Sequence[int], max_new_tokens: int, stop: Stop) -> list[int]:
        feed, cache, new = torch.tensor([list(prompt)], device=self.model.device), None, []
        while len(new) < max_new_tokens:
            output = self.model(input_ids=feed, past_key_values=cache, use_cache=True)
            cache = output.past_key_values
            new.append(int(output.logits[0, -1].argmax()))
            if new[-1] == self.eos_id or stop(new):
                break
            feed = torch.tensor([new[-1:]], device=self.model.device)
        return new


def inputs(pairs: Sequence[Pair]) -> list[tuple[int, ...]]:
    """What the model reads: all but the last token, which is only predicted."""
    for pair in pairs:
        if not pair.context or not pair.continuation:
            raise ValueError(f"{pair} has an empty part; there is nothing to score")
    return [(pair.context + pair.continuation)[:-1] for pair in pairs]


def score_rows(
    hidden: Sequence[Tensor], pairs: Sequence[Pair], logits: Callable[[Tensor], Tensor]
) -> list[tuple[Any, ...]]:
    """From each draw's (B, L, ·) states to what `Scorer.loglikelihoods` gives; logits are made LOGIT_ROWS at a time.

    Sums are in fp64, so that their order does not show.
    """
    found = []
    for row, pair in enumerate(pairs):
        first, n = len(pair.context) - 1, len(pair.continuation)
        targets = torch.tensor(pair.continuation, device=hidden[0].device)
        total, greedy, each = 0.0, True, [0.0] * len(hidden)
        for start in range(0, n, LOGIT_ROWS):
            stop = min(start + LOGIT_ROWS, n)
            expected = targets[start:stop]
            draws = [logprobs(logits(states[row, first + start : first + stop])) for states in hidden]  # K × (n, V)
            mean = draws[0] if len(draws) == 1 else mean_probability(torch.stack(draws))
            said = lambda found, ids=expected: float(found.gather(1, ids[:, None]).double().sum())  # noqa: E731
            total += said(mean)
            greedy = greedy and bool((mean.argmax(-1) == expected).all())
            each = [sum_ + said(draw) for sum_, draw in zip(each, draws)]
        found.append((total, greedy) if len(hidden) == 1 else (total, greedy, each))
    return found


def logprobs(scores: Tensor) -> Tensor:
    """log p, in fp32 or as wide as the scores."""
    return (scores if scores.dtype == torch.float64 else scores.float()).log_softmax(-1)


def check_vocabulary(model_size: int, tokenizer_size: int, what: str) -> None:
    """Raise ConfigError when the tokenizer makes ids that the model has no embedding for."""
    if tokenizer_size > model_size:
        raise ConfigError(
            f"{what}: its tokenizer has {tokenizer_size:,} tokens, the model only {model_size:,}; use the tokenizer "
            "that the model was trained with"
        )
