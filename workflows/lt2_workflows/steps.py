"""The shipped step types: prepare, pretrain, evaluate, report. Each is a config and a thin call into lt2_platform.

Importing this module imports neither torch nor Ray: plans and drivers need only the configs.
"""

from __future__ import annotations

from typing import Any, ClassVar, Literal

from pydantic import Field, model_validator

from lt2.config import ConfigError, ModelConfig
from lt2.train_config import TrainConfig
from lt2_platform.data.prepare import PrepareConfig, prepare
from lt2_platform.data.source_configs import STDLIB, describe, paths_of
from lt2_platform.data.sources import changed_since
from lt2_platform.data.tokenize import load_tokenizer
from lt2_platform.evaluate.config import AnyTask, PerplexityConfig, ThroughputConfig
from lt2_platform.storage import absolute, filesystem
from lt2_platform.train.config import PretrainConfig, PretrainModel, TrainingEvaluation, resolve_model
from lt2_workflows import document_step, state_recall_step, sweep_step  # noqa: F401  register their step types
from lt2_workflows.attempt import StepContext
from lt2_workflows.console import amount, table
from lt2_workflows.graph import Ref, Resources, StepConfig, step_type
from lt2_workflows.local_ray import join_ray
from lt2_workflows.provenance import run_of_outside


class DatasetRef(Ref):
    """A packed dataset."""

    accepts: ClassVar[str] = "dataset"


class CheckpointRef(Ref):
    """A training run; its newest checkpoint is meant."""

    accepts: ClassVar[str] = "checkpoint"


class PackRef(Ref):
    """A pack of test items."""

    accepts: ClassVar[str] = "pack"


class EvaluationRef(Ref):
    """The numbers of an evaluate step."""

    accepts: ClassVar[str] = "evaluation"


# prepare


class PrepareStep(StepConfig, PrepareConfig):
    """Text to a packed, tokenised dataset; see PrepareConfig."""

    produces: ClassVar[str] = "dataset"
    uses_ray: ClassVar[bool] = True
    type: Literal["prepare"] = "prepare"

    @property
    def inner(self) -> PrepareConfig:
        return PrepareConfig.model_validate({name: getattr(self, name) for name in PrepareConfig.model_fields})


def check_prepare(config: PrepareStep) -> None:
    """Raise ConfigError for a tokenizer or source that is not there."""
    load_tokenizer(config.tokenizer)
    for source in paths_of(config.source):
        if source == STDLIB:
            continue
        location = absolute(source)
        fs = filesystem(location)
        found = fs.glob(location) if any(character in source for character in "*?[") else fs.exists(location)
        if not found:
            raise ConfigError(f"prepare.source {source} does not exist; give a file, folder, glob or {STDLIB}")


def describe_prepare(config: PrepareStep, context: StepContext) -> str:
    how = ", tokenised while training" if config.tokenize == "on_the_fly" else ""
    text = f"{describe(config.source)} -> {config.tokenizer} tokens in rows of {config.seq_len:,}{how}"
    return text + _corpus_changes(config, context)


def _corpus_changes(config: PrepareStep, context: StepContext) -> str:
    """A finished dataset stays what it is; whoever plans with it should know that its corpus does not."""
    path = f"{context.step.folder}/out/manifest.json"
    if not context.storage.exists(path):
        return ""
    made = context.storage.fs.modified(context.storage.join(path)).timestamp()
    try:
        changes = changed_since(config.parts, context.storage.read_json(path)["sources"], made)
    except ConfigError:  # the corpus is not here, or no longer: the dataset does not need it
        return ""
    more = f" and {len(changes) - 1:,} more" if len(changes) > 1 else ""
    return f"; THE CORPUS HAS CHANGED since: {changes[0]}{more}. The dataset is used as it is" if changes else ""


@step_type(PrepareStep, check=check_prepare, describe=describe_prepare)
def run_prepare(config: PrepareStep, context: StepContext) -> dict[str, Any]:
    """Result: the manifest without its file lists."""
    join_ray()
    manifest = prepare(config.inner, context.out)
    kept = ("documents", "sequences", "tokens", "unigram_entropy")
    splits = {name: {key: split[key] for key in kept} for name, split in manifest["splits"].items()}
    return {
        "tokenizer": manifest["tokenizer"],
        "seq_len": manifest["seq_len"],
        "splits": splits,
        "quarantine": manifest["quarantine"],
    }


# pretrain


