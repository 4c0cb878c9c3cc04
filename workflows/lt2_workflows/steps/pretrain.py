"""The step that trains a looped model.

Importing this module imports neither torch nor Ray.
"""

from __future__ import annotations

from collections.abc import Iterator
from functools import partial
from typing import TYPE_CHECKING, Any, ClassVar, Literal

from pydantic import model_validator

from lt2.config import ConfigError, ExitGate, HybridLayout, ModelConfig
from lt2.layout import realised_ratio, schedules, weights_per_layer
from lt2.mixer_configs import WindowConfig
from lt2.train.config import TrainConfig, check_model
from lt2.train.objectives import ExitGateConfig
from lt2_platform.train.config import (
    PretrainConfig,
    PretrainModel,
    Sources,
    Workers,
    check_workers,
    resolve_model,
)
from lt2_platform.wording import amount, size
from lt2_workflows.engine.context import StepContext
from lt2_workflows.engine.local_ray import join_ray
from lt2_workflows.engine.records import read_done
from lt2_workflows.graph import NotKnownYetError, Place, Resources, StepConfig, step_type
from lt2_workflows.steps.prepare import data_templates, dataset_facts, row_length
from lt2_workflows.steps.refs import CheckpointRef, DatasetRef
from lt2_workflows.steps.task_inputs import check_lengths, check_templates, first_by_training, packs_of

if TYPE_CHECKING:
    from lt2_platform.train.checkpoints.checkpoint import CheckpointInfo
    from lt2_workflows.steps.distill import DistillStep


class TrainResources(Workers, Resources):
    """Where training runs; see `lt2_platform.train.config.Workers`."""


class PretrainStep(StepConfig):
    """Train a looped model; model.vocab_size null takes the size of the data's tokenizer. Settings: PretrainConfig.

    start: the run or checkpoint whose weights it begins with, of a model of the same sizes (its optimizer, schedule and
    data begin anew): to go on with longer rows, say, or on other text. None: fresh weights.
    continue_from: the run or checkpoint it goes on from with everything, optimizer, step, random state and place in the
    data included, to train.steps; the learning rate is what this step's schedule says at each step.
    """

    produces: ClassVar[str] = "checkpoint"
    uses_ray: ClassVar[bool] = True
    type: Literal["pretrain"] = "pretrain"
    resources: TrainResources = TrainResources()
    data: DatasetRef | str
    start: CheckpointRef | str | None = None
    continue_from: CheckpointRef | str | None = None
    model: PretrainModel
    train: TrainConfig

    @model_validator(mode="after")
    def _check(self) -> PretrainStep:
        check_model(self.model, self.train)
        if self.start is not None and self.continue_from is not None:
            raise ValueError("give start (another run's weights) or continue_from (all of it), not both")
        if self.train.objective.needs_teacher:
            raise ValueError(
                f"train.objective {self.train.objective.type!r} asks a teacher; give it to a step of type 'distill'"
            )
        check_resources(self.resources, self.train)
        for threshold in self.resources.evaluation.exit_thresholds if self.resources.evaluation else ():
            self.model.exits_at(threshold)
        return self


def check_resources(resources: TrainResources, train: TrainConfig) -> None:
    """Raise ConfigError where a training cannot be shared among its workers, or evaluated as often as it asks."""
    check_workers(train, resources.num_workers, resources.min_workers)
    if resources.evaluation is not None:
        resources.evaluation.check(train)


def training_places(config: PretrainStep | DistillStep, context: StepContext) -> Iterator[Place]:
    """The packs of what is evaluated while it trains."""
    if config.resources.evaluation is not None:
        yield from packs_of(config.resources.evaluation.tasks, "resources.evaluation.tasks")


def check_evaluation(config: PretrainStep | DistillStep, context: StepContext) -> None:
    """Raise ConfigError where what is evaluated while it trains asks by a template that the data does not tell, or for
    spans that no row of it holds."""
    evaluation = config.resources.evaluation
    if evaluation is None:
        return
    check_lengths("resources.evaluation.tasks", evaluation.tasks, partial(row_length, config.data, context))
    first = first_by_training(evaluation.tasks)
    if first is not None:
        known = data_templates(config.data, context)
        check_templates(f"resources.evaluation.tasks.{first}", known, "the model")


