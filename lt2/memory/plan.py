"""The memory of a training step on each worker, from configs alone."""

from __future__ import annotations

from contextlib import nullcontext
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import torch
from torch._subclasses.fake_tensor import FakeTensorMode

from lt2.config import KeptLayout, ModelConfig
from lt2.memory.live import LiveStorages
from lt2.memory.trace import Tracer
from lt2.memory.walk import Loss, Memory, Unit, Walk, Weights
from lt2.model import LoopedLM
from lt2.ops import outline
from lt2.train import parallel
from lt2.train.config import MuonConfig, Recompute, TrainConfig
from lt2.train.objectives import AlignConfig, DistillConfig, ExitGateConfig, ObjectiveConfig
from lt2.train.optim import freeze

OUTSIDE = 4 * 10**9
"""Bytes of a card assumed for CUDA's context, NCCL's buffers, kernels' workspaces and fragmentation."""


@dataclass(frozen=True)
class Traced:
    """What a plan is made of: units by [loop][layer], bytes kept by the embedding, of one (B, L, D) and of a teacher's
    weights with what is gathered of them."""

    weights: Weights
    table: list[list[Unit]]
    start: int
    end: Unit
    loss: Loss
    state: int
    teacher: int

    def reordered(self, places: list[int]) -> Traced:
        """places: by layer, where it is among the layers of this one."""
        blocks, learning = self.weights.blocks, self.weights.learning_blocks
        weights = replace(
            self.weights, blocks=[blocks[i] for i in places], learning_blocks=[learning[i] for i in places]
        )
        return replace(self, weights=weights, table=[[row[i] for i in places] for row in self.table])


@dataclass(frozen=True)
class MicroStep:
    """All that the trace of a micro-step depends on: `size` sequences of `seq_len` tokens; see `plan_memory`."""

    config: ModelConfig
    objective: ObjectiveConfig
    recompute: Recompute
    seq_len: int
    size: int
    device_type: str
    bf16: bool
    sharded: bool
    shards: int
    keep: bool
    teacher: ModelConfig | None = None

    @property
    def dtype(self) -> torch.dtype:
        """The weights' dtype: under the bf16 policy FSDP hands them out in bf16 already."""
        return torch.bfloat16 if self.bf16 and self.sharded else torch.float32


Known = dict[str, Traced]
"""Of plans made before, by all that they depend on; those that are given one add what they trace."""


def keeps_gathered(
    config: ModelConfig,
    train: TrainConfig,
    seq_len: int,
    *,
    workers: int,
    card_bytes: float,
    teacher: ModelConfig | None = None,
    known: Known | None = None,
) -> bool:
    """`train.keep_gathered`, where "auto" means: if the planned step fits a card of so many bytes with it."""
    if train.keep_gathered != "auto":
        return train.keep_gathered
    kept = train.model_copy(update={"keep_gathered": True})
    plan = plan_memory(config, kept, seq_len, workers=workers, teacher=teacher, known=known)
    return plan.total + OUTSIDE <= card_bytes


def plan_memory(
    config: ModelConfig,
    train: TrainConfig,
    seq_len: int,
    *,
    workers: int = 1,
    device_type: str = "cuda",
    bf16: bool | None = None,
    sharded: bool | None = None,
    teacher: ModelConfig | None = None,
    known: Known | None = None,
) -> Memory:
    """The peak of one optimizer step on each of `workers`, on sequences of seq_len tokens.

    The objective is `train.objective`: a shipped one as it is, one of a user's own as next_token. bf16: whether matmuls
    run in it; None follows `train.precision` ("auto" is bf16 on CUDA). sharded: by FSDP; None: if there are several
    workers. teacher: whom "distill" asks; without one the batches bring its top-k.
    """
    if bf16 is None:
        bf16 = train.precision == "bf16" or (train.precision == "auto" and device_type == "cuda")
    sharded = workers > 1 if sharded is None else sharded
    rows, size = train.rows(workers)
    alike, places = _kept_first(config)
    step = MicroStep(
        config=alike,
        objective=train.objective,
        recompute="block" if train.recompute == "loop" else train.recompute,
        seq_len=seq_len,
        size=size,
        device_type=device_type,
        bf16=bf16,
        sharded=sharded,
        shards=min(train.shard_workers or workers, workers) if sharded else 1,
        keep=bool(train.keep_gathered),
        teacher=teacher,
    )
    known = {} if known is None else known
    full, rest = divmod(rows, size)
    plans = [_peak(step, places, train, known, waiting=full > 1)]
    if rest and full == 1:  # the first finds no gradients that wait, the second is smaller
        plans.append(_peak(replace(step, size=rest), places, train, known, waiting=True))
    return max(plans, key=lambda plan: plan.total)