class TrainResources(Resources):
    """Where training runs. None lets Ray's cluster decide: a GPU per worker if it has as many.

    data_reader: packed shards are read ahead by Ray Data's tasks, or by each worker itself; the batches are the same.
    wandb "auto": what WANDB_MODE says, else online with WANDB_API_KEY, else offline files in the run's folder.
    min_workers: with fewer than num_workers free, down to these, it trains all the same. evaluation: of checkpoints
    while it trains, on what it leaves free. profile_steps: first and last step of a profiler trace.
    cpus_per_worker: reserved with Ray, and as many PyTorch threads; else each worker gets its part of this machine's.
    """

    min_workers: int | None = Field(default=None, ge=1)
    evaluation: TrainingEvaluation | None = None
    profile_steps: tuple[int, int] | None = None
    cpus_per_worker: float | None = Field(default=None, gt=0)
    use_gpu: bool | None = None
    worker_failures: int = Field(default=3, ge=0)
    data_reader: Literal["ray", "direct"] = "ray"
    wandb: Literal["auto", "online", "offline", "off"] = "auto"

    @model_validator(mode="after")
    def _check(self) -> TrainResources:
        if self.min_workers is not None and self.min_workers > self.num_workers:
            raise ValueError(f"min_workers {self.min_workers} is more than num_workers {self.num_workers}")
        return self


class PretrainStep(StepConfig):
    """Train a looped model; see PretrainConfig. model.vocab_size None follows the data's tokenizer."""

    produces: ClassVar[str] = "checkpoint"
    uses_ray: ClassVar[bool] = True
    type: Literal["pretrain"] = "pretrain"
    resources: TrainResources = TrainResources()
    data: DatasetRef | str
    model: PretrainModel
    train: TrainConfig


def describe_pretrain(config: PretrainStep, context: StepContext) -> str:
    """Parameters, tokens and FLOPs, from the data if it is there, else from its tokenizer."""
    from lt2.accounting import summarize

    model, seq_len = planned_model(config, context)
    cost = summarize(model, seq_len)
    tokens = config.train.steps * config.train.global_batch_size * seq_len
    return (
        f"{amount(cost['parameters']['total'])} parameters ({amount(cost['parameters']['unrolled'])} unrolled), "
        f"{config.train.steps:,} steps, {amount(tokens)} tokens, "
        f"{amount(tokens * cost['training_flops_per_token'])} FLOPs, "
        f"cache {amount(cost['cache_bytes_per_sequence'])}B per sequence of {seq_len:,}"
    )


def planned_model(config: PretrainStep, context: StepContext) -> tuple[ModelConfig, int]:
    """The model with its vocabulary, and the length of the data's rows, whether the data is there yet or not."""
    manifest = dataset_facts(config.data, context, vocab_size=config.model.vocab_size)
    return resolve_model(config.model, manifest, "the data"), manifest["seq_len"]


@step_type(PretrainStep, describe=describe_pretrain)
def run_pretrain(config: PretrainStep, context: StepContext) -> dict[str, Any]:
    """Result: {"run", "step", "loss", "tokens", …} as lt2_platform.train.trainer.pretrain returns it."""
    from lt2_platform.train.trainer import pretrain

    summary = pretrain(
        PretrainConfig(model=config.model, train=config.train),
        data=context.path(config.data),
        **train_options(config.resources, context),
    )
    # A result must mean the same when the storage has been moved: no full paths in it.
    return {"run": context.run_id} | {key: value for key, value in summary.items() if key != "checkpoint"}


def train_options(resources: TrainResources, context: StepContext) -> dict[str, Any]:
    """What `pretrain` is told of where it runs and whose run it is; joins Ray."""
    from lt2_workflows.provenance import provenance

    cluster = join_ray()
    use_gpu = resources.use_gpu
    if use_gpu is None:
        use_gpu = cluster.get("GPU", 0) >= resources.num_workers
    return {
        "out": context.out,
        "run_id": context.run_id,
        "storage_root": context.storage.root,
        "num_workers": resources.num_workers,
        "min_workers": resources.min_workers,
        "evaluation": resources.evaluation,
        "profile_steps": resources.profile_steps,
        "cpus_per_worker": resources.cpus_per_worker,
        "use_gpu": use_gpu,
        "max_failures": resources.worker_failures,
        "data_reader": resources.data_reader,
        "wandb": resources.wandb,
        "progress": context.progress,
        "info": {"workflow": context.workflow.id, "step": context.step.id, **provenance()},
    }


# evaluate


class EvaluateStep(StepConfig):
    """Tasks on a checkpoint (or on the newest one of a run), at its own depth or at each of `loops`.

    With resources.num_workers above 1, tasks that can use so many copies of the model on Ray. pack: of the harness
    tasks that name none.
    """

    produces: ClassVar[str] = "evaluation"
    type: Literal["evaluate"] = "evaluate"
    checkpoint: CheckpointRef | str
    data: DatasetRef | str
    tasks: tuple[AnyTask, ...] = Field(default=(PerplexityConfig(), ThroughputConfig()), min_length=1)
    loops: tuple[int, ...] = ()
    pack: PackRef | str | None = None


