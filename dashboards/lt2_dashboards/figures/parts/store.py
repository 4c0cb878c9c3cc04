"""What several figures ask of a store: the evaluated runs, newest first, with their architecture and scores."""

from __future__ import annotations

import json
import math
import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from lt2.layout import realised_ratio
from lt2_dashboards.figures.parts.paper import NORMALISED, TASKS
from lt2_dashboards.queries import PERPLEXITY, Snapshot
from lt2_dashboards.workflows.records import NotThereError
from lt2_platform.evaluate.repeats import STANDING_SQL, few_of
from lt2_platform.results.store import RunInfo

MAX_RUNS = 1_000  # of one figure, newest first
AT_OWN_DEPTH = "e.rowid IN (SELECT place FROM own)"  # SQL: results of a model as it was trained
# SQL: a number inside an evaluation row's JSON, in which a NaN must not end the query
_PARAMETERS = "TRY_CAST(regexp_extract(e.row, '\"parameters\": ([0-9]+)', 1) AS BIGINT)"
_STDERR = "TRY_CAST(regexp_extract(e.row, '\"stderr\": ([0-9.eE+-]+)', 1) AS DOUBLE)"
_LIMIT = "TRY_CAST(regexp_extract(e.row, '\"limit\": ([0-9]+)', 1) AS BIGINT)"
_RATIO = re.compile(r"(?!0+:0+$)[0-9]{1,4}:[0-9]{1,4}")
LABELS = {
    "full": "Full",
    "window": "Window",
    "mla": "MLA",
    "la": "LA",
    "retnet": "RetNet",
    "mamba2": "Mamba2",
    "gla": "GLA",
    "hgrn2": "HGRN2",
    "deltanet": "DeltaNet",
    "gdn": "GDN",
    "kda": "KDA",
    "nsa": "NSA",
    "dsa": "DSA",
}


@dataclass(frozen=True)
class Architecture:
    """A run's layout in the paper's words.

    `mixers` are config types, attention first in hybrids; `name` is without depth ("Transformer", "Hybrid (Full+GDN)"),
    `title` as in the paper's tables ("Looped Hybrid (Full+GDN)").
    """

    mixers: tuple[str, ...]
    name: str
    n_loops: int
    layout: dict[str, Any]

    @property
    def title(self) -> str:
        return f"Looped {self.name}" if self.n_loops > 1 else self.name

    @property
    def gate(self) -> str | None:
        """The gate after the attention, or None; a store may also say that with the word "none"."""
        parts = [self.layout.get("attention"), self.layout.get("mixer"), *(self.layout.get("mixers") or ())]
        gates = [
            part.get("gate") for part in parts if isinstance(part, Mapping) and part.get("gate") not in (None, "none")
        ]
        return str(gates[0]) if gates else None


@dataclass(frozen=True)
class Evaluated:
    """One run with results. `scores` has (task, metric) -> value as stored; `standing` says which of two counts.

    `errors` has their standard errors where they were stored, `limits` how many items at most were asked of a task.
    """

    run: str
    config: dict[str, Any]
    scores: dict[tuple[str, str], float] = field(default_factory=dict)
    errors: dict[tuple[str, str], float] = field(default_factory=dict)
    limits: dict[str, int] = field(default_factory=dict)
    parameters: int | None = None
    perplexity: float | None = None

    @property
    def architecture(self) -> Architecture | None:
        return architecture(self.config)

    @property
    def attention_in(self) -> str | None:
        return attention_in(self.config)

    def accuracy(self, task: str) -> float | None:
        """Percent, with acc_norm where that is customary and the run has it."""
        return self.percent(task, *_customary(task))

    def error(self, task: str) -> float | None:
        """The standard error of `accuracy`, in its unit."""
        return self.percent_error(task, *_customary(task))

    def percent(self, task: str, *metrics: str) -> float | None:
        """The first of `metrics` that the run has, in percent."""
        values = [self.scores[task, metric] for metric in metrics if (task, metric) in self.scores]
        return None if not values else values[0] if values[0] > 1 else 100 * values[0]

    def percent_error(self, task: str, *metrics: str) -> float | None:
        """The standard error of `percent`, in percent too; None where it was not stored."""
        found = next((key for metric in metrics if (key := (task, metric)) in self.scores), None)
        if found is None or found not in self.errors:
            return None
        return self.errors[found] if self.scores[found] > 1 else 100 * self.errors[found]

    @property
    def average(self) -> float | None:
        """Mean accuracy over the paper's eight tasks, in percent; None unless all eight are there."""
        return self.mean({task: _customary(task) for task in TASKS})

    def mean(self, tasks: Mapping[str, Iterable[str]]) -> float | None:
        """Mean percent over `tasks`, each by the first of its metrics that the run has; None unless all are there."""
        values = [value for task, metrics in tasks.items() if (value := self.percent(task, *metrics)) is not None]
        return math.fsum(values) / len(values) if len(values) == len(tasks) else None


def quick_looks(found: Iterable[Evaluated], tasks: Iterable[str]) -> list[str]:
    """The note on runs that were asked only some items of `tasks`; none if there are no such runs."""
    wanted = set(tasks)
    limits = {run.run: {limit for task, limit in run.limits.items() if task in wanted} for run in found}
    few = [f"{run} ({few_of(asked)})" for run, asked in limits.items() if asked]
    return [f"Quick looks, with a limit of items per task: {', '.join(few)}."] if few else []


