"""Evaluating a random-sample hybrid: K draws of which layers run attention, and their vote (paper Table 3, level).

Shapes: K draws, B batch, L tokens, V vocabulary.
"""

from __future__ import annotations

import copy
import math
from collections.abc import Iterator

import torch
from torch import Tensor

from lt2.config import ConfigError, RandomLayout
from lt2.layout import draw_layers, layout
from lt2.model import LoopedLM


def vote_steps(layout: RandomLayout) -> tuple[int, ...]:
    """The `step` to pass to the model for each of the layout's votes: far beyond those that training used."""
    return tuple(2**40 + vote for vote in range(layout.votes))


def drawn_models(model: LoopedLM) -> tuple[LoopedLM, ...]:
    """Views on the model's weights, one per vote, each with its draw's layers fixed; the model itself if none is drawn.

    A view trains, caches and decodes as any model; hooks of the model fire for its views too.
    """
    random_layout = model.config.layout
    if not isinstance(random_layout, RandomLayout):
        return (model,)
    views = []
    for step in vote_steps(random_layout):
        view = copy.copy(model)
        view.schedule = layout(model.config, draw_layers(random_layout, model.config.n_layers, step))
        views.append(view)
    return tuple(views)


def majority_choice(loglikelihoods: Tensor) -> int:
    """The option that most draws prefer; ties go to the higher log-likelihood summed over draws.

    loglikelihoods: (K, options), each draw's score of each option of one question.
    """
    options = loglikelihoods.shape[1]
    votes = torch.bincount(loglikelihoods.argmax(1), minlength=options)
    summed = loglikelihoods.sum(0)
    return max(range(options), key=lambda option: (votes[option].item(), summed[option].item()))


def mean_probability(logprobs: Tensor) -> Tensor:
    """log of the mean over draws of each token's probability; (K, ...) -> (...)."""
    return torch.logsumexp(logprobs, 0) - math.log(logprobs.shape[0])


@torch.no_grad()
def voted_logprobs(model: LoopedLM, tokens: Tensor, *, doc_ids: Tensor | None = None, rows: int = 512) -> Tensor:
    """log p(token) under every draw: tokens (B, L+1) -> (K, B, L), in fp32 (fp64 for an fp64 model).

    Perplexity of the vote is exp(-mean(mean_probability(voted_logprobs(...)))). Logits are made `rows` at a time.

    Raises:
        ConfigError: the model's layout is not random, so there is nothing to vote on.
    """
    layout = model.config.layout
    if not isinstance(layout, RandomLayout):
        raise ConfigError(f"voting needs layout.type 'random', got {layout.type!r}; evaluate this model directly")
    inputs, targets = tokens[:, :-1], tokens[:, 1:]
    ids = None if doc_ids is None else doc_ids[:, :-1]
    draws = []
    for step in vote_steps(layout):
        hidden = model(inputs, doc_ids=ids, step=step).hidden.flatten(0, 1)
        draws.append(torch.cat(list(_logprobs(model, hidden, targets.flatten(), rows))).view(targets.shape))
    return torch.stack(draws)


def _logprobs(model: LoopedLM, hidden: Tensor, targets: Tensor, rows: int) -> Iterator[Tensor]:
    for start in range(0, len(hidden), rows):
        logits = model.logits(hidden[start : start + rows])
        wide = logits if logits.dtype == torch.float64 else logits.float()
        yield wide.log_softmax(-1).gather(1, targets[start : start + rows, None])[:, 0]
