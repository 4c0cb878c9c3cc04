"""How much memory a training step needs on each worker, before anything is launched.

One block of every kind runs forward and backward on tensors without data, under the recomputation asked for, while its
storages are counted; a walk over the step's units (embedding, T x N blocks, loss, and back) adds them up and finds the
peak. On CUDA, fla's and flash kernels are outlined (`lt2.ops.outline`). Left out: document masks, what torch.compile
saves by fusing, fragmentation, and what lies outside torch's allocator (`OUTSIDE`).
"""

from __future__ import annotations

import weakref
from collections.abc import Iterator
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from lt2 import parallel
from lt2.config import ModelConfig
from lt2.loss import chunked_cross_entropy, rows_per_chunk
from lt2.model import LoopedLM
from lt2.ops import outline
from lt2.train_config import TrainConfig

OUTSIDE = 4 * 10**9
"""Bytes of a card assumed for CUDA's context, NCCL's buffers, kernels' workspaces and fragmentation."""


@dataclass(frozen=True)
class Memory:
    """Bytes of one worker at the step's peak, by what they are for. All but `total` add up to it.

    parameters: fp32 weights; optimizer: AdamW's moments; gradients; gathered: blocks gathered from all workers;
    activations: what backward waits with; workspace: of the unit that runs at the peak.
    """

    parameters: int = 0
    optimizer: int = 0
    gradients: int = 0
    gathered: int = 0
    activations: int = 0
    workspace: int = 0

    @property
    def total(self) -> int:
        return sum(vars(self).values())


def keeps_gathered(config: ModelConfig, train: TrainConfig, seq_len: int, *, workers: int, card_bytes: float) -> bool:
    """`train.keep_gathered`, where "auto" means: if the planned step fits a card of so many bytes with it."""
    if train.keep_gathered != "auto":
        return train.keep_gathered
    kept = train.model_copy(update={"keep_gathered": True})
    return plan_memory(config, kept, seq_len, workers=workers).total + OUTSIDE <= card_bytes


class LiveStorages(TorchDispatchMode):
    """Counts the bytes of storages that operations inside the block make: `live` now, `peak` since it was last set.

    Works on real tensors and on those without data; what operations allocate and free within themselves is not seen.
    """

    def __init__(self) -> None:
        super().__init__()
        self.live = self.peak = 0
        self._known: dict[int, Any] = {}

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        for leaf in tree_leaves((args, kwargs)):
            if isinstance(leaf, Tensor):
                self._note(leaf.untyped_storage(), 0)  # not made here: weights, inputs
        result = func(*args, **(kwargs or {}))
        for leaf in tree_leaves(result):
            if isinstance(leaf, Tensor):
                storage = leaf.untyped_storage()
                self._note(storage, storage.nbytes())
        return result

    def _note(self, storage: torch.UntypedStorage, size: int) -> None:
        key = storage._cdata
        if key in self._known:
            return

        def gone(_: Any) -> None:
            del self._known[key]
            self.live -= size

        self._known[key] = weakref.ref(storage, gone)
        self.live += size
        self.peak = max(self.peak, self.live)

    @contextmanager
    def over(self) -> Iterator[list[int]]:
        """[bytes that stayed, peak above the beginning] of the block, filled in at its end."""
        before, found = self.live, []
        self.peak = before
        yield found
        found += [self.live - before, self.peak - before]


@dataclass(frozen=True)
class _Unit:
    """Bytes of one block's use: kept until its backward; once (weights cast by autocast, kept from the first use
    on); its gradients; peaks above what is live when its forward and its backward begin."""

    kept: int
    once: int
    gradients: int
    forward_peak: int
    backward_peak: int


