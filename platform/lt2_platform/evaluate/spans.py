"""Means over spans of text and their standard errors, of one model and of the difference of two on the same spans.

Importing this module does not import torch.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numpy as np

GROUPS = 64


def readable(row: Mapping[str, Any]) -> dict[str, Any]:
    """A row without its `groups`, which are for computing and not for reading."""
    return {name: value for name, value in row.items() if name != "groups"}


@np.errstate(invalid="ignore")  # a model that diverged has infinite losses
def mean_of_spans(nats: np.ndarray, tokens: np.ndarray) -> dict[str, float]:
    """{"value", "n", maybe "stderr"} of the nats per token from the sums of each span, (S,) both.

    The standard error is that of a ratio of sums; where all spans count as many tokens it is their mean's.
    """
    S, total = len(nats), tokens.sum()
    mean = nats.sum() / total
    found = {"value": float(mean), "n": int(total)}
    if S > 1:
        found["stderr"] = float(np.sqrt(np.square(nats - mean * tokens).sum() * S / (S - 1)) / total)
    return found


def grouped(nats: np.ndarray, tokens: np.ndarray) -> str:
    """The text "nats/tokens nats/tokens …" of at most GROUPS groups of spans that follow each other, from the sums of
    each span, (S,) both.

    Little enough to be stored with every result, and enough for the standard error of a difference. Spans of one
    document are alike; most are in one group.
    """
    groups = np.array_split(np.arange(len(nats)), min(len(nats), GROUPS))
    return " ".join(f"{nats[group].sum():.4f}/{tokens[group].sum():.0f}" for group in groups)


def _sums(groups: str) -> np.ndarray:
    """(2, groups): nats, tokens."""
    return np.array([group.split("/") for group in groups.split()], dtype=float).reshape(-1, 2).T


@np.errstate(invalid="ignore")
def difference(first: str, second: str) -> dict[str, float] | None:
    """`mean_of_spans` of how many more nats per token the second has, of what `grouped` made of two models on the same
    spans; None if they are not the same.

    What makes a span hard is hard for both and drops out, so its standard error is much below those of the two.
    """
    (nats, tokens), (others, their_tokens) = _sums(first), _sums(second)
    if not len(tokens) or not np.array_equal(tokens, their_tokens):
        return None
    return mean_of_spans(others - nats, tokens)
