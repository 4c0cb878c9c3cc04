"""A random-layout model answers multiple choice by the majority of its draws (lt2.voting says how a vote ends)."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch

from lt2.voting import majority_choice


class Voted(tuple):
    """(log-likelihood, greedy) by the draws' mean probability, as lm-eval reads it; `draws` has each one's own."""

    draws: tuple[float, ...]

    def __new__(cls, total: float, greedy: bool, draws: Sequence[float]) -> Voted:
        made = super().__new__(cls, (total, greedy))
        made.draws = tuple(draws)
        return made


def decided_by_vote(task: Any, votes: int) -> None:
    """Make a multiple-choice task score the option that most of the draws choose; other metrics stay as they are.

    Under a normalised metric each draw chooses by its normalised log-likelihoods. What has no score of any draw (an
    empty continuation) is chosen by none.
    """
    if task.OUTPUT_TYPE != "multiple_choice":
        return
    plain = task.process_results

    def process_results(doc: Mapping[str, Any], results: Sequence[Any]) -> dict[str, Any]:
        found = plain(doc, results)
        options = task.doc_to_choice(doc)
        asked = results[: len(options)]  # after them may come the unconditional ones of mutual information
        draws = torch.tensor(
            [getattr(result, "draws", (float("-inf"),) * votes) for result in asked], dtype=torch.float64
        )
        sizes = {
            "acc": [1] * len(options),
            "acc_norm": [len(option) for option in options],
            "acc_bytes": [len(option.encode()) for option in options],
        }
        for metric, lengths in sizes.items():
            if metric in found:
                chosen = majority_choice(draws.T / torch.tensor(lengths))
                # lm-eval picks the largest, normalised or not: 0 among negatives.
                picked = [(0.0 if index == chosen else -1.0, False) for index in range(len(options))]
                found[metric] = plain(doc, [*picked, *results[len(options) :]])[metric]
        return found

    task.process_results = process_results
