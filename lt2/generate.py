"""Sampling from a looped model with one cache per (loop, layer).

Shapes: B prompts, L tokens, V vocabulary.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch
from torch import Tensor

from lt2.config import ConfigError
from lt2.decode import DecodeStep
from lt2.model import LoopedLM
from lt2.voting import drawn_models, mean_probability

Stop = Callable[[list[int]], bool]
"""Whether a continuation so far is complete."""

GREEDY = 1e-5
"""Temperatures below this are greedy: fp32 logits hold no finer differences, and divided by it they may be infinite."""

WORTH_RECORDING = 16
"""New tokens from which a CUDA graph pays: recording one costs about four steps launched kernel by kernel."""


@torch.inference_mode()
def generate(
    model: LoopedLM,
    prompts: Sequence[Sequence[int]],
    *,
    max_new_tokens: int,
    temperature: float = 0.0,
    top_k: int | None = None,
    top_p: float | None = None,
    eos_id: int | None = None,
    seed: int = 0,
    n_loops: int | None = None,
    stop: Stop | None = None,
) -> list[list[int]]:
    """Continue each prompt; returns the new tokens only, up to and including eos_id.

    temperature 0, or below `GREEDY`, is greedy. A continuation ends early where `stop`, asked after every new token, is
    true. Prompts of different lengths are right-padded and masked, so a continuation does not depend on what else is
    in the batch. A model of random layout is asked once per vote, each draw with its own cache; their mean probability
    decides. Row r samples by seed + r.

    Raises:
        ConfigError: an empty prompt, a token outside the vocabulary, n_loops, seed or sampling settings out of range.
    """
    check_request(model.config.vocab_size, prompts, max_new_tokens, temperature, top_k, top_p, seed)
    if max_new_tokens == 0 or not prompts:
        return [[] for _ in prompts]
    generators = [torch.Generator(model.embed.weight.device).manual_seed(seed + row) for row in range(len(prompts))]
    draws = [prefill(draw, prompts, max_new_tokens, n_loops) for draw in drawn_models(model)]
    scores = vote([logits for logits, _ in draws])  # (B, V)
    new: list[list[int]] = [[] for _ in prompts]
    done = [False] * len(prompts)
    while True:
        token = sample(scores, temperature, top_k, top_p, generators)  # (B,)
        for row, value in enumerate(token.tolist()):
            if not done[row]:
                new[row].append(value)
                stopped = stop is not None and stop(new[row])
                done[row] = stopped or value == eos_id or len(new[row]) == max_new_tokens
        if all(done):
            return new
        scores = vote([step(token) for _, step in draws])


def prefill(
    model: LoopedLM, prompts: Sequence[Sequence[int]], max_new_tokens: int, n_loops: int | None
) -> tuple[Tensor, DecodeStep]:
    """Logits (B, V) after each prompt, and what decodes the tokens that follow."""
    input_ids, lengths = right_padded(prompts, model.embed.weight.device)
    cache = model.init_cache(len(prompts), input_ids.shape[1] + max_new_tokens, n_loops=n_loops)
    hidden = model(input_ids, lengths=lengths, cache=cache, n_loops=n_loops).hidden
    last = hidden[torch.arange(len(prompts), device=lengths.device), lengths - 1]  # (B, D)
    return model.logits(last), DecodeStep(model, cache, n_loops=n_loops, record=max_new_tokens >= WORTH_RECORDING)


def vote(logits: Sequence[Tensor]) -> Tensor:
    """Scores (B, V) to choose from, of each draw's logits (B, V): one's own, or the log of the mean probability."""
    if len(logits) == 1:
        return logits[0].float()
    return mean_probability(torch.stack([each.float().log_softmax(-1) for each in logits]))


def right_padded(rows: Sequence[Sequence[int]], device: torch.device | str) -> tuple[Tensor, Tensor]:
    """(B, L) int64 padded with 0, and (B,) lengths."""
    lengths = torch.tensor([len(row) for row in rows])
    padded = torch.zeros(len(rows), int(lengths.max()), dtype=torch.int64)
    for index, row in enumerate(rows):
        padded[index, : len(row)] = torch.tensor(row)
    return padded.to(device), lengths.to(device)


def sample(
    logits: Tensor, temperature: float, top_k: int | None, top_p: float | None, generators: list[torch.Generator]
) -> Tensor:
    """One token per row of logits (B, V), each row from its own generator; (B,) int64."""
    if temperature < GREEDY:
        return logits.argmax(-1)
    logits = logits / temperature
    if top_k is not None:
        kth = logits.topk(min(top_k, logits.shape[-1])).values[:, -1:]
        logits = logits.masked_fill(logits < kth, float("-inf"))
    probs = logits.softmax(-1)
    if top_p is not None:
        ordered, index = probs.sort(-1, descending=True)
        outside = ordered.cumsum(-1) - ordered >= top_p  # keeps the token that crosses top_p
        outside[:, 0] = False  # fp32 may round top_p to 0
        probs = probs.masked_fill(outside.gather(-1, index.argsort(-1)), 0.0)
    return torch.stack([torch.multinomial(p, 1, generator=g)[0] for p, g in zip(probs, generators)])


def check_request(
    vocab_size: int,
    prompts: Sequence[Sequence[int]],
    max_new_tokens: int,
    temperature: float,
    top_k: int | None,
    top_p: float | None,
    seed: int,
) -> None:
    for row, prompt in enumerate(prompts):
        if isinstance(prompt, str) or not isinstance(prompt, Sequence):
            kind = type(prompt).__name__
            raise ConfigError(f"prompt {row} is a {kind}; give each as a list of token ids (of a tensor: .tolist())")
        if not prompt:
            raise ConfigError(f"prompt {row} has no tokens; start it with the tokenizer's BOS")
        if not (min(prompt) >= 0 and max(prompt) < vocab_size):
            raise ConfigError(f"prompt {row} has a token outside the vocabulary of {vocab_size}; check the tokenizer")
    if max_new_tokens < 0:
        raise ConfigError(f"max_new_tokens is {max_new_tokens}; it cannot be negative")
    if not temperature >= 0:
        raise ConfigError(f"temperature is {temperature}; use 0 for greedy or a positive number")
    if top_k is not None and top_k < 1:
        raise ConfigError(f"top_k is {top_k}; it must be at least 1")
    if top_p is not None and not 0 < top_p <= 1:
        raise ConfigError(f"top_p is {top_p}; it must be in (0, 1]")
    if not -(2**63) <= seed <= 2**64 - max(1, len(prompts)):  # what torch's generators take
        raise ConfigError(f"seed is {seed}; with those of all rows it must be between -2**63 and 2**64 - 1")
