"""Running tasks on a model: at its own depth, or at several, with the compute that each depth spent."""

from __future__ import annotations

import itertools
import math
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict, astuple, dataclass, replace
from typing import Any, TypeVar

import torch

from lt2.analysis.accounting import forward_flops
from lt2.config import ConfigError, ModelConfig
from lt2.layout import loops_text
from lt2.model import LoopedLM, LoopedOutput
from lt2_platform.data.stream import PackedDataset
from lt2_platform.data.tokenizers.tokenize import Tokenizer
from lt2_platform.evaluate.config import TaskConfig, check_depths, check_thresholds, depth_name
from lt2_platform.progress import Progress

Task = TypeVar("Task", bound=TaskConfig)


@dataclass(frozen=True)
class TaskContext:
    """What a task may use besides the model.

    Attributes:
        checkpoint: URI of the checkpoint the model came from.
        tokenizer: the one the model was trained with.
        dataset: the held-out split of the data; None when the evaluation names none.
        out: a folder (path or URI) of this task at this depth; an evaluation that was cut off finds its files again.
        progress: takes {"message": …} and numbers to show.
        actors: copies of the model on Ray that a task may ask for; 0 means to stay in this process.
    """

    checkpoint: str
    tokenizer: Tokenizer
    dataset: PackedDataset | None
    out: str
    progress: Progress
    actors: int = 0


@dataclass(frozen=True)
class Depth:
    """How deep a model is run: `n_loops`, each token stopping earlier where `early_exit` lets its halting decide, an
    exit gate at `exit_threshold` (None: the model's own)."""

    n_loops: int
    early_exit: bool
    exit_threshold: float | None = None

    def view(self, model: LoopedLM) -> LoopedLM:
        return model.at_depth(self.n_loops, halting=self.early_exit, exit_threshold=self.exit_threshold)

    @property
    def name(self) -> str:
        return depth_name(self.n_loops, self.early_exit, self.exit_threshold)

    @property
    def row(self) -> dict[str, Any]:
        """What rows say of it; `exit_threshold` only where one was asked for."""
        return {key: value for key, value in asdict(self).items() if value is not None}


def depths(model: LoopedLM, loops: Sequence[int], exit_thresholds: Sequence[float] = ()) -> list[Depth]:
    """Each of `loops` in full, then the model as it was trained if `loops` is empty or it halts, then early exit at
    each of `exit_thresholds`.

    Raises:
        ConfigError: a depth below 1, a threshold outside (0, 1], any of them given twice, or thresholds for a model
            without an exit gate.
    """
    n_loops, halts = model.config.n_loops, model.config.halting is not None
    found = [Depth(n, False) for n in check_depths(tuple(loops))]
    found += [Depth(n_loops, halts)] if halts or not loops else []
    found += [Depth(n_loops, True, threshold) for threshold in check_thresholds(tuple(exit_thresholds))]
    for depth in found:
        depth.view(model)  # what it refuses must not come after hours
    return found


def run_tasks(
    tasks: Sequence[TaskConfig],
    model: LoopedLM,
    context: TaskContext,
    *,
    loops: Sequence[int] = (),
    exit_thresholds: Sequence[float] = (),
) -> list[dict[str, Any]]:
    """Rows of every task at every depth: the task's own, with `task`, `n_loops`, `early_exit` and the compute spent.

    `mean_loops` and `flops_per_token` (forward) are averages over the tokens the model saw; a task that runs another
    copy of the model has none. A task whose type occurs twice is told apart by its place: "perplexity", "perplexity-1".

    Raises:
        ConfigError: a task returned something that is not rows, or a value that is not a number.
    """
    rows = []
    for depth in depths(model, loops, exit_thresholds):
        view = depth.view(model).eval()
        for name, task in named(tasks):
            context.progress({"message": f"{name}, {loops_text(*astuple(depth))}"})
            with Spent(view) as spent, torch.inference_mode():
                found = task.run(view, replace(context, out=f"{context.out}/{name}/{depth.name}"))
            if not isinstance(found, Iterable) or isinstance(found, Mapping | str):
                raise ConfigError(f"task {name} returned {found!r}; give a list of rows")
            place = {"task": name, **depth.row, **spent.summary()}
            rows += [placed(checked(name, row), place) for row in found]
    return rows


def placed(row: dict[str, Any], place: Mapping[str, Any]) -> dict[str, Any]:
    """A row with where it was measured; what took `votes` passes over the same tokens cost so many times one pass."""
    found = {**place, **row}
    if "flops_per_token" in place and "flops_per_token" not in row:
        found["flops_per_token"] *= row.get("votes", 1)
    return found


