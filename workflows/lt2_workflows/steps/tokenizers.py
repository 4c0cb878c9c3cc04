"""Whether what meets in a workflow has one tokenizer, as far as it is known before anything runs.

Two tokenizers of equal size fit each other's models, and give numbers that mean nothing. The steps themselves refuse
that, but only once the trainings before them are done.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

from lt2.config import ConfigError
from lt2_platform.evaluate.config import DiagnosticsConfig, HarnessConfig, PerplexityConfig, PositionsConfig, TaskConfig
from lt2_workflows.engine.context import StepContext
from lt2_workflows.graph import Ref
from lt2_workflows.steps.prepare import PrepareStep, dataset_facts
from lt2_workflows.steps.refs import CheckpointRef, DatasetRef

if TYPE_CHECKING:
    from lt2_platform.data.tokenizers.tokenize import Tokenizer

READ_DATA = (DiagnosticsConfig, PerplexityConfig, PositionsConfig)
"""Tasks that refuse data of another tokenizer; others may not read it."""


@dataclass(frozen=True)
class Known:
    """A tokenizer by its record, and how to read it; a file's path alone tells no content."""

    record: dict[str, Any]
    load: Callable[[], Tokenizer]

    def is_like(self, record: dict[str, Any]) -> bool:
        """Whether ids of the tokenizer with this record (of a dataset or a pack) mean the same."""
        return self.record["sha256"] == record["sha256"] or self.load().vocabulary == record.get("vocabulary")


def of_data(data: DatasetRef | str, context: StepContext) -> Known:
    """A dataset's tokenizer. Raises NotKnownYetError where a step of another kind than `prepare` will make it."""
    from lt2_platform.data.tokenizers.tokenize import load_recorded, load_tokenizer
    from lt2_platform.storage import Storage

    record = dataset_facts(data, context, vocab_size=None)["tokenizer"]
    if "file" in record:  # the dataset is there, and keeps its tokenizer
        return Known(record, partial(load_recorded, record, Storage(context.path(data))))
    source = context.workflow.configs[data.step] if isinstance(data, Ref) else None
    assert isinstance(source, PrepareStep)
    return Known(record, partial(load_tokenizer, source.tokenizer))


def of_model(checkpoint: CheckpointRef | str, context: StepContext) -> Known | None:
    """The tokenizer of a checkpoint: of the data that it was, or will be, trained on, or of its model's folder; None
    where nothing tells yet."""
    from lt2_platform.data.tokenizers.tokenize import describe, load_recorded, load_tokenizer
    from lt2_platform.storage import Storage
    from lt2_workflows.steps.average import AverageStep
    from lt2_workflows.steps.distill import DistillStep
    from lt2_workflows.steps.pretrain import PretrainStep, info_if_there
    from lt2_workflows.steps.teacher import ImportModelStep

    if isinstance(checkpoint, str):
        info = info_if_there(checkpoint)
        return (
            None if info is None else Known(info.tokenizer, partial(load_recorded, info.tokenizer, Storage(info.uri)))
        )
    trained = context.workflow.configs[checkpoint.step]
    if isinstance(trained, AverageStep):
        return of_model(trained.checkpoint, context)
    if isinstance(trained, ImportModelStep):
        spec = trained.tokenizer or str(Path(trained.folder, "tokenizer.json").expanduser())
        there = spec == "byte" or Path(spec).expanduser().is_file()
        return Known(describe(load_tokenizer(spec)), partial(load_tokenizer, spec)) if there else None
    return of_data(trained.data, context) if isinstance(trained, PretrainStep | DistillStep) else None


def check_evaluated(
    checkpoint: CheckpointRef | str,
    data: DatasetRef | str,
    tasks: Sequence[TaskConfig],
    pack: Any,
    context: StepContext,
) -> None:
    """Raise ConfigError where a model is to be evaluated on data, or on items, that were made for another tokenizer."""
    model = of_model(checkpoint, context)
    if model is None:
        return
    named = f"the model of step {checkpoint.step}" if isinstance(checkpoint, Ref) else checkpoint
    theirs = of_data(data, context) if any(isinstance(task, READ_DATA) for task in tasks) else model
    if not model.is_like(theirs.record) and model.load().vocabulary != theirs.load().vocabulary:
        raise ConfigError(
            f"data: it is prepared with tokenizer {told(theirs.record)}, {named} is trained with "
            f"{told(model.record)}; evaluate it on data of its own tokenizer"
        )
    for index, task in enumerate(tasks):
        place = (task.pack or pack) if isinstance(task, HarnessConfig) else None
        if isinstance(task, HarnessConfig) and isinstance(place, str):
            _check_items(f"tasks.{index}", task, place, model, named)


def _check_items(field: str, task: HarnessConfig, pack: str, model: Known, named: str) -> None:
    from lt2_platform.evaluate.harness.tasks.packs import read_manifest
    from lt2_platform.evaluate.harness.tasks.suites import suite_tasks

    records = read_manifest(pack)["tasks"]
    for name in suite_tasks(task.suite, task.tasks):
        frozen = records.get(name, {}).get("tokenizer")
        if frozen and not model.is_like(frozen):
            raise ConfigError(
                f"{field}: {name} of pack {pack} was made for tokenizer {told(frozen)}, {named} is trained with "
                f"{told(model.record)}; make {name} again with the model's (`lt2 pack needles` or `ruler`)"
            )


def told(record: dict[str, Any]) -> str:
    """A tokenizer in words: most files are called tokenizer.json."""
    return f"{record['name']!r} ({record['sha256'][:8]})"
