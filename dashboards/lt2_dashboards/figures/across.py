"""Where the points of a training curve stand: by step, by tokens, by training FLOPs or by hours."""

from __future__ import annotations

import json
from collections.abc import Mapping
from functools import lru_cache
from typing import Any, Literal

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
from pydantic import ValidationError

from lt2.config import ConfigError, ModelConfig
from lt2_dashboards.figures.store import why
from lt2_platform.results.store import RunInfo

X = Literal["step", "tokens", "flops", "time"]
NAMES = {
    "step": "step",
    "tokens": "tokens",
    "flops": "training FLOPs (3 × forward, without teachers and recomputation)",
    "time": "hours",
}


def across(x: X, curve: pa.Table, run: RunInfo, table: pa.Table) -> np.ndarray | str:
    """By point of `curve` its place on the axis, or why this run has none; `table` has all curves of the run."""
    step = curve["step"].to_numpy()
    if x == "step":
        return step
    if x == "time":
        return (curve["time"].to_numpy() - run.created) / 3600
    logged = table.filter((pc.field("metric") == "tokens") & (pc.field("step") > 0))
    if logged.num_rows == 0:
        return "it has logged no tokens"
    at, tokens = logged["step"].to_numpy(), logged["last"].to_numpy()
    spent = np.interp(step, np.append(0, at), np.append(0.0, tokens))
    if x == "tokens":
        return spent
    train = run.config.get("train")
    batch = train.get("global_batch_size") if isinstance(train, Mapping) else None
    if not isinstance(batch, int) or batch < 1:
        return "its settings say no train.global_batch_size"
    seq_len = max(1, round(float(tokens[-1]) / (int(at[-1]) * batch)))
    per_token = _flops(json.dumps(run.config.get("model"), sort_keys=True), seq_len)
    return per_token if isinstance(per_token, str) else spent * per_token


@lru_cache(maxsize=256)
def _flops(model: str, seq_len: int) -> float | str:
    """Forward and backward FLOPs per token of a model, from its settings as JSON; or why they are not known."""
    from lt2.analysis.accounting import training_flops  # brings torch, which nothing else here needs

    given: dict[str, Any] = json.loads(model) or {}
    fields = {key: value for key, value in given.items() if key in ModelConfig.model_fields and value is not None}
    try:
        return training_flops(ModelConfig.model_validate(fields), seq_len)
    except (ValidationError, ConfigError, TypeError) as error:  # e.g. a mixer that this process does not know
        return f"its model cannot be counted: {why(error)}"