def describe_pretrain(config: PretrainStep, context: StepContext) -> str:
    """Parameters, tokens and FLOPs, from the data if it is there, else from its tokenizer."""
    from lt2.analysis.accounting import summarize
    from lt2_workflows.training import Training, flops_per_token

    model, seq_len = planned_model(config, context)
    cost = summarize(model, seq_len)
    first = first_step(config, context)
    tokens = (config.train.steps - first) * config.train.global_batch_size * seq_len
    beginning = ""
    if config.start is not None:
        beginning = f", from the weights of {_named(config.start)}"
    elif config.continue_from is not None:
        beginning = f", after step {first:,} of {_named(config.continue_from)}"
    run = Training(model, config.train, seq_len, done=first)
    mixing = ""
    if isinstance(model.layout, HybridLayout):
        mixing = f", {model.layout.attention.type} in {realised_ratio(model.layout.ratio, model.n_layers)}"
    return (
        f"{amount(cost['parameters']['total'])} parameters ({amount(cost['parameters']['unrolled'])} unrolled)"
        f"{mixing}, "
        f"{config.train.steps - first:,} steps, {amount(tokens)} tokens{_epochs(config, context)}, "
        f"{amount(tokens * flops_per_token(run, 'none'))} FLOPs, "
        f"cache {size(cost['cache_bytes_per_sequence'])} per sequence of {seq_len:,}"
        + beginning
        + "".join(f"; {remark}" for remark in remarks(model, config.train, seq_len))
        + "".join(f"; {remark}" for remark in [fresh_mixers(config, context)] if remark)
    )


def _epochs(config: PretrainStep, context: StepContext) -> str:
    """How often the data is read from its beginning to the last step, where it is there and repeated."""
    facts = dataset_facts(config.data, context, vocab_size=config.model.vocab_size)
    rows = facts.get("splits", {}).get("train", {}).get("sequences")  # None of what is tokenised while training
    epochs = config.train.steps * config.train.global_batch_size / rows if rows else 0
    return f" ({epochs:,.1f} epochs in all)" if epochs > 1 else ""


def remarks(model: ModelConfig, train: TrainConfig, seq_len: int) -> Iterator[str]:
    """What a model will do that its settings do not say to everybody."""
    mixers = [mixer for schedule in schedules(model) for row in schedule for mixer in row]
    wide = sorted({mixer.window for mixer in mixers if isinstance(mixer, WindowConfig) and mixer.window >= seq_len})
    if wide:
        yield f"WINDOWS OF {', '.join(map(str, wide))} SEE WHOLE ROWS of {seq_len:,}, as full attention does"
    if isinstance(model.halting, ExitGate) and not isinstance(train.objective, ExitGateConfig):
        yield f"objective {train.objective.type!r} DOES NOT TRAIN THE EXIT GATE; train.objective.type=exit_gate does"


def fresh_mixers(config: StepConfig, context: StepContext) -> str:
    """Which mixers of a training do not come from the run whose weights it starts from, so that they begin at random;
    "" where all do, and where nothing tells yet. Allowed, but easily forgotten: of a recipe that trains further, a
    sweep over the first step's mixers must set those of the second too.
    """
    from lt2_workflows.steps.distill import planned_checkpoint

    if not isinstance(config, PretrainStep) or config.start is None:
        return ""
    try:
        theirs, ours = planned_checkpoint(config.start, context), planned_model(config, context)[0]
    except NotKnownYetError:
        return ""
    if theirs is None or theirs.n_layers != ours.n_layers:
        return ""
    pairs = list(zip(weights_per_layer(ours), weights_per_layer(theirs), strict=True))
    new = [
        sorted({mixer.type for mixer in mixers if mixer.weights not in {other.weights for other in others}})
        for mixers, others in pairs
    ]
    if not any(new):
        return ""
    here = " and ".join(sorted(set().union(*new)))
    there = " and ".join(sorted({other.type for (_, others), names in zip(pairs, new) if names for other in others}))
    return (
        f"new {here} BEGIN AT RANDOM in {sum(map(bool, new))} of {ours.n_layers} layers, where "
        f"{_named(config.start)} has {there}; to go on with all that it learned, set the same model.layout in both"
    )


def _named(place: CheckpointRef | str) -> str:
    return place.step if isinstance(place, CheckpointRef) else place


def first_step(config: PretrainStep, context: StepContext) -> int:
    """Steps that are made already where it goes on; 0 for a checkpoint that is not there yet."""
    if isinstance(config.continue_from, CheckpointRef):
        before = context.workflow.configs[config.continue_from.step]
        return before.train.steps if isinstance(before, PretrainStep) else 0
    before = None if config.continue_from is None else info_if_there(config.continue_from)
    return 0 if before is None else before.state.step


def info_if_there(place: str) -> CheckpointInfo | None:
    """A checkpoint's description; None where there is none: a plan may be made before its inputs are."""
    from lt2_platform.train.checkpoints.checkpoint import read_info, resolve
    from lt2_platform.train.checkpoints.integrity import CheckpointError

    try:
        return read_info(resolve(place))
    except CheckpointError:
        return None


