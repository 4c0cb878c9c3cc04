"""What every training worker runs, whether Ray Train or torchrun started it: build, resume, train, save, log.

Ray-free on purpose: `scripts/train_torchrun.py` runs the same function, and so do the GPU checks.
"""

from __future__ import annotations

import gc
import logging
import math
import os
from collections.abc import Callable, Sequence
from contextlib import closing, nullcontext
from dataclasses import asdict, dataclass, field
from functools import partial
from typing import Any

import torch

from lt2.config import ModelConfig
from lt2.distill.student import start_from
from lt2.memory import keeps_gathered
from lt2.model import LoopedLM, build
from lt2.ops.dispatch import startup_problems
from lt2.train import parallel
from lt2.train.loop import Batch, NonFiniteLossError, PreemptedError, TrainConfig, TrainState, autocast_dtype, train
from lt2.train.optim import build_optimizer, freeze
from lt2.train.schedules import learning_rate
from lt2_platform.data.stream import read_ahead
from lt2_platform.distill.teacher import load_teacher
from lt2_platform.distill.topk import StoredTopK
from lt2_platform.results.store import ResultsStore
from lt2_platform.storage import Storage
from lt2_platform.storage_errors import STORAGE_ERRORS
from lt2_platform.train import ranks
from lt2_platform.train.callbacks import Evaluator, Logger
from lt2_platform.train.checkpoints import checkpoint, integrity, retention
from lt2_platform.train.checkpoints.matching import check_matches
from lt2_platform.train.checkpoints.saving import SaveCost, Saver
from lt2_platform.train.config import Sources, check_workers
from lt2_platform.train.evaluation_records import wanted
from lt2_platform.train.feed import Feed, Reader
from lt2_platform.train.preemption import on_signals
from lt2_platform.train.reporting.observe import Observer
from lt2_platform.train.reporting.profiling import traced
from lt2_platform.train.reporting.watchdog import Watchdog
from lt2_platform.train.rollback import Rollbacks
from lt2_platform.train.tuning import first_rank_first, run_each_kind

log = logging.getLogger(__name__)


@dataclass(frozen=True)
class WorkerSpec:
    """Everything a worker needs, as plain JSON-like values: it travels to another process or machine."""

    model: dict[str, Any]
    train: dict[str, Any]
    data: str
    out: str
    run_id: str
    storage_root: str
    prefetch: int = 2
    sources: dict[str, Any] = field(default_factory=dict)  # fields of Sources
    evaluate_every: int | None = None
    profile_steps: tuple[int, int] | None = None
    info: dict[str, Any] = field(default_factory=dict)


def run(
    spec: WorkerSpec,
    *,
    report: Callable[[dict[str, Any]], None] | None = None,
    callbacks: Sequence[Any] = (),
    stop: Callable[[], int] | None = None,
    reader: Reader | None = None,
) -> dict[str, Any]:
    """Train as one rank of the process group (or alone), from the newest checkpoint in `<out>/checkpoints` if any.

    Returns the final TrainState as {"step", "position", "tokens", "loss"}. After a loss that is not finite it builds
    everything again from that checkpoint and skips the batch, up to `train.rollbacks` times in the run's life.

    report({"step", "loss", "checkpoint"}) tells the launcher of a checkpoint. It is called on all ranks together, for
    the last one and for others at least saving.REPORT_SECONDS apart. callbacks and stop: see lt2.train.loop.train;
    callbacks come after ours. Without stop, SIGTERM or SIGINT saves and raises PreemptedError, and another call does
    the rest.
    reader: who reads packed shards; None: this process.
    """
    config = TrainConfig.model_validate(spec.train)
    for problem in startup_problems() if ranks.is_rank_zero() else ():
        log.warning("%s", problem)
    rollbacks = Rollbacks(spec.out, spec.storage_root, spec.run_id, config.rollbacks)
    with nullcontext(stop) if stop else on_signals() as asked:
        while True:
            try:
                return asdict(_train(spec, config, rollbacks.positions(), report, callbacks, asked, reader))
            except PreemptedError as error:
                if ranks.is_rank_zero():
                    _note_preemption(spec, str(error))
                raise
            except NonFiniteLossError as error:
                failure = error.with_traceback(None)  # its frames hold the model
            gc.collect()  # a sharded one holds itself, by its hooks: the next would be made beside it
            rollbacks.record(failure)