def _peak(step: MicroStep, places: list[int], train: TrainConfig, known: Known, *, waiting: bool) -> Memory:
    """The peak of a micro-step and of the update; waiting: for gradients of earlier micro-steps."""
    if (key := repr(step)) not in known:
        known[key] = _trace(step)
    traced = known[key].reordered(places)
    walk = Walk(
        traced.weights,
        waiting=waiting,
        sharded=step.sharded,
        shards=step.shards,
        keep=step.keep,
        itemsize=step.dtype.itemsize,
        tied=step.config.tie_embeddings,
        muon=(2 if step.device_type == "cuda" else 4) if isinstance(train.optimizer, MuonConfig) else 0,
    )
    walk.add(teacher=traced.teacher)
    walk.run(traced.table, traced.start, traced.end, traced.loss, traced.state, recompute=train.recompute)
    return walk.peak


def _kept_first(config: ModelConfig) -> tuple[ModelConfig, list[int]]:
    """The model with the layers that keep attention before all others, and by layer its place there."""
    layout = config.layout
    if not isinstance(layout, KeptLayout):
        return config, list(range(config.n_layers))
    order = sorted(range(config.n_layers), key=lambda layer: layer not in layout.kept)
    first = layout.model_copy(update={"kept": tuple(range(len(layout.kept)))})
    return config.model_copy(update={"layout": first}), [order.index(layer) for layer in range(config.n_layers)]


def _trace(step: MicroStep) -> Traced:
    config, objective = step.config, step.objective
    autocast = partial(torch.autocast, "cpu", torch.bfloat16) if step.bf16 else nullcontext
    with FakeTensorMode(allow_non_fake_inputs=True), outline.planning(step.device_type):
        model = LoopedLM(config).train()
        parallel.cast_weights(model, step.dtype)
        freeze(model, lambda name: objective.lr_scale(name, config))
        parallel.wrap_blocks(model, recompute=step.recompute)
        ids = torch.zeros(step.size, step.seq_len, dtype=torch.int64)
        with LiveStorages() as live:
            with live.over() as start:
                tracer = _tracer(model, ids, live, autocast, objective if isinstance(objective, AlignConfig) else None)
            table, end = tracer.table(), tracer.end()
            state, weights = tracer.h.nbytes, 0
            if isinstance(objective, AlignConfig):
                loss = Loss(state, 0)
            elif isinstance(objective, DistillConfig):
                loss = tracer.per_loop_kl(objective, step.device_type, step.teacher)
            elif isinstance(objective, ExitGateConfig):
                loss = tracer.exit_gate(step.device_type)
            else:
                loss = tracer.next_token(step.device_type)
            if step.teacher is not None:
                weights, peak = _teacher(step.teacher, step, ids, live, autocast)
                loss = replace(loss, asking=peak + (config.n_loops + 1) * state)
    return Traced(Weights.of(model), table, start[0], end, loss, state, weights)


def _tracer(
    model: LoopedLM, ids: torch.Tensor, live: LiveStorages, autocast: Any, align: AlignConfig | None = None
) -> Tracer:
    with autocast():
        h = model.embed(ids)
        seq = model.sequence_info(ids, None, None, None)
    return Tracer(model, live, autocast, h.detach().requires_grad_(), seq, align)


def _teacher(
    config: ModelConfig, step: MicroStep, ids: torch.Tensor, live: LiveStorages, autocast: Any
) -> tuple[int, int]:
    """(bytes of its weights and of what is gathered of them, peak of its forward pass): see `load_teacher`."""
    model = LoopedLM(config).eval().requires_grad_(False)
    if step.bf16:
        parallel.cast_weights(model, torch.bfloat16)
    stored = sum(p.nbytes for p in model.parameters())
    blocks = [sum(p.nbytes for p in block.parameters()) for block in model.blocks]
    gathered = 0
    if step.sharded:  # the root always, the blocks as the student's: all, or the one that runs and the next
        gathered = stored if step.keep else stored - sum(blocks)
    running = 2 * max(blocks) if step.sharded and not step.keep else 0
    return stored // step.shards + gathered, _tracer(model, ids, live, autocast).asking() + running
