"""Which tokens of which source a mixture takes: arithmetic on token counts, exact and the same everywhere."""

from __future__ import annotations

from collections.abc import Sequence
from fractions import Fraction
from typing import Any, NamedTuple

from lt2.config import ConfigError
from lt2_platform.data.sources.configs import MixtureConfig, describe


class Segment(NamedTuple):
    """The first `tokens` tokens of a unit's staged stream."""

    unit: int
    tokens: int


def whole(records: Sequence[dict[str, Any]], split: str) -> list[Segment]:
    """All tokens of every unit, in the order of the sources."""
    return [Segment(record["unit"], record["tokens"].get(split, 0)) for record in records]


def mix(config: MixtureConfig, streams: Sequence[Sequence[Segment]]) -> tuple[list[Segment], list[dict[str, Any]]]:
    """The training stream of a mixture of the sources' streams, source after source; and one record per source.

    Records: {source, weight (normalised), available and taken tokens, epochs}. Raises ConfigError for a source without
    training tokens.
    """
    available = [sum(segment.tokens for segment in stream) for stream in streams]
    for share, tokens in zip(config.sources, available, strict=True):
        if not tokens:
            raise ConfigError(f"the mixture's source {describe(share.source)} has no training tokens; drop it")
    weights = [Fraction(share.weight or there) for share, there in zip(config.sources, available, strict=True)]
    lasts = [tokens / weight for tokens, weight in zip(available, weights, strict=True)]
    length = min(lasts) if config.stopping_strategy == "first_exhausted" else max(lasts)
    taken = [int(length * weight) for weight in weights]
    mixed = [segment for stream, tokens in zip(streams, taken, strict=True) for segment in _take(stream, tokens)]
    account = [
        {
            "source": describe(share.source),
            "weight": float(weight / sum(weights)),
            "available": there,
            "tokens": tokens,
            "epochs": tokens / there,
        }
        for share, weight, there, tokens in zip(config.sources, weights, available, taken, strict=True)
    ]
    return mixed, account


def _take(stream: Sequence[Segment], tokens: int) -> list[Segment]:
    """The first `tokens` tokens of the stream repeated without end."""
    epochs, rest = divmod(tokens, sum(segment.tokens for segment in stream))
    taken = list(stream) * epochs
    for unit, count in stream:
        if not rest:
            break
        taken.append(Segment(unit, min(count, rest)))
        rest -= taken[-1].tokens
    return taken