def _note_preemption(spec: WorkerSpec, message: str) -> None:
    try:
        ResultsStore(Storage(spec.storage_root)).log_event(spec.run_id, "preemption", {"message": message})
    except STORAGE_ERRORS as error:  # it must not take the place of what tells the launcher that all is saved
        log.warning("the preemption of %s is not among its events (%s)", spec.run_id, error)


def _train(
    spec: WorkerSpec,
    config: TrainConfig,
    skip: frozenset[int],
    report: Callable[[dict[str, Any]], None] | None,
    callbacks: Sequence[Any],
    stop: Callable[[], int],
    reader: Reader | None,
) -> TrainState:
    model_config = ModelConfig.model_validate(spec.model)
    rank, world_size = ranks.rank(), ranks.world_size()
    check_workers(config, world_size)
    feed = Feed.open(spec.data, config, rank, world_size)
    dataset = feed.dataset
    tokenizer = dataset.manifest["tokenizer"]
    device = _device()
    sources, folder = Sources(**spec.sources), Storage(spec.out).join("checkpoints")
    start = None if integrity.complete(folder) else sources.start
    keep = _keeps_gathered(model_config, config, device, dataset.seq_len, sources.teacher)
    model, sharding = _build_model(model_config, config, device, dataset.seq_len, keep=keep, start=start)
    teacher = None if sources.teacher is None else load_teacher(sources.teacher, config, device, keep=keep)
    optimizer = build_optimizer(
        model,
        config.optimizer,
        lr=config.lr,
        betas=config.betas,
        weight_decay=config.weight_decay,
        decay_all=config.decay_all,
        lr_scale=lambda name: config.objective.lr_scale(name, model_config),
    )
    torch.manual_seed(config.seed + 1 + rank)  # ranks draw different numbers from here on; a checkpoint replaces this

    state, found = _resume(folder, sources.continue_from, model, optimizer, model_config, tokenizer)
    batches: Any = feed.batches(
        state, found, spec.out, skip, prefetch=spec.prefetch if sources.topk is None else 0, reader=reader
    )
    if sources.topk is not None:
        stored = StoredTopK(sources.topk, feed.packed(), document_mask=config.document_mask)
        batches = read_ahead(stored.attach(batches), spec.prefetch)
    logger = Logger.open(spec, config, state.step) if rank == 0 else None
    evaluator = Evaluator(spec.data, config, logger)
    about = checkpoint.About(
        model_config,
        tokenizer,
        _tokenizer_files(spec.data),
        config.model_dump(mode="json"),
        data=dataset.manifest.get("fingerprint"),
        sources=spec.info.get("config", {}).get("sources", {}),
    )
    saver = Saver(
        folder,
        about,
        config,
        report,
        validation_losses=lambda: evaluator.last,
        flush=logger.writer.flush if logger else lambda: None,
        data_files=feed.files,
        pinned=lambda: set(wanted(spec.out, spec.evaluate_every)) if spec.evaluate_every else set(),
    )
    asked = None if teacher is None else teacher.config
    observer = Observer.build(model, config, dataset.seq_len, device, asked)
    ours = [each for each in (observer, SaveCost(saver), logger, evaluator, saver) if each is not None]
    schedule = learning_rate(
        config.schedule,
        lr=config.lr,
        steps=config.steps,
        warmup_steps=config.warmup_steps,
        min_lr_ratio=config.min_lr_ratio,
    )
    objective = config.objective.build(config, teacher)
    data = map(Batch.from_numpy, batches)
    watchdog = Watchdog(rank=rank, step=state.step, factor=config.hang_factor, floor_s=config.hang_floor_s)
    data = watchdog.watch(data, lambda: state.step)
    if rank == 0 and spec.profile_steps is not None:
        data = traced(data, lambda: state.step, spec.profile_steps, spec.out)
    with closing(batches), watchdog, logger.writer if logger else nullcontext(), saver:
        everyone, extra = [*ours, *callbacks], {"sharding": sharding, "skip": skip, "stop": stop}
        try:
            train(model, objective, data, optimizer, schedule, config, state, everyone, **extra)
        except PreemptedError:
            saver.settle(state)
            raise
        if logger is not None:
            logger.writer.close(asdict(state))  # not before the last checkpoint, which may have waited for storage
    return state


