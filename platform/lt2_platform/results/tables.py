"""Runs and evaluations as Arrow tables that answer questions over all runs at once: pure functions, no storage.

runs     run, entry (the whole RunInfo as JSON), state, created, updated, step, total (steps asked for)
config   run, key (dotted), text, number: one row per setting
metrics  run, metric, step, value: the last value of each logged metric
evals    run, name, task, metric, value, row (the whole evaluation row as JSON)
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping
from dataclasses import asdict, dataclass, field
from typing import Any

import pyarrow as pa
import pyarrow.compute as pc

UNITS = {
    **dict.fromkeys(["loss", "ce", "validation_loss", "kl"], "nats/token"),
    **dict.fromkeys(["step_time", "data_wait", "save_stall"], "s"),
    "tokens_per_s": "tokens/s",
    "peak_memory_gb": "GB",
}
"""Of the metrics that training logs; of `loss` where the objective is one of `IN_NATS` (`unit_of`)."""

IN_NATS = ("next_token", "exit_gate", "distill")

STALE_SECONDS = 300.0  # a live writer speaks at least every minute

_TEXT, _INT, _FLOAT = pa.string(), pa.int64(), pa.float64()
SCHEMAS = {
    "runs": pa.schema(
        [("run", _TEXT), ("entry", _TEXT), ("state", _TEXT), ("created", _FLOAT), ("updated", _FLOAT)]
        + [("step", _INT), ("total", _INT)]
    ),
    "config": pa.schema([("run", _TEXT), ("key", _TEXT), ("text", _TEXT), ("number", _FLOAT)]),
    "metrics": pa.schema([("run", _TEXT), ("metric", _TEXT), ("step", _INT), ("value", _FLOAT)]),
    "evals": pa.schema(
        [("run", _TEXT), ("name", _TEXT), ("task", _TEXT), ("metric", _TEXT), ("value", _FLOAT), ("row", _TEXT)]
    ),
}
Tables = dict[str, pa.Table]
Eval = tuple[str, str, dict[str, Any]]  # run, name of the evaluation, row


@dataclass(frozen=True)
class RunInfo:
    """What the store knows about one run without opening its metrics.

    `state` is the writer's last word (running, finished, failed); `status` also tells a run that went silent.
    `last` maps each metric to (step, value) of its last row. Times are unix seconds.
    """

    run_id: str
    created: float
    updated: float
    state: str = "running"
    step: int = 0
    config: dict[str, Any] = field(default_factory=dict)
    info: dict[str, Any] = field(default_factory=dict)
    last: dict[str, tuple[int, float]] = field(default_factory=dict)
    summary: dict[str, Any] | None = None

    @property
    def elsewhere(self) -> bool:
        """Whether it is a model that no run of this store trained: it has no settings of a training to compare."""
        return self.state == "evaluated" or not {"evaluated", "imported"}.isdisjoint(self.config)

    def status(self, now: float) -> str:
        """running, stalled (a writer that has been silent for five minutes), finished or failed."""
        silent = self.state == "running" and now - self.updated > STALE_SECONDS
        return "stalled" if silent else self.state

    def to_json(self) -> str:
        return json.dumps(asdict(self))

    @classmethod
    def from_json(cls, value: dict[str, Any]) -> RunInfo:
        return cls(**{**value, "last": {k: (int(s), float(v)) for k, (s, v) in value.get("last", {}).items()}})


def tables(runs: Iterable[RunInfo], evals: Iterable[Eval]) -> Tables:
    """The four tables of some runs and evaluation rows."""
    rows: dict[str, list[tuple[Any, ...]]] = {name: [] for name in SCHEMAS}
    for run in runs:
        flat = flatten(run.config)
        head = (run.run_id, run.to_json(), run.state, run.created, run.updated, run.step, total_steps(flat))
        rows["runs"].append(head)
        rows["config"] += [(run.run_id, key, as_text(value), as_number(value)) for key, value in flat.items()]
        rows["metrics"] += [(run.run_id, metric, step, value) for metric, (step, value) in run.last.items()]
    for run_id, name, row in evals:
        task, metric = (str(row[key]) if row.get(key) is not None else None for key in ("task", "metric"))
        rows["evals"].append((run_id, name, task, metric, as_number(row.get("value")), json.dumps(row)))
    return {name: _table(rows[name], schema) for name, schema in SCHEMAS.items()}


def overlay(base: Tables, newer: Tables) -> Tables:
    """`base` with the runs of `newer` in place of its own of that name, and the evaluations of both."""
    stays = ~pc.field("run").isin(newer["runs"]["run"].combine_chunks())
    kept = {name: table if name == "evals" else table.filter(stays) for name, table in base.items()}
    return {name: pa.concat_tables([kept[name], newer[name]]) for name in SCHEMAS}


def empty_tables() -> Tables:
    return {name: schema.empty_table() for name, schema in SCHEMAS.items()}


def read_runs(table: pa.Table) -> dict[str, RunInfo]:
    """The runs of a `runs` table by id."""
    entries = zip(table["run"].to_pylist(), table["entry"].to_pylist())
    return {run: RunInfo.from_json(json.loads(entry)) for run, entry in entries}


def read_evals(table: pa.Table) -> list[Eval]:
    columns = (table[name].to_pylist() for name in ("run", "name", "row"))
    return [(run, name, json.loads(row)) for run, name, row in zip(*columns)]


def flatten(config: Mapping[str, Any], prefix: str = "") -> dict[str, Any]:
    """Nested mappings as one level with dotted keys; lists stay values."""
    flat: dict[str, Any] = {}
    for key, value in config.items():
        if isinstance(value, Mapping):
            flat |= flatten(value, f"{prefix}{key}.")
        else:
            flat[f"{prefix}{key}"] = value
    return flat


def total_steps(config: Mapping[str, Any]) -> int | None:
    """How many steps a run was asked for, from its flattened config, or None if it does not say."""
    for key in ("train.steps", "steps", *(key for key in config if key.endswith(".steps"))):
        if isinstance(config.get(key), int):
            return config[key]
    return None


def objective_of(config: Mapping[str, Any]) -> str:
    """What a run minimises, by its settings: the objective's type (runs from before there were several say none), and
    the depths that its steps run where they differ.
    """
    depths = depths_of(config)
    return _objective_type(flatten(config)) + (f" at {depths} loops" if depths else "")


def depths_of(config: Mapping[str, Any]) -> str:
    """The depths of a run whose steps differ in them, "" where they do not."""
    loops = flatten(config).get("train.objective.loops")
    return as_text(loops) if loops else ""


def _objective_type(flat: Mapping[str, Any]) -> str:
    return str(flat.get("train.objective.type", "next_token"))


def unit_of(metric: str, config: Mapping[str, Any]) -> str:
    """The unit of a metric that a run of these settings logged, "" where it has none or none is known.

    Alignment's loss is a squared distance of hidden states, and what an objective of one's own returns is unknown.
    """
    return "" if metric == "loss" and _objective_type(flatten(config)) not in IN_NATS else UNITS.get(metric, "")


def as_text(value: Any) -> str:
    """A setting as shown and compared: text as it is, everything else as JSON."""
    return value if isinstance(value, str) else json.dumps(value, ensure_ascii=False)


def as_number(value: Any) -> float | None:
    return float(value) if isinstance(value, int | float) and not isinstance(value, bool) else None


def _table(rows: list[tuple[Any, ...]], schema: pa.Schema) -> pa.Table:
    columns = list(zip(*rows)) or [[] for _ in schema]
    return pa.table([pa.array(column, field.type) for column, field in zip(columns, schema)], schema=schema)
