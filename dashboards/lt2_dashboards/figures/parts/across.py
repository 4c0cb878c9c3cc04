"""Where the points of a training curve stand: by step, by tokens, by training FLOPs or by hours."""

from __future__ import annotations

from typing import Literal

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

from lt2_platform.results.flops import spending_of
from lt2_platform.results.store import RunInfo

X = Literal["step", "tokens", "flops", "time"]
NAMES = {
    "step": "step",
    "tokens": "tokens",
    "flops": "training FLOPs (of the objective, without teachers and recomputation)",
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
        return "it logged no tokens"
    at, tokens = logged["step"].to_numpy(), logged["last"].to_numpy()
    spent = np.interp(step, np.append(0, at), np.append(0.0, tokens))
    if x == "tokens":
        return spent
    spending = spending_of(run.config, int(at[-1]), float(tokens[-1]))
    return spending if isinstance(spending, str) else np.array([spending.by(*point) for point in zip(step, spent)])
