"""Prompts that fill a length: how much haystack, how many words or documents fit so many tokens."""

from __future__ import annotations

import random
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from lt2.config import ConfigError
from lt2_platform.data.tokenizers.tokenize import Tokenizer

Draw = Callable[[int, int, random.Random], tuple[str, list[str]]]
"""(units, number of the sample, its generator) -> (prompt, answers); more units make a longer prompt."""


@dataclass(frozen=True)
class Drawing:
    """How the samples of a task are made, of `least` to `most` units. too_few: what to say if even the most are."""

    draw: Draw
    least: int
    most: int
    too_few: str | None = None


def filled(
    name: str, drawing: Drawing, tokenizer: Tokenizer, length: int, new_tokens: int, *, samples: int, seed: int
) -> list[tuple[str, list[str], int]]:
    """(prompt, answers, tokens) of each sample: with BOS and `new_tokens` at most `length` tokens.

    The units are as many as sample 0 has room for; a sample that turns out longer gets fewer. Every sample has a
    generator of its own, so that neither order nor other tasks change it.

    Raises:
        ConfigError: a sample does not fit with even the least units; or all units fit and there is a `too_few`.
    """
    room, least = length - new_tokens - (tokenizer.bos_id is not None), drawing.least
    count = lambda text: len(tokenizer.encode_batch([text])[0])  # noqa: E731
    draw = lambda units, index: drawing.draw(units, index, random.Random(f"{seed}/{name}/{index}"))  # noqa: E731
    size = largest(lambda units: count(draw(units, 0)[0]) <= room, least - 1, drawing.most)
    if size < least:
        needed = count(draw(least, 0)[0]) + length - room
        raise ConfigError(
            f"{name}: {length} tokens leave no room for a haystack, it takes {needed} or more; "
            "give greater --lengths, or leave the task out of --tasks"
        )
    if size == drawing.most and drawing.too_few is not None:
        raise ConfigError(f"{name}: {drawing.too_few}, too few to fill {length:,} tokens")
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
