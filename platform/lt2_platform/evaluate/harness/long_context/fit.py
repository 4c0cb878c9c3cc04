"""Prompts that fill a length: how much haystack, how many words or documents fit so many tokens."""

from __future__ import annotations

import random
from collections.abc import Callable
from typing import Any

from lt2.config import ConfigError
from lt2_platform.data.tokenizers.tokenize import Tokenizer

Draw = Callable[[int, int], tuple[str, list[str]]]
"""(units, number of the sample) -> (prompt, answers); more units make a longer prompt."""


def rng_of(seed: int, name: str, index: int) -> random.Random:
    """A generator of its own for every sample, so that neither order nor other tasks change it."""
    return random.Random(f"{seed}/{name}/{index}")


def filled(
    name: str,
    draw: Draw,
    tokenizer: Tokenizer,
    length: int,
    new_tokens: int,
    *,
    samples: int,
    least: int,
    most: int,
    too_few: str | None = None,
) -> list[tuple[str, list[str], int]]:
    """(prompt, answers, tokens) of each sample: with BOS and `new_tokens` at most `length` tokens.

    The units, from `least` to `most`, are what sample 0 has room for; a sample that turns out longer gets fewer.

    Raises:
        ConfigError: a sample does not fit with even the least units; or all units fit and `too_few` says what to do.
    """
    room = length - new_tokens - (tokenizer.bos_id is not None)
    count = lambda text: len(tokenizer.encode_batch([text])[0])  # noqa: E731
    size = largest(lambda units: count(draw(units, 0)[0]) <= room, least - 1, most)
    if size < least:
        needed = count(draw(least, 0)[0]) + length - room
        raise ConfigError(
            f"{name}: {length} tokens leave no room for a haystack, it takes {needed} or more; "
            "give greater --lengths, or leave the task out of --tasks"
        )
    if size == most and too_few is not None:
        raise ConfigError(f"{name}: {too_few}, too few to fill {length:,} tokens")
    found = []
    for index in range(samples):
        units = size
        while True:
            text, answers = draw(units, index)
            tokens = count(text)
            if tokens <= room:
                break
            if units == least:
                raise ConfigError(f"{name}: sample {index} does not fit {length} tokens; take a greater length")
            units = max(least, units - max(1, units // 50))  # samples differ in tokens
        found.append((text, answers, tokens))
    return found


def largest(fits: Callable[[int], bool], low: int, high: int) -> int:
    """The largest n in [low, high] with fits(n), for a predicate that is true at `low` and turns false once."""
    while low < high:
        middle = (low + high + 1) // 2
        low, high = (middle, high) if fits(middle) else (low, middle - 1)
    return low


def row(text: str, outputs: list[str], tokens: int, length: int, **more: Any) -> dict[str, Any]:
    return {"query": text, "outputs": outputs, "length": tokens, "max_length": length, **more}
