"""What to pretrain. Importable without torch or Ray, so that plans and recipes are instant."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Literal

from pydantic import Field, ValidationError, model_validator

from lt2.config import Config, ConfigError, ModelConfig
from lt2.explain import explain
from lt2.train.config import TrainConfig
from lt2_platform.evaluate.config import AnyTask, Depths, ExitThresholds, PerplexityConfig


class PretrainModel(ModelConfig):
    """A ModelConfig whose vocabulary may be left to the data's tokenizer."""

    vocab_size: int | None = None  # pyright: ignore[reportIncompatibleVariableOverride]

    @classmethod
    def of(cls, model: ModelConfig) -> PretrainModel:
        return cls.model_validate(model.model_dump())

    @model_validator(mode="after")
    def _check(self) -> PretrainModel:
        # Everything but the vocabulary can be wrong already, and should fail before any data is prepared.
        known = self if self.vocab_size is not None else self.model_copy(update={"vocab_size": 1})
        ModelConfig._check(known)  # pyright: ignore[reportCallIssue]  pydantic leaves a plain function here
        return self


class TrainingEvaluation(Config):
    """Evaluate the checkpoint of every so many steps on resources that training leaves free.

    cpus, gpus: of one evaluation; gpus None is one where training uses GPUs. Beyond max_waiting evaluations that found
    no free place, the oldest is skipped.
    """

    every: int = Field(gt=0)
    tasks: tuple[AnyTask, ...] = Field(default=(PerplexityConfig(),), min_length=1)
    loops: Depths = ()
    exit_thresholds: ExitThresholds = ()
    cpus: float = Field(default=1.0, gt=0)
    gpus: float | None = Field(default=None, ge=0)
    max_waiting: int = Field(default=2, ge=1)

    def check(self, train: TrainConfig) -> None:
        """Raise ConfigError unless there is a checkpoint at every step to evaluate."""
        if train.checkpoint_every is None or self.every % train.checkpoint_every:
            raise ConfigError(
                f"resources.evaluation.every {self.every} is not a multiple of train.checkpoint_every "
                f"{train.checkpoint_every}; only checkpoints are evaluated"
            )


WandbMode = Literal["auto", "online", "offline", "off"]


class Workers(Config):
    """On how many workers training runs, with what.

    use_gpu: None means a GPU per worker if the cluster has as many.
    cpus_per_worker: reserved with Ray, and as many PyTorch threads; else each worker gets its part of this machine's.
    min_workers: with fewer than num_workers free, down to these, it trains all the same.
    evaluation: of checkpoints while it trains, on what it leaves free.
    profile_steps: first and last step of a profiler trace.
    data_reader: packed shards are read ahead by Ray Data's tasks, or by each worker itself; the batches are the same.
    wandb: "auto" is what WANDB_MODE says, else online with WANDB_API_KEY, else offline files in the run's folder.
    """

    num_workers: int = Field(default=1, ge=1)
    min_workers: int | None = Field(default=None, ge=1)
    evaluation: TrainingEvaluation | None = None
    profile_steps: tuple[int, int] | None = None
    cpus_per_worker: float | None = Field(default=None, gt=0)
    use_gpu: bool | None = None
    worker_failures: int = Field(default=3, ge=0)
    data_reader: Literal["ray", "direct"] = "ray"
    wandb: WandbMode = "auto"

    @model_validator(mode="after")
    def _check(self) -> Workers:
        if self.min_workers is not None and self.min_workers > self.num_workers:
            raise ValueError(f"min_workers {self.min_workers} is more than num_workers {self.num_workers}")
        return self


ONE_WORKER = Workers()


def check_workers(train: TrainConfig, num_workers: int, min_workers: int | None = None) -> None:
    """Raise ConfigError unless any number of workers that may train can share the batch and the weights evenly."""
    batch, group = train.global_batch_size, train.shard_workers
    for workers in range(min_workers or num_workers, num_workers + 1):
        if batch % workers:
            raise ConfigError(f"train.global_batch_size {batch} is not divisible by {workers} workers; change either")
        if group and workers > 1 and workers % group:
            raise ConfigError(f"train.shard_workers {group} does not divide {workers} workers; change either")


@dataclass(frozen=True)
class Sources:
    """Other models that training needs, as runs or checkpoints (paths or URIs).

    start: what the weights are at step 0 (lt2.distill.student.start_from); continue_from: whose weights, moments,
    random state, step and place in the data the run begins with; teacher: whom the objective asks;
    topk: a folder of the teacher's stored top-k (lt2_platform.distill.topk), which then comes with every batch.
    """

    start: str | None = None
    continue_from: str | None = None
    teacher: str | None = None
    topk: str | None = None


class PretrainConfig(Config):
    """A model and how to train it. Where it runs and on how many workers is not part of it."""

    model: PretrainModel
    train: TrainConfig


def resolve_model(model: PretrainModel, manifest: dict[str, Any], data: str) -> ModelConfig:
    """`model` with the vocabulary of the dataset's tokenizer; ConfigError when the two do not fit together.

    A vocabulary larger than the tokenizer's is fine: rows that round it up to a size kernels like.
    """
    tokenizer = manifest["tokenizer"]
    vocab_size = tokenizer["vocab_size"] if model.vocab_size is None else model.vocab_size
    if vocab_size < tokenizer["vocab_size"]:
        raise ConfigError(
            f"model.vocab_size {vocab_size} is smaller than the {tokenizer['vocab_size']} tokens of tokenizer "
            f"{tokenizer['name']!r} in {data}; leave it out or raise it"
        )
    if model.max_seq_len < manifest["seq_len"]:
        raise ConfigError(
            f"model.max_seq_len {model.max_seq_len} is shorter than the rows of {manifest['seq_len']} tokens in "
            f"{data}; raise it, or prepare with a smaller seq_len"
        )
    try:
        # On shorter rows a mixer may turn into another one: DSA with a top_k beyond them leaves nothing out.
        ModelConfig.model_validate(model.model_dump() | {"vocab_size": vocab_size, "max_seq_len": manifest["seq_len"]})
    except ValidationError as error:
        raise ConfigError(f"for rows of {manifest['seq_len']} tokens in {data}: {explain(error, 'model')}") from error
    try:
        return ModelConfig.model_validate(model.model_dump() | {"vocab_size": vocab_size})
    except ValidationError as error:
        raise ConfigError(explain(error, "model")) from error