def evaluated(snapshot: Snapshot, runs: Iterable[str] | None = None) -> list[Evaluated]:
    """The runs with evaluations at their own depth, newest first; `runs` limits and orders them.

    Raises NotThereError for one of `runs` that the store does not have.
    """
    wanted = None if runs is None else list(runs)
    if wanted is not None:
        known_runs(snapshot, wanted)
    picked, bound = ("", []) if wanted is None else ("AND list_contains(?, e.run)", [wanted])
    rows = snapshot.query(
        "WITH newest AS (SELECT e.run, max(created) AS created FROM evals e LEFT JOIN runs USING (run) "
        f"WHERE {AT_OWN_DEPTH} {picked} GROUP BY e.run ORDER BY created DESC NULLS LAST, e.run LIMIT {MAX_RUNS}) "
        f"SELECT e.run, e.task, e.metric, e.value, {PERPLEXITY}, {_PARAMETERS}, {_STDERR}, {_LIMIT} "
        f"FROM newest JOIN evals e USING (run) WHERE {AT_OWN_DEPTH} AND e.value IS NOT NULL "
        f"ORDER BY newest.created DESC NULLS LAST, e.run, {STANDING_SQL}, e.rowid",
        bound,
    )
    found: dict[str, dict[str, Any]] = {}
    for run, task, metric, value, is_perplexity, parameters, stderr, limit in rows:
        entry = found.setdefault(
            run, {"scores": {}, "errors": {}, "limits": {}, "parameters": None, "perplexity": None}
        )
        key = task or "", (metric or "acc").split(",")[0]  # lm-eval writes "acc_norm,none"
        entry["scores"][key] = value
        # Of an evaluation that is repeated these are the last one's too, or unknown.
        for known, name, of in ((stderr, "errors", key), (limit, "limits", key[0])):
            entry[name].pop(of, None)
            if known is not None:
                entry[name][of] = known
        entry["parameters"] = parameters or entry["parameters"]
        if is_perplexity:
            entry["perplexity"] = value
    infos = snapshot.runs(list(found))
    order = found if wanted is None else wanted
    return [Evaluated(run, infos[run].config if run in infos else {}, **found.get(run, {})) for run in order]


def _customary(task: str) -> tuple[str, ...]:
    return ("acc_norm", "acc") if task in NORMALISED else ("acc",)


def known_runs(snapshot: Snapshot, runs: list[str]) -> dict[str, RunInfo]:
    """What the store knows of `runs`, in that order. Raises NotThereError for one that it does not have."""
    found = snapshot.runs(runs)
    if unknown := [run for run in runs if run not in found]:
        raise NotThereError(f"no run {unknown[0][:60]!r}; it may have been deleted")
    return found


def rows_of(
    snapshot: Snapshot, condition: str, parameters: Sequence[Any] = (), *, runs: list[str] | None = None
) -> list[tuple[str, dict[str, Any]]]:
    """(run, whole evaluation row) where the SQL `condition` on `evals` holds: newest run first, in order of writing.

    runs: only theirs.
    """
    bound = list(parameters)
    if runs is not None:
        condition, bound = f"{condition} AND list_contains(?, e.run)", [*bound, runs]
    found = snapshot.query(
        f"SELECT e.run, e.row FROM evals e LEFT JOIN runs USING (run) WHERE {condition} "
        "ORDER BY created DESC NULLS LAST, e.run, e.rowid",
        bound,
    )
    return [(run, json.loads(row)) for run, row in found]


def architecture(config: Mapping[str, Any]) -> Architecture | None:
    """From a run's config; None if it describes no layout."""
    model = config.get("model", config)
    layout = model.get("layout") if isinstance(model, Mapping) else None
    if not isinstance(layout, Mapping):
        return None
    loops = model.get("n_loops")
    n_loops = loops if isinstance(loops, int) else 1
    first, second = _type(layout.get("attention")), _type(layout.get("mixer"))
    if layout.get("type") in ("hybrid", "random", "kept") and first and second:
        name = f"{label(first)}+{label(second)}" if first == "full" else f"{label(second)}+{label(first)}"
        kind = "Random hybrid" if layout["type"] == "random" else "Hybrid"
        return Architecture((first, second), f"{kind} ({name})", n_loops, dict(layout))
    if layout.get("type") == "uniform" and second:
        name = "Transformer" if second == "full" else label(second)
        return Architecture((second,), name, n_loops, dict(layout))
    masks = [_type(mixer) for mixer in layout.get("mixers") or ()]
    if masks and all(masks):
        mixers = tuple(mask for mask in masks if mask)
        return Architecture(mixers, " to ".join(label(mixer) for mixer in mixers), n_loops, dict(layout))
    return None


def attention_in(config: Mapping[str, Any]) -> str | None:
    """In how many layers of a hybrid attention really is: "2 of 20 layers (1:9 for 1:6)"; None of other models."""
    model = config.get("model", config)
    layout, n_layers = (model.get("layout"), model.get("n_layers")) if isinstance(model, Mapping) else (None, None)
    if not isinstance(layout, Mapping) or layout.get("type") != "hybrid" or not isinstance(n_layers, int):
        return None
    ratio = str(layout.get("ratio", "1:4"))
    return realised_ratio(ratio, n_layers) if _RATIO.fullmatch(ratio) else None


def label(mixer: str) -> str:
    return LABELS.get(mixer, mixer)


def _type(mixer: Any) -> str | None:
    kind = mixer.get("type") if isinstance(mixer, Mapping) else None
    return kind if isinstance(kind, str) else None
