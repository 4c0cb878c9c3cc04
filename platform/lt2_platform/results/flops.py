"""What runs have spent, from what the store knows of them: training FLOPs of their objective.

Neither teachers that are asked nor recomputation count; an objective of a user's own counts as next_token.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from functools import lru_cache
from typing import Any

from pydantic import ValidationError

from lt2.config import ConfigError, ModelConfig
from lt2.explain import explain
from lt2.train.objectives import NextTokenConfig, ObjectiveConfig
from lt2_platform.results.tables import RunInfo


@dataclass(frozen=True)
class Spending:
    """Training FLOPs per token of a run, and by how many more each until a step, where DSA is dense."""

    per_token: float
    warmup: Mapping[int, float]

    def by(self, step: float, tokens: float) -> float:
        """FLOPs of the first steps of a run, which read so many tokens."""
        dense = sum(more * min(1.0, until / step) for until, more in self.warmup.items()) if step else 0.0
        return tokens * (self.per_token + dense)


def spent(runs: Iterable[RunInfo]) -> float | None:
    """Training FLOPs of some runs together, those of no tokens aside; None where nothing tells them, or not of all.

    A run that goes on from another one counts from there.
    """
    trained = [(run, *run.last["tokens"]) for run in runs if run.last.get("tokens", (0, 0))[0] > 0]
    total = 0.0
    for run, step, tokens in trained:
        spending = spending_of(run.config, step, tokens)
        if isinstance(spending, str):
            return None
        before = run.info.get("tokens_before", 0)
        total += spending.by(step, tokens) - spending.by(step * before / tokens, before)
    return total if trained else None


def spending_of(config: Mapping[str, Any], step: int, tokens: float) -> Spending | str:
    """What a run with these settings spends, or why that is unknown. It had read so many tokens at `step`.

    The first call takes some seconds: it loads torch.
    """
    train = config.get("train")
    train = train if isinstance(train, Mapping) else {}
    batch = train.get("global_batch_size")
    if not isinstance(batch, int) or batch < 1:
        return "its settings say no train.global_batch_size"
    data = config.get("data")
    seq_len = data.get("seq_len") if isinstance(data, Mapping) else None
    if not isinstance(seq_len, int):  # a run of a version that did not record it
        seq_len = max(1, round(tokens / (step * batch)))
    model, objective = (json.dumps(part, sort_keys=True) for part in (config.get("model"), train.get("objective")))
    return _of_model(model, objective, seq_len)


@lru_cache(maxsize=256)
def _of_model(model: str, objective: str, seq_len: int) -> Spending | str:
    """Training FLOPs per token of a model and an objective, given as JSON, or why they cannot be counted."""
    from lt2.analysis.accounting import (  # brings torch, which readers of results do without
        objective_flops,
        warmup_flops,
    )

    asked: dict[str, Any] = json.loads(objective) or {}
    shipped = asked.get("type") in ObjectiveConfig.kinds and not asked.get("source")
    given: dict[str, Any] = json.loads(model) or {}
    fields = {key: value for key, value in given.items() if key in ModelConfig.model_fields and value is not None}
    try:
        trained = ObjectiveConfig.read(asked) if shipped else NextTokenConfig()
        config = ModelConfig.model_validate(fields)
        more = warmup_flops(config, trained, seq_len)
        dense = {until: 3 * flops for until, flops in more.items()}
        return Spending(objective_flops(config, trained, seq_len), dense)
    except (ValidationError, ConfigError, TypeError) as error:  # e.g. a mixer that this process does not know
        return f"its model cannot be counted: {why(error)}"


def why(error: Exception) -> str:
    """Why settings are no model: the first of their mistakes, or another error's first line."""
    text = explain(error, "settings") if isinstance(error, ValidationError) else str(error)
    return text.splitlines()[0][:200]
