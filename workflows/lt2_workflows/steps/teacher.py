"""Models that others trained, as runs of ours, and the top-k of a teacher's logits stored ahead.

Importing this module imports neither torch nor Ray.
"""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any, ClassVar, Literal

from pydantic import Field

from lt2.config import ModelConfig
from lt2_platform.data.sources.listing import version_of
from lt2_platform.data.tokenizers.tokenize import load_tokenizer
from lt2_platform.wording import amount
from lt2_workflows.engine.context import StepContext
from lt2_workflows.engine.local_ray import join_ray
from lt2_workflows.graph import Place, Resources, StepConfig, digest, step_type
from lt2_workflows.provenance import log_model
from lt2_workflows.steps.refs import CheckpointRef, DatasetRef


class ImportModelStep(StepConfig):
    """A model that others trained, from its folder in Hugging Face's format, as a run of ours: to be evaluated, trained
    further (`start` of a pretrain step) or learned from. It reads Ouro, Llama, Mistral, Qwen2 and Qwen3.

    tokenizer: as prepare's; None takes the folder's tokenizer.json. expected: the model's config, for plans made where
    the folder is not.
    """

    produces: ClassVar[str] = "checkpoint"
    type: Literal["import_model"] = "import_model"
    folder: str
    tokenizer: str | None = None
    expected: ModelConfig | None = None

    @property
    def model(self) -> ModelConfig | None:
        """The config in the folder, else the one that is expected there."""
        if not Path(self.folder, "config.json").expanduser().is_file():
            return self.expected
        from lt2.interop.pretrained import pretrained_config

        return pretrained_config(self.folder)


class ImportOuroStep(ImportModelStep):
    """The same by its first name, which is part of the identity of what was run with it."""

    type: Literal["import_ouro"] = "import_ouro"  # pyright: ignore[reportIncompatibleVariableOverride]


def _look_for_model(folder: str) -> None:
    from lt2.interop.pretrained import pretrained_config
    from lt2.interop.reading import weight_files

    pretrained_config(folder)
    weight_files(folder)


def _version(folder: str) -> dict[str, str]:
    """Digests of the files' sizes and some blocks of each: weights are too large to be read at every run."""
    files = sorted(path for path in Path(folder).expanduser().iterdir() if path.suffix in (".json", ".safetensors"))
    return {path.name: digest(version_of(str(path), sampled=True)) for path in files}


def import_places(config: ImportModelStep, context: StepContext) -> Iterator[Place]:
    """The model's folder, and the tokenizer's file in it or elsewhere."""
    yield Place("folder", config.folder, _look_for_model, _version)
    if config.tokenizer is None:
        if Path(config.folder, "config.json").expanduser().is_file():
            yield Place("folder", str(Path(config.folder, "tokenizer.json")), load_tokenizer)
    elif config.tokenizer != "byte":
        yield Place("tokenizer", config.tokenizer, load_tokenizer)


def describe_import(config: ImportModelStep, context: StepContext) -> str:
    from lt2.analysis.accounting import parameters

    size = "" if config.model is None else f" of {amount(parameters(config.model).total)} parameters"
    return f"{config.folder} -> a checkpoint{size} in fp32"


@step_type(ImportModelStep, describe=describe_import, places=import_places)
@step_type(ImportOuroStep, describe=describe_import, places=import_places)
def run_import(config: ImportModelStep, context: StepContext) -> dict[str, Any]:
    """Result: {"run", "step", "position", "tokens", "loss"}. The results store has the model's settings."""
    from lt2_platform.distill.teacher import store_pretrained
    from lt2_platform.train.checkpoints.checkpoint import read_info, resolve

    result = store_pretrained(config.folder, context.out, tokenizer=config.tokenizer)
    info = read_info(resolve(context.out))
    settings = {
        "model": info.model.model_dump(mode="json"),
        "imported": {
            "folder": config.folder,
            "model_type": info.train["imported"]["model_type"],
            "weights": info.train["weights"][:16],
        },
    }
    log_model(context.storage, context.run_id, settings, workflow=context.workflow.id, step=context.step.id)
    return {"run": context.run_id} | result


class TopKResources(Resources):
    """num_workers tasks at a time; each loads the teacher, on `gpus_per_worker` of a GPU if there is one."""

    gpus_per_worker: float = Field(default=1.0, ge=0)


class TeacherTopKStep(StepConfig):
    """The teacher's top-k of every training sequence, stored over Ray Data (see lt2_platform.distill.topk)."""

    produces: ClassVar[str] = "teacher_topk"
    uses_ray: ClassVar[bool] = True
    type: Literal["teacher_topk"] = "teacher_topk"
    resources: TopKResources = TopKResources()
    teacher: CheckpointRef | str
    data: DatasetRef | str
    k: int = Field(default=64, ge=1)
    final_only: bool = False
    document_mask: bool = False
    batch_size: int = Field(default=4, ge=1)


@step_type(TeacherTopKStep, describe=lambda config, context: f"top {config.k} logits of every training token")
def run_teacher_topk(config: TeacherTopKStep, context: StepContext) -> dict[str, Any]:
    """Result: the manifest without identities."""
    from lt2_platform.distill.topk import store_top_k

    gpus = join_ray().get("GPU", 0)
    record = store_top_k(
        teacher=context.path(config.teacher),
        data=context.path(config.data),
        out=context.out,
        **config.model_dump(include={"k", "final_only", "document_mask", "batch_size"}),
        parallelism=config.resources.num_workers,
        num_gpus=config.resources.gpus_per_worker if gpus else 0,
        progress=context.progress,
    )
    return {name: record[name] for name in ("k", "loops", "sequences", "seq_len")}
