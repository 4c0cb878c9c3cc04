"""Evaluating a stored checkpoint: load it, run the tasks, say what is needed to reproduce the numbers."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch

from lt2.analysis.accounting import parameters
from lt2.config import ConfigError
from lt2.model import LoopedLM
from lt2.packages import version_of
from lt2_platform.data.stream import PackedDataset
from lt2_platform.data.tokenizers.tokenize import load_recorded
from lt2_platform.evaluate.config import HarnessConfig, TaskConfig, depth_name
from lt2_platform.evaluate.repeats import at_own_depth, is_reading
from lt2_platform.evaluate.tasks import TaskContext, named, run_tasks
from lt2_platform.json_values import finite
from lt2_platform.machine.devices import this_device
from lt2_platform.progress import Progress, silent
from lt2_platform.storage import Storage
from lt2_platform.train.checkpoints.checkpoint import load_model, read_info, resolve


@dataclass(frozen=True)
class Evaluated:
    """Rows of `run_tasks`, and of which checkpoint they are; `parameters` are the model's unique ones."""

    rows: list[dict[str, Any]]
    step: int
    n_loops: int
    parameters: int

    def evaluations(self) -> dict[str, list[dict[str, Any]]]:
        """The rows as the results store takes them, by the name of the evaluation.

        Those of the model as it was trained are "validation", readings by (loop, layer) "diagnostics"; a table over
        depths is "depth" as well. Losses by position are "positions", at every depth.
        """
        rows = [row | {"step": self.step, "parameters": self.parameters} for row in self.rows]
        trained = at_own_depth(rows, self.n_loops)
        found = {"validation": [row for row in trained if not is_reading(row)]}
        found["diagnostics"] = [row for row in trained if "layer" in row]
        found["positions"] = [row for row in rows if "position" in row]
        found["depth"] = [row for row in rows if not is_reading(row)] if len(trained) < len(rows) else []
        return {name: rows for name, rows in found.items() if rows or name == "validation"}


def evaluate_checkpoint(
    checkpoint: str,
    tasks: Sequence[TaskConfig],
    *,
    data: str | None,
    out: str,
    loops: Sequence[int] = (),
    exit_thresholds: Sequence[float] = (),
    actors: int = 0,
    progress: Progress = silent,
) -> Evaluated:
    """Run tasks on a checkpoint (or the newest one of a run), on a GPU if there is one; at which depths, `tasks.depths`
    says.

    The rows and what they came from also go to `<out>/evaluation.json`. `data` is a packed dataset, for tasks that need
    one.

    Raises:
        ConfigError: no such checkpoint or data, a damaged checkpoint, or what a task says of its input.
    """
    uri = resolve(checkpoint)
    model, _, info = load_model(uri)
    model = model.to(this_device())
    context = TaskContext(
        checkpoint=uri,
        tokenizer=load_recorded(info),
        dataset=PackedDataset(data, "validation") if data is not None else None,
        out=out,
        progress=progress,
        actors=actors,
    )
    return _evaluated(model, read_info(uri).state.step, tasks, context, loops, exit_thresholds)


def _evaluated(
    model: LoopedLM,
    step: int,
    tasks: Sequence[TaskConfig],
    context: TaskContext,
    loops: Sequence[int],
    exit_thresholds: Sequence[float],
) -> Evaluated:
    rows = run_tasks(tasks, model, context, loops=loops, exit_thresholds=exit_thresholds)
    found = Evaluated(rows, step, model.config.n_loops, parameters(model.config).total)
    write_record(context.out, found, context.checkpoint, tasks)
    return found


def evaluate_anything(
    place: str,
    tasks: Sequence[HarnessConfig],
    *,
    out: str,
    loops: Sequence[int] = (),
    exit_thresholds: Sequence[float] = (),
    actors: int = 0,
    progress: Progress = silent,
) -> Evaluated:
    """`evaluate_checkpoint` without packed data; `place` may also be an HF model folder or a .gguf file.

    Raises:
        ConfigError: as `evaluate_checkpoint`; also for depths of a model that has one only.
    """
    from lt2_platform.evaluate.harness.models import ModelSource, load
    from lt2_platform.evaluate.harness.run import evaluate

    gguf = place.endswith(".gguf")
    source = ModelSource(str(Path(place).parent), gguf=Path(place).name) if gguf else ModelSource(place)
    if not source.is_transformers:
        return evaluate_checkpoint(
            place,
            tasks,
            data=None,
            out=out,
            loops=loops,
            exit_thresholds=exit_thresholds,
            actors=actors,
            progress=progress,
        )
    if source.is_export:
        # By the code of checkpoints, hence with their numbers.
        context = TaskContext(source.place, source.load_tokenizer(), None, out, progress, actors)
        return _evaluated(source.load_looped(), 0, tasks, context, loops, exit_thresholds)
    if loops or exit_thresholds:
        raise ConfigError(f"{place} is not an LT2 model; leave loops and exit thresholds out")
    rows, size = [], 0
    for name, task in named(tasks):
        source = replace(source, max_length=task.max_length)
        scorer = load(source).scorer
        size = sum(weight.numel() for weight in scorer.model.parameters())
        folder = f"{out}/{name}/{depth_name(1)}"
        found = evaluate(task, source, out=folder, scorer=scorer, actors=actors, progress=progress)
        rows += [{"n_loops": 1, "early_exit": False} | row for row in found]
    result = Evaluated(rows, 0, 1, size)
    write_record(out, result, place, tasks)
    return result


def write_record(out: str, found: Evaluated, place: str, tasks: Sequence[TaskConfig]) -> None:
    """`<out>/evaluation.json`: the rows and what is needed to get them again; null for what is not finite."""
    versions = {package: version_of(package) for package in ("lt2", "torch", "transformers", "lm_eval")}
    record = {"model": place, "step": found.step, "n_loops": found.n_loops, "versions": versions, "rows": found.rows}
    record["tasks"] = [task.model_dump(mode="json") for task in tasks]
    record["device"] = torch.cuda.get_device_name() if torch.cuda.is_available() else "cpu"
    Storage(out).write_json("evaluation.json", finite(record))