@step_type(EvaluateStep)
def run_evaluate(config: EvaluateStep, context: StepContext) -> dict[str, Any]:
    """Result: {"rows": as of lt2_platform.evaluate.tasks.run_tasks}; they also go to the run in the results store."""
    from lt2_platform.evaluate.checkpoints import evaluate_checkpoint
    from lt2_platform.results import ResultsStore

    tasks = config.tasks
    if config.pack is not None:
        pack = context.path(config.pack)
        tasks = tuple(t.model_copy(update={"pack": pack}) if getattr(t, "pack", None) == "" else t for t in tasks)
    actors = config.resources.num_workers if config.resources.num_workers > 1 else 0
    if actors:
        join_ray()
    found = evaluate_checkpoint(
        context.path(config.checkpoint),
        tasks,
        data=context.path(config.data),
        loops=config.loops,
        out=context.out,
        actors=actors,
        progress=context.progress,
    )
    store, run = ResultsStore(context.storage), context.run_id
    if isinstance(config.checkpoint, Ref):
        run = context.workflow.steps[config.checkpoint.step].id
    run_of_outside(store, run, context.path(config.checkpoint))
    for name, rows in found.evaluations().items():
        store.log_eval(run, name, rows)
    return {
        "run": run,
        "step": found.step,
        "n_loops": found.n_loops,
        "parameters": found.parameters,
        "rows": found.rows,
    }


# report


class ReportStep(StepConfig):
    """A table of what a training run reached, beside what a model without context would."""

    produces: ClassVar[str] = "report"
    type: Literal["report"] = "report"
    title: str = "Results"
    data: DatasetRef
    training: CheckpointRef
    evaluation: EvaluationRef


@step_type(ReportStep)
def run_report(config: ReportStep, context: StepContext) -> dict[str, Any]:
    """Writes out/report.json and out/report.txt; result: {"text": the table, for the terminal}."""
    splits = context.result(config.data)["splits"]
    training, evaluation = context.result(config.training), context.result(config.evaluation)
    rows = [
        _row("unigram entropy of the corpus", splits["train"]["unigram_entropy"], "nats/token", "loss without context"),
        _row("training loss", training["loss"], "nats/token", f"after {training['tokens']:,} tokens"),
    ]
    results = [row for row in evaluation["rows"] if "layer" not in row]  # readings by layer are for the dashboard
    rows += [_row(_label(row), row["value"], row.get("unit", ""), _note(row)) for row in results]
    rows.append(_row("parameters", evaluation["parameters"], "", f"applied {evaluation['n_loops']} times"))
    text = f"\n{config.title}, run {training['run']}\n\n{table(rows, ['metric', 'value', 'unit', 'note'])}\n"
    out = f"{context.step.folder}/out"
    context.storage.write_json(f"{out}/report.json", {"title": config.title, "run": training["run"], "rows": rows})
    context.storage.write_bytes(f"{out}/report.txt", text.encode())
    return {"text": text, "run": training["run"]}


def _label(row: dict[str, Any]) -> str:
    if row["task"] == "perplexity":
        return f"validation {row['metric']}"
    return (
        row["metric"].removesuffix("_tokens_per_s") + " throughput"
        if row["task"] == "throughput"
        else row["task"] + " " + row["metric"]
    )


def _note(row: dict[str, Any]) -> str:
    stderr = f"± {row['stderr']:.4g}" if row.get("stderr") is not None else ""
    depth = f"{row['n_loops']} loops" + ", early exit" * row["early_exit"]
    return ", ".join(part for part in (stderr, row.get("note", ""), depth) if part)


def _row(metric: str, value: float, unit: str, note: str) -> dict[str, Any]:
    return {"metric": metric, "value": value, "unit": unit, "note": note}


def dataset_facts(data: DatasetRef | str, context: StepContext, *, vocab_size: int | None) -> dict[str, Any]:
    """The dataset's manifest; before it is prepared, the part of it that its step's config determines.

    A model that gives its own vocab_size can be planned where the tokenizer's file is not.
    """
    from lt2_platform.data.stream import load_manifest

    source = context.workflow.configs[data.step] if isinstance(data, Ref) else None
    if source is None or context.storage.exists(context.storage.relative(context.path(data)) + "/manifest.json"):
        return load_manifest(context.path(data))
    assert isinstance(source, PrepareStep)
    if vocab_size is None:
        vocab_size = load_tokenizer(source.tokenizer).vocab_size
    return {"seq_len": source.seq_len, "tokenizer": {"name": source.tokenizer, "vocab_size": vocab_size}}
