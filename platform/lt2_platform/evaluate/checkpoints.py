"""Evaluating a stored checkpoint: load it, run the tasks, say what is needed to reproduce the numbers."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch

from lt2.accounting import parameters
from lt2_platform.data.stream import PackedDataset
from lt2_platform.data.tokenize import load_tokenizer
from lt2_platform.evaluate.config import TaskConfig
from lt2_platform.evaluate.tasks import TaskContext, depth_table, run_tasks
from lt2_platform.storage import Storage
from lt2_platform.train.checkpoint import load_model, read_info, resolve


@dataclass(frozen=True)
class Evaluated:
    """Rows of `run_tasks`, and of which checkpoint they are."""

    rows: list[dict[str, Any]]
    step: int
    n_loops: int
    parameters: int

    def evaluations(self) -> dict[str, list[dict[str, Any]]]:
        """The rows as the results store takes them, by the name of the evaluation.

        Those at the depth the model was trained for are "validation", a table over depths is "depth" as well.
        """
        rows = [row | {"step": self.step} for row in depth_table(self.rows)]
        halts = any(row["early_exit"] for row in rows)
        trained = [row for row in rows if (row["n_loops"], row["early_exit"]) == (self.n_loops, halts)]
        return {"validation": trained} | ({"depth": rows} if len(trained) < len(rows) else {})


def evaluate_checkpoint(
    checkpoint: str,
    tasks: Sequence[TaskConfig],
    *,
    data: str | None,
    out: str,
    loops: Sequence[int] = (),
    progress: Callable[[dict[str, Any]], None] = lambda values: None,
) -> Evaluated:
    """Run tasks on a checkpoint (or the newest one of a run), on a GPU if there is one; also writes `<out>/rows.json`.

    `data` is a packed dataset, for the tasks that need one.

    Raises:
        ConfigError: no such checkpoint or data, a damaged checkpoint, or what a task says of its input.
    """
    uri = resolve(checkpoint)
    model, config, info = load_model(uri)
    model = model.to("cuda" if torch.cuda.is_available() else "cpu")
    context = TaskContext(
        checkpoint=uri,
        tokenizer=load_tokenizer(info["file"] or "byte"),
        dataset=PackedDataset(data, "validation") if data is not None else None,
        out=out,
        progress=progress,
    )
    rows = run_tasks(tasks, model, context, loops=loops)
    Storage(out).write_json("rows.json", rows)
    return Evaluated(rows, read_info(uri).state.step, config.n_loops, parameters(config).total)