def _device() -> torch.device:
    if not torch.cuda.is_available():
        return torch.device("cpu")
    # Ray shows each worker its own GPU; torchrun shows all of them and says which is ours.
    index = int(os.environ.get("LOCAL_RANK", 0)) % torch.cuda.device_count()
    torch.cuda.set_device(index)
    return torch.device("cuda", index)


def _build_model(
    model_config: ModelConfig,
    config: TrainConfig,
    device: torch.device,
    seq_len: int,
    *,
    keep: bool,
    start: str | None,
) -> tuple[LoopedLM, parallel.Sharding | None]:
    model = build(model_config, seed=config.seed if config.init_seed is None else config.init_seed, device=device)
    if start is not None:
        start_from(model, checkpoint.load_model(start)[0])
    freeze(model, lambda name: config.objective.lr_scale(name, model_config))
    mesh, dtype = parallel.data_mesh(device.type, config.shard_workers), autocast_dtype(config.precision, device)
    if mesh is not None and device.type == "cuda":
        _, rows = config.rows(ranks.world_size())
        shape = {"rows": rows, "seq_len": seq_len, "dtype": dtype, "packed": config.document_mask}
        first_rank_first(partial(run_each_kind, model, **shape))
    parallel.wrap_blocks(model, recompute=config.recompute, compile=config.compile)
    if mesh is None:
        return model, None
    return model, parallel.shard(model, mesh, param_dtype=dtype, keep=keep)


def _keeps_gathered(
    model_config: ModelConfig, config: TrainConfig, device: torch.device, seq_len: int, teacher: str | None
) -> bool:
    """`train.keep_gathered` on these devices: one answer for all ranks."""
    if config.keep_gathered != "auto" or ranks.world_size() == 1:
        return config.keep_gathered is not False
    size = torch.cuda.get_device_properties(device).total_memory if device.type == "cuda" else math.inf
    asked = None if teacher is None else checkpoint.read_info(checkpoint.resolve(teacher)).model
    keep = keeps_gathered(model_config, config, seq_len, workers=ranks.world_size(), card_bytes=size, teacher=asked)
    log.info("train.keep_gathered auto: gathered blocks are %s", "kept" if keep else "freed after each use, to fit")
    return ranks.from_rank_zero(keep)


def _resume(
    folder: str,
    before: str | None,
    model: LoopedLM,
    optimizer: torch.optim.Optimizer,
    config: ModelConfig,
    tokenizer: dict[str, Any],
) -> tuple[TrainState, str | None]:
    """Where training stands, and the checkpoint that says so: the newest of ours, else of the run that ours goes on
    from, `before`, else none."""
    if ranks.is_rank_zero():
        retention.clean(folder)
    found = integrity.latest(folder) or (before and checkpoint.intact(before))
    if found is None:
        return TrainState(), None
    check_matches(checkpoint.read_info(found), config, tokenizer)
    state = checkpoint.load(found, model, optimizer)
    log.info("resuming %s at step %d", found, state.step)
    return state, found


def _tokenizer_files(data: str) -> dict[str, bytes]:
    storage = Storage(data)
    return {f"tokenizer/{name}": storage.read_bytes(f"tokenizer/{name}") for name in storage.list("tokenizer")}