def named(tasks: Sequence[Task]) -> list[tuple[str, Task]]:
    """Tasks by names of their own: rows and files of two that were called alike could not be told apart."""
    found: dict[str, Task] = {}
    for task in tasks:
        label = getattr(task, "name", None) or task.type
        names = (f"{label}-{n}" if n else label for n in itertools.count())
        found[next(name for name in names if name not in found)] = task
    return list(found.items())


def checked(task: str, row: Any) -> dict[str, Any]:
    """`row` if it can be stored; its value as a float."""
    if not isinstance(row, dict) or not isinstance(row.get("metric"), str) or "value" not in row:
        raise ConfigError(
            f"task {task} returned {row!r}; a row is a dict with 'metric' (a name) and 'value' (a number)"
        )
    nested = [key for key, item in row.items() if not isinstance(item, str | int | float | bool | None)]
    if nested or isinstance(row["value"], str | None):
        raise ConfigError(f"task {task}, metric {row['metric']}: {nested or ['value']} must be plain numbers")
    return row | {"value": float(row["value"])}


def proportion(metric: str, hits: int, n: int, **more: Any) -> dict[str, Any]:
    """The row of a share of n items, with its standard error (sample variance, as lm-eval's)."""
    mean = hits / n
    return {"metric": metric, "value": mean, "stderr": math.sqrt(mean * (1 - mean) / max(n - 1, 1)), "n": n, **more}


class Spent:
    """Counts the tokens that pass through a model and the loops they ran, while it is entered.

    FLOPs are what the loops need, from the accounting: a token that halted is charged only the loops it ran, and the
    mixers' sequence terms are taken at the mean length: of sequences whose tokens see as many others on average.
    """

    def __init__(self, model: LoopedLM):
        self.model = model
        self.loops: Counter[int] = Counter()
        self.positions = 0.0

    def __enter__(self) -> Spent:
        self.hook = self.model.register_forward_hook(self.count, with_kwargs=True)
        return self

    def __exit__(self, *_: object) -> None:
        self.hook.remove()

    def count(self, model: Any, args: tuple, kwargs: dict[str, Any], output: LoopedOutput) -> None:
        B, L = output.hidden.shape[:2]
        cache, lengths = kwargs.get("cache"), kwargs.get("lengths")
        if output.loops_used is None:
            # The padding of a prefill is not counted; reading `lengths` is free, decode steps have none.
            tokens = B * L if lengths is None else int(lengths.sum())
            self.loops[kwargs.get("n_loops") or model.depth] += tokens
        else:
            used = output.loops_used
            if lengths is not None:
                used = used[torch.arange(L, device=used.device) < lengths[:, None]]
            tokens = used.numel()
            self.loops.update(dict(enumerate(used.flatten().bincount().tolist())))
        # The accounting's terms are means over a sequence read from its start; these tokens also see what was there.
        if lengths is None:
            self.positions += tokens * (L if cache is None else 2 * cache.used - L)
        else:  # each row's own length: what a row costs must not depend on its neighbours
            self.positions += int((lengths * (lengths if cache is None else 2 * cache.lengths - lengths)).sum())

    def summary(self) -> dict[str, float]:
        return cost(self.model.config, self.loops, self.positions)


def cost(config: ModelConfig, loops: Mapping[int, int], positions: float) -> dict[str, float]:
    """{"mean_loops", "flops_per_token"} of tokens by the loops they ran, of summed length `positions`; {} of none."""
    used = {n: count for n, count in loops.items() if count}
    total = sum(used.values())
    if not total:
        return {}
    length = round(positions / total)
    flops = sum(count * forward_flops(config, length, n_loops=n) for n, count in used.items())
    return {"mean_loops": sum(n * count for n, count in used.items()) / total, "flops_per_token": flops / total}


def depth_table(rows: Sequence[dict[str, Any]]) -> list[dict[str, Any]]:
    """One row per task, metric and depth: score beside mean loops, forward FLOPs per token, any votes and template."""
    kept = ("task", "metric", "n_loops", "early_exit", "mean_loops", "flops_per_token", "value", "stderr", "n")
    last = math.inf  # a model's own threshold stands behind those that were asked for
    depth = lambda row: (row["early_exit"], row["n_loops"], row.get("exit_threshold", last))  # noqa: E731
    order = sorted(rows, key=lambda row: (row["task"], row["metric"], *depth(row)))
    more = lambda row: {key: row[key] for key in ("exit_threshold", "votes", "chat") if row.get(key)}  # noqa: E731
    return [{key: row.get(key) for key in kept} | more(row) for row in order]