def plan_memory(
    config: ModelConfig,
    train: TrainConfig,
    seq_len: int,
    *,
    workers: int = 1,
    device_type: str = "cuda",
    bf16: bool | None = None,
    sharded: bool | None = None,
) -> Memory:
    """The peak of one optimizer step on each of `workers`, next-token objective, sequences of seq_len tokens.

    bf16: whether matmuls run in it; None follows `train.precision` ("auto" is bf16 on CUDA). sharded: by FSDP; None: if
    there are several workers.
    """
    if bf16 is None:
        bf16 = train.precision == "bf16" or (train.precision == "auto" and device_type == "cuda")
    sharded = workers > 1 if sharded is None else sharded
    rows = max(1, train.global_batch_size // workers)
    size = min(train.micro_batch_size or rows, rows)
    shards = min(train.shard_workers or workers, workers)
    walk = _Walk(micro_steps=-(-rows // size), sharded=sharded, shards=shards, keep=bool(train.keep_gathered))
    autocast = partial(torch.autocast, "cpu", torch.bfloat16) if bf16 else nullcontext
    # Under the bf16 policy FSDP hands out weights that are bf16 already.
    dtype = torch.bfloat16 if bf16 and sharded else torch.float32
    with FakeTensorMode(allow_non_fake_inputs=True), outline.planning(device_type):
        model = LoopedLM(config).train()
        parallel.cast_weights(model, dtype)
        walk.add_weights(model, dtype.itemsize)
        recompute = train.recompute
        parallel.wrap_blocks(model, recompute="block" if recompute == "loop" else recompute)
        ids = torch.zeros(size, seq_len, dtype=torch.int64)
        with LiveStorages() as live:
            with live.over() as start, autocast():
                h = model.embed(ids)
                seq = model.sequence_info(ids, None, None, None)
            h = h.detach().requires_grad_()
            kinds: dict[Any, _Unit] = {}
            table = [
                [_kind(kinds, model, layer, spec, h, seq, live, autocast) for layer, spec in enumerate(row)]
                for row in model.schedule
            ]
            with autocast():
                loss = _loss(model, size * seq_len, h.dtype, device_type, live)
    walk.run(table, start[0], loss, h.nbytes, recompute=recompute, head=4 * model.head_weight.numel())
    return walk.peak


def _kind(
    kinds: dict[Any, _Unit],
    model: LoopedLM,
    layer: int,
    spec: Any,
    h: Tensor,
    seq: Any,
    live: LiveStorages,
    autocast: Any,
) -> _Unit:
    block: Any = model.blocks[layer]
    key = (tuple(block.mixers), spec)
    if key not in kinds:
        kinds[key] = _trace(block, spec, h, seq, live, autocast)
    return kinds[key]


def _trace(block: nn.Module, spec: Any, h: Tensor, seq: Any, live: LiveStorages, autocast: Any) -> _Unit:
    with autocast():
        with live.over() as first:
            earlier = block(h, spec, seq)  # fills autocast's cache of cast weights, as the first loop does
        with live.over() as second:
            out, aux = block(h, spec, seq)
    ends = [t for t in (out, aux) if t is not None and t.requires_grad]
    grads = [torch.empty_like(t) for t in ends]
    with live.over() as back:
        torch.autograd.backward(ends, grads)
    gradients = sum(p.grad.nbytes for p in block.parameters() if p.grad is not None)
    block.zero_grad()
    h.grad = None
    del earlier
    return _Unit(second[0], max(0, first[0] - second[0]), gradients, second[1], back[1])


def _loss(model: LoopedLM, n_tokens: int, dtype: torch.dtype, device_type: str, live: LiveStorages) -> tuple[int, int]:
    """(bytes kept, peak) of the final norm and the chunked cross entropy over n_tokens."""
    rows = min(n_tokens, rows_per_chunk(device_type, model.config.vocab_size))
    few = min(n_tokens, 2 * rows)  # every chunk after the second is like it
    hidden = torch.zeros(few, model.config.dim, dtype=dtype, requires_grad=True)
    targets = torch.zeros(few, dtype=torch.int64)
    with live.over() as found:
        loss = chunked_cross_entropy(model.norm(hidden), model.head_weight, targets, chunk_rows=rows).loss
    del loss
    state = (n_tokens - few) * hidden.shape[1] * dtype.itemsize
    return found[0] + state, found[1] + 2 * state  # the normed state's gradient stays, itself it goes


class _Walk:
    """The step in order, with what is live; remembers the peak."""

    def __init__(self, *, micro_steps: int, sharded: bool, shards: int, keep: bool):
        self.waiting, self.sharded, self.shards, self.keep = micro_steps > 1, sharded, shards, keep
        self.now = self.peak = Memory()

    def add_weights(self, model: LoopedLM, gathered_itemsize: int) -> None:
        """Shards of fp32 weights and of AdamW's two moments; sizes of what is gathered."""
        self.numel = sum(p.numel() for p in model.parameters())
        self.block_numel = [sum(p.numel() for p in block.parameters()) for block in model.blocks]
        self.largest = 4 * max(p.numel() for p in model.parameters()) // self.shards
        self.itemsize, self.tied = gathered_itemsize, model.head is None
        self.add(parameters=4 * self.numel // self.shards, optimizer=8 * self.numel // self.shards)

    def add(self, **changes: int) -> None:
        self.now = replace(self.now, **{name: getattr(self.now, name) + value for name, value in changes.items()})
        self.look(0)

    def look(self, workspace: int) -> None:
        here = replace(self.now, workspace=workspace)
        if here.total > self.peak.total:
            self.peak = here

    def run(
        self, table: list[list[_Unit]], start: int, loss: tuple[int, int], state: int, *, recompute: str, head: int
    ) -> None:
        """table: units by [loop][layer]; start: kept by the embedding; state: bytes of one (B, L, D); head: of the
        head's fp32 gradient."""
        # Gradients of earlier micro-steps wait for the last one, whole.
        self.add(gradients=4 * self.numel if self.waiting else 0, activations=start)
        self._gather(self.numel - sum(self.block_numel))
        self._forward(table, state, recompute)
        kept, peak = loss
        self.look(peak)
        # The head's gradient is found along with the loss; a tied one waits for the embedding's to be added.
        self.add(gradients=0 if self.waiting and not self.tied else head, activations=kept - head)
        self.add(activations=state - (kept - head))  # from here on one gradient goes back from unit to unit
        if recompute != "none":
            self.add(activations=-sum(unit.once for unit in table[0]))  # autocast's cache, with the forward pass
        self._backward(table, state, recompute)
        self.look(head * self.itemsize // 4)  # the embedding's gradient
        everything = 4 * self.numel // (self.shards if self.sharded else 1)
        self.now = replace(self.now, activations=0, gathered=0, gradients=everything)
        self.look(2 * self.largest)  # AdamW's temporaries

    def _forward(self, table: list[list[_Unit]], state: int, recompute: str) -> None:
        for loop, row in enumerate(table):
            for layer, unit in enumerate(row):
                if loop == 0:
                    self._gather(self.block_numel[layer], of_block=True)
                self.look(unit.forward_peak + self._regathered(layer))
                self.add(activations=(0 if recompute == "loop" else unit.kept) + (unit.once if loop == 0 else 0))
            if recompute == "loop":
                self.add(activations=state)

    def _backward(self, table: list[list[_Unit]], state: int, recompute: str) -> None:
        for loop, row in reversed(list(enumerate(table))):
            if recompute == "loop":  # its blocks' inputs are there again
                self.add(activations=sum(unit.kept for unit in row) - state)
            for layer, unit in reversed(list(enumerate(row))):
                self.look(unit.backward_peak + self._regathered(layer))
                # Autograd sums a weight's gradients over its uses before it adds them to those that wait.
                summed = self.sharded or not self.waiting or len(table) > 1
                if summed and loop == len(table) - 1:
                    self.add(gradients=unit.gradients)
                if loop == 0:
                    self._finish(layer, unit, summed)
                self.add(activations=-unit.kept - (unit.once if loop == 0 and recompute == "none" else 0))

    def _finish(self, layer: int, unit: _Unit, summed: bool) -> None:
        """A block's gradient is complete: added to what waits, or reduced over the workers."""
        if self.sharded:
            whole = 4 * self.block_numel[layer]
            self.look(whole)  # the reduction's fp32 input
            self.add(gradients=whole // self.shards - unit.gradients - (whole if self.waiting else 0))
        elif self.waiting and summed:
            self.add(gradients=-unit.gradients)

    def _gather(self, numel: int, *, of_block: bool = False) -> None:
        if self.sharded and (self.keep or not of_block):
            self.add(gathered=numel * self.itemsize)

    def _regathered(self, layer: int) -> int:
        """Bytes of the running block and the one that is prefetched, where blocks are not kept."""
        return 2 * self.block_numel[layer] * self.itemsize if self.sharded and not self.keep else 0
