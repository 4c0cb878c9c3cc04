"""The shipped step types: prepare, pretrain, evaluate, report. Each is a config and a thin call into lt2_platform.

Importing this module imports neither torch nor Ray: plans and drivers need only the configs.
"""

from __future__ import annotations

from typing import Any, ClassVar, Literal

from pydantic import Field

from lt2.config import ConfigError
from lt2.train_config import TrainConfig
from lt2_platform.data.prepare import PrepareConfig, prepare
from lt2_platform.data.sources import STDLIB
from lt2_platform.data.tokenize import load_tokenizer
from lt2_platform.evaluate.config import ThroughputConfig
from lt2_platform.storage import absolute, filesystem
from lt2_platform.train.config import PretrainConfig, PretrainModel, resolve_model
from lt2_workflows.attempt import StepContext
from lt2_workflows.console import amount, table
from lt2_workflows.graph import Ref, Resources, StepConfig, step_type
from lt2_workflows.local_ray import join_ray


class DatasetRef(Ref):
    """A packed dataset."""

    accepts: ClassVar[str] = "dataset"


class CheckpointRef(Ref):
    """A training run; its newest checkpoint is meant."""

    accepts: ClassVar[str] = "checkpoint"


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
    for source in [config.source] if isinstance(config.source, str) else config.source:
        if source == STDLIB:
            continue
        location = absolute(source)
        fs = filesystem(location)
        found = fs.glob(location) if any(character in source for character in "*?[") else fs.exists(location)
        if not found:
            raise ConfigError(f"prepare.source {source} does not exist; give a file, folder, glob or {STDLIB}")


def describe_prepare(config: PrepareStep, context: StepContext) -> str:
    return f"{config.source} -> {config.tokenizer} tokens in rows of {config.seq_len:,}"


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
    """Where training runs. None lets Ray's cluster decide: a GPU per worker if it has as many."""

    cpus_per_worker: float | None = Field(default=None, gt=0)
    use_gpu: bool | None = None
    worker_failures: int = Field(default=3, ge=0)


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

    manifest = _manifest(config.data, context)
    seq_len = manifest["seq_len"]
    cost = summarize(resolve_model(config.model, manifest, "the data"), seq_len)
    tokens = config.train.steps * config.train.global_batch_size * seq_len
    return (
        f"{amount(cost['parameters']['total'])} parameters ({amount(cost['parameters']['unrolled'])} unrolled), "
        f"{config.train.steps:,} steps, {amount(tokens)} tokens, "
        f"{amount(tokens * cost['training_flops_per_token'])} FLOPs, "
        f"cache {amount(cost['cache_bytes_per_sequence'])}B per sequence of {seq_len:,}"
    )


@step_type(PretrainStep, describe=describe_pretrain)
def run_pretrain(config: PretrainStep, context: StepContext) -> dict[str, Any]:
    """Result: {"run", "step", "loss", "tokens", …} as lt2_platform.train.trainer.pretrain returns it."""
    from lt2_platform.train.trainer import pretrain
    from lt2_workflows.provenance import provenance

    resources = join_ray()
    use_gpu = config.resources.use_gpu
    if use_gpu is None:
        use_gpu = resources.get("GPU", 0) >= config.resources.num_workers
    summary = pretrain(
        PretrainConfig(model=config.model, train=config.train),
        data=context.path(config.data),
        out=context.out,
        run_id=context.run_id,
        storage_root=context.storage.root,
        num_workers=config.resources.num_workers,
        cpus_per_worker=config.resources.cpus_per_worker,
        use_gpu=use_gpu,
        max_failures=config.resources.worker_failures,
        progress=context.progress,
        info={"workflow": context.workflow.id, "step": context.step.id, **provenance()},
    )
    # A result must mean the same when the storage has been moved: no full paths in it.
    return {"run": context.run_id} | {key: value for key, value in summary.items() if key != "checkpoint"}


# evaluate