def planned_model(config: PretrainStep, context: StepContext) -> tuple[ModelConfig, int]:
    """The model with its vocabulary, and the length of the data's rows, whether the data is there yet or not."""
    manifest = dataset_facts(config.data, context, vocab_size=config.model.vocab_size)
    return resolve_model(config.model, manifest, "the data"), manifest["seq_len"]


def check_fit(config: PretrainStep, context: StepContext) -> None:
    """Raise ConfigError where the model does not go with the data's tokenizer and rows, with what it begins with, or
    with what it is asked while it trains.
    """
    check_evaluation(config, context)
    facts = dataset_facts(config.data, context, vocab_size=None)
    model = resolve_model(config.model, facts, "the data")
    if config.continue_from is not None:
        _check_continues(config.continue_from, config, model, facts, context)
    if config.start is None:
        return
    import torch

    from lt2.distill.student import check_start
    from lt2.model import LoopedLM
    from lt2_platform.distill.run import same_tokenizer
    from lt2_workflows.steps.distill import planned_checkpoint
    from lt2_workflows.steps.tokenizers import of_model

    theirs = planned_checkpoint(config.start, context)
    if theirs is None:
        return
    try:
        with torch.device("meta"):
            check_start(LoopedLM(model), LoopedLM(theirs))
        if (known := of_model(config.start, context)) is not None:
            same_tokenizer(known.record, facts["tokenizer"], "the data", _named(config.start))
    except ConfigError as error:
        raise ConfigError(f"start: {error}") from error


def _check_continues(
    place: CheckpointRef | str, config: PretrainStep, model: ModelConfig, facts: dict[str, Any], context: StepContext
) -> None:
    from lt2.train.batch import TrainState
    from lt2_platform.data.live.on_the_fly import KEY
    from lt2_platform.train.checkpoints.checkpoint import CheckpointInfo, read_info, resolve
    from lt2_platform.train.checkpoints.matching import check_continues
    from lt2_workflows.steps.average import AverageStep
    from lt2_workflows.steps.teacher import ImportModelStep

    data = facts.get("fingerprint")
    step = context.workflow.steps[place.step] if isinstance(place, CheckpointRef) else None
    if step is None or read_done(context.storage, step) is not None:
        info = read_info(resolve(context.path(place)))
    elif isinstance(step.config, PretrainStep):  # as it will be; which data that is, is told by where it lies
        theirs, data = dataset_facts(step.config.data, context, vocab_size=None), context.path(config.data)
        info = CheckpointInfo(
            uri=f"step {step.name}",
            model=resolve_model(step.config.model, theirs, "the data"),
            tokenizer=theirs["tokenizer"],
            train=step.config.train.model_dump(mode="json"),
            state=TrainState(step=step.config.train.steps),
            data=context.path(step.config.data),
        )
    elif isinstance(step.config, AverageStep | ImportModelStep):
        raise ConfigError(f"continue_from: step {step.name} makes weights only; use `start` to take them")
    else:
        return
    try:
        check_continues(info, model, config.train, facts["tokenizer"], data, live=KEY in facts)
    except ConfigError as error:
        raise ConfigError(f"continue_from: {error}") from error


@step_type(PretrainStep, describe=describe_pretrain, places=training_places, fits=check_fit)
def run_pretrain(config: PretrainStep, context: StepContext) -> dict[str, Any]:
    """Result: {"run", "step", "loss", "tokens", …} as lt2_platform.train.on_ray.trainer.pretrain returns it."""
    from lt2_platform.distill.run import check_tokenizer
    from lt2_platform.train.checkpoints.checkpoint import read_info, resolve
    from lt2_platform.train.on_ray.trainer import pretrain

    data, start = context.path(config.data), None
    if remark := fresh_mixers(config, context):
        context.progress({"notice": remark})
    before = None if config.continue_from is None else context.path(config.continue_from)
    if config.start is not None:
        start = context.path(config.start)
        check_tokenizer(read_info(resolve(start)).tokenizer, data, start)
    summary = pretrain(
        PretrainConfig(model=config.model, train=config.train),
        data=data,
        sources=Sources(start=start, continue_from=before),
        **train_options(config.resources, context),
    )
    # A result must mean the same when the storage has been moved: no full paths in it.
    return {"run": context.run_id} | {key: value for key, value in summary.items() if key != "checkpoint"}


def train_options(resources: TrainResources, context: StepContext) -> dict[str, Any]:
    """What `pretrain` is told of where it runs and whose run it is; joins Ray."""
    from lt2_workflows.provenance import provenance

    join_ray()
    return {
        "out": context.out,
        "run_id": context.run_id,
        "storage_root": context.storage.root,
        "workers": resources,
        "progress": context.progress,
        "stop": context.stop,
        "info": {"workflow": context.workflow.id, "step": context.step.id, **provenance()},
    }