class EvaluateStep(StepConfig):
    """Validation perplexity and throughput of a checkpoint (or of the newest one of a run)."""

    produces: ClassVar[str] = "evaluation"
    type: Literal["evaluate"] = "evaluate"
    checkpoint: CheckpointRef | str
    data: DatasetRef | str
    batch_size: int = Field(default=8, ge=1)
    max_sequences: int | None = Field(default=None, ge=1)
    document_mask: bool = False
    throughput: ThroughputConfig | None = ThroughputConfig()


@step_type(EvaluateStep)
def run_evaluate(config: EvaluateStep, context: StepContext) -> dict[str, Any]:
    """Result: {"validation": …, "throughput": … or None}; the numbers also go to the run in the results store."""
    import torch

    from lt2_platform.data.stream import PackedDataset
    from lt2_platform.evaluate.throughput import measure
    from lt2_platform.evaluate.validation import perplexity
    from lt2_platform.results import ResultsStore
    from lt2_platform.train.checkpoint import load_model, read_info, resolve

    uri = resolve(context.path(config.checkpoint))
    model, _, _ = load_model(uri)
    step = read_info(uri).state.step
    model = model.to("cuda" if torch.cuda.is_available() else "cpu")
    context.progress({"message": "validation perplexity"})
    validation = perplexity(
        model,
        PackedDataset(context.path(config.data), "validation"),
        batch_size=config.batch_size,
        max_sequences=config.max_sequences,
        document_mask=config.document_mask,
    )
    measured = None
    if config.throughput is not None:
        context.progress({"message": "throughput"})
        measured = measure(model.bfloat16() if torch.cuda.is_available() else model, config.throughput)
    rows = [{"metric": name, "value": float(validation[name])} for name in ("loss", "perplexity")]
    if measured is not None:
        names = ("prefill_tokens_per_s", "decode_tokens_per_s")
        rows += [{"metric": name, "value": measured[name]["median"]} for name in names]
    run = context.run_id
    if isinstance(config.checkpoint, Ref):
        run = context.workflow.steps[config.checkpoint.step].id
    ResultsStore(context.storage).log_eval(run, "validation", [row | {"step": step} for row in rows])
    return {"run": run, "step": step, "validation": validation, "throughput": measured}


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
        _row("validation loss", evaluation["validation"]["loss"], "nats/token", "held-out documents"),
        _row("validation perplexity", evaluation["validation"]["perplexity"], "", ""),
    ]
    measured = evaluation["throughput"]
    if measured is not None:
        where = f"batch {measured['batch_size']}, context {measured['context']:,}, {measured['dtype']}"
        rows += [
            _row(f"{phase} throughput", measured[f"{phase}_tokens_per_s"]["median"], "tokens/s", where)
            for phase in ("prefill", "decode")
        ]
        rows.append(_row("parameters", measured["parameters"], "", f"applied {measured['n_loops']} times"))
    text = f"\n{config.title}, run {training['run']}\n\n{table(rows, ['metric', 'value', 'unit', 'note'])}\n"
    out = f"{context.step.folder}/out"
    context.storage.write_json(f"{out}/report.json", {"title": config.title, "run": training["run"], "rows": rows})
    context.storage.write_bytes(f"{out}/report.txt", text.encode())
    return {"text": text, "run": training["run"]}


def _row(metric: str, value: float, unit: str, note: str) -> dict[str, Any]:
    return {"metric": metric, "value": value, "unit": unit, "note": note}


def _manifest(data: DatasetRef | str, context: StepContext) -> dict[str, Any]:
    """The dataset's manifest; before it is prepared, the part of it that its step's config determines."""
    from lt2_platform.data.stream import load_manifest

    source = context.workflow.configs[data.step] if isinstance(data, Ref) else None
    if source is None or context.storage.exists(context.storage.relative(context.path(data)) + "/manifest.json"):
        return load_manifest(context.path(data))
    assert isinstance(source, PrepareStep)
    tokenizer = load_tokenizer(source.tokenizer)
    return {"seq_len": source.seq_len, "tokenizer": {"name": tokenizer.name, "vocab_size": tokenizer.vocab_size}}
