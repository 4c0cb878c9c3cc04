"""What one use of a block, the end of a loop, and a loss keep and need, counted on tensors without data.

Shapes: N tokens of a micro-batch, D width, V vocabulary, K compared tokens, T loops.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from lt2 import halting
from lt2.config import KeptLayout, ModelConfig
from lt2.distill.align import Forced
from lt2.distill.kl import Teacher, TopK, chunked_topk_kl, top_k
from lt2.memory.live import LiveStorages
from lt2.memory.walk import Loss, Unit
from lt2.model import LoopedLM
from lt2.train.loss import chunked_cross_entropy, rows_per_chunk
from lt2.train.objectives import AlignConfig, DistillConfig


@dataclass
class Tracer:
    """Runs parts of `model` on a state h (B, L, D) under `autocast`; each kind of block once."""

    model: LoopedLM
    live: LiveStorages
    autocast: Any
    h: Tensor
    seq: Any
    align: AlignConfig | None = None
    kinds: dict[Any, Unit] = field(default_factory=dict)
    depth: halting.EveryLoop | halting.Adaptive = field(init=False)

    def __post_init__(self) -> None:
        config = self.model.config.halting
        self.depth = halting.start(config, self.model.halt, self.h, training=self.model.training)
        shares = config is not None and config.frozen_kv == "share"
        # A block's input is then made for it: the state goes, and a gradient for the loop before waits in every layer.
        self.replaced = self.h.nbytes if shares else 0
        self.gradient = self.h.nbytes * (1 + len(self.model.blocks) if shares else 1)

    def table(self) -> list[list[Unit]]:
        """Units by [loop][layer]."""
        return [[self._unit(layer, spec) for layer, spec in enumerate(row)] for row in self.model.schedule]

    def _unit(self, layer: int, spec: Any) -> Unit:
        block: Any = self.model.blocks[layer]
        key = (tuple(block.mixers), repr(spec))  # a mixer of one's own may have lists among its fields
        if key not in self.kinds:
            self.kinds[key] = self._block(block, layer, spec)
        return self.kinds[key]

    def _block(self, block: Any, layer: int, spec: Any) -> Unit:
        layout, force = self.model.config.layout, None
        if self.align is not None:
            assert isinstance(layout, KeptLayout)
            force = Forced(layout.attention, self.align.loss)
        with self.autocast():
            with self.live.over() as first:
                earlier = self._use(block, layer, spec, force)  # fills autocast's cache, as the first loop does
            with self.live.over() as second:
                ends = self._use(block, layer, spec, force)
        grads = [torch.empty_like(t) for t in ends]
        with self.live.over() as back:
            if ends:
                torch.autograd.backward(ends, grads)
        gradients = sum(p.grad.nbytes for p in block.parameters() if p.grad is not None)
        block.zero_grad()
        self.h.grad = None
        del earlier
        once = max(0, first[0] - second[0])
        return Unit(second[0] - self.replaced, once, gradients, second[1], back[1])

    def _use(self, block: Any, layer: int, spec: Any, force: Any) -> list[Tensor]:
        """What the block gives that has a gradient."""
        # A stream that no gradient follows goes with its next user, unless backward computes that one again.
        h = self.h if self.align is None else self.h.detach().clone()
        out, aux = block(self.depth.entry(layer, h), spec, self.seq, None, force)
        return [t for t in (self.depth.keep(h, out), aux) if t is not None and t.requires_grad]

    def end(self) -> Unit:
        """The cost of what follows a loop's last block; that block's output is freed unless a backward needs it."""
        with self.autocast():
            self.depth.after_loop(self.h, last=False)  # the first loop's is unlike all others
        with self.live.over() as found, self.autocast():
            out = self.h * 1 if self.align is None else (self.h * 1).detach()
            with self.live.over() as peak:
                after = self.depth.keep(self.h, self.model.end_loop(out, self.h, 0))
                self.depth.after_loop(after, last=False)
            del out
        ends = [after, *self.depth.weights[-1:]] if isinstance(self.depth, halting.Adaptive) else [after]
        with self.live.over() as back:
            if after.requires_grad:
                torch.autograd.backward(ends, [torch.empty_like(t) for t in ends])
        self.model.zero_grad()
        self.h.grad = None
        # A gate that learns keeps the state that it has read, which else the next block does.
        read = self.replaced if self.model.halt is not None and self.model.halt.weight.requires_grad else 0
        return Unit(found[0] - after.nbytes + read, 0, 0, peak[1], back[1])

    def asking(self) -> int:
        """Peak of a forward pass of the model as a teacher, above the states that it gives."""
        kinds = {(tuple(block.mixers), repr(spec)): (block, spec) for block, spec in self._uses()}
        with self.live.over() as found, torch.no_grad(), self.autocast():
            for block, spec in kinds.values():
                block(self.h, spec, self.seq)
        return found[1]

    def _uses(self) -> Iterator[tuple[Any, Any]]:
        for row in self.model.schedule:
            yield from zip(self.model.blocks, row)

    def next_token(self, device_type: str) -> Loss:
        """The cost of the final norm and the chunked cross entropy."""
        rows, few, rest = self._chunks(device_type, self.h.shape[0] * self.h.shape[1])
        hidden = torch.zeros(few, self.h.shape[2], dtype=self.h.dtype, requires_grad=True)
        targets = torch.zeros(few, dtype=torch.int64)
        with self.live.over() as found, self.autocast():
            loss = chunked_cross_entropy(
                self.model.final_norm(hidden), self.model.head_weight, targets, chunk_rows=rows
            ).loss
        del loss
        return Loss(found[1] + 2 * rest * self.h.dtype.itemsize, self.gradient)  # the normed state and its gradient

    def exit_gate(self, device_type: str) -> Loss:
        """The cost of a final norm after every loop and one chunked cross entropy over all loops' states together."""
        T = self.model.config.n_loops
        state, normed = self._normed()
        rows, few, rest = self._chunks(device_type, T * self.h.shape[0] * self.h.shape[1])
        hidden = torch.zeros(few, self.h.shape[2], dtype=state.dtype, requires_grad=True)
        targets = torch.zeros(few, dtype=torch.int64)
        shares = torch.ones(few, requires_grad=True)
        with self.live.over() as found, self.autocast():
            loss = chunked_cross_entropy(
                hidden, self.model.head_weight, targets, token_weights=shares, chunk_rows=rows
            ).loss
        del loss
        states = T * state.nbytes
        peak = states + found[1] + rest * state.dtype.itemsize + normed
        return Loss(peak, self.gradient, states=normed, together=states)

    def per_loop_kl(self, config: DistillConfig, device_type: str, teacher: ModelConfig | None) -> Loss:
        """The cost of a final norm after every loop and the chunked KL over as many loops as ever count at once.

        teacher: who is asked; None: its top-k came with the batch.
        """
        V, k = self.model.config.vocab_size, config.k or self.model.config.vocab_size
        n_tokens, D = self.h.shape[0] * self.h.shape[1], self.h.shape[2]
        used = 1 if config.supervision == "final" else self.model.config.n_loops
        state, normed = self._normed()
        rows, few, rest = self._chunks(device_type, n_tokens)
        hidden = torch.zeros(few, D, dtype=state.dtype, requires_grad=True)
        asked: Teacher
        if teacher is None:
            asked = lambda loop, start, stop: TopK(  # noqa: E731
                torch.zeros(stop - start, k), torch.zeros(stop - start, k, dtype=torch.int64)
            )
            given = used * n_tokens * k * 6  # fp16 and int32
        else:
            weight = torch.zeros(V, D, dtype=self.model.head_weight.dtype)
            asked = lambda loop, start, stop: top_k(hidden.detach()[start:stop], weight, config.k)  # noqa: E731
            given = used * state.nbytes
        counted = torch.ones(few, dtype=torch.bool)
        with self.live.over() as found, self.autocast():
            loss = chunked_topk_kl(
                [hidden], self.model.head_weight, asked, loop_weights=[1.0], counted=counted,
                temperature=config.temperature, chunk_rows=rows,
            ).loss  # fmt: skip
        del loss
        rest = (rest + (used - 1) * n_tokens * D) * state.dtype.itemsize  # gradients of the loops' states
        return Loss(found[1] + rest + normed, self.gradient, states=normed, given=given)

    def _normed(self) -> tuple[Tensor, int]:
        """A state after the final norm, and what that keeps: the last one is normed once more for those who do not
        look at loops."""
        with self.live.over() as normed, self.autocast():
            state = self.model.final_norm(self.h)
        return state, normed[0]

    def _chunks(self, device_type: str, n_states: int) -> tuple[int, int, int]:
        """(rows of a chunk of logits, states that are traced, elements of the others): every chunk after the second is
        like it."""
        rows = min(n_states, rows_per_chunk(device_type, self.model.config.vocab_size))
        few = min(n_states, 2 * rows)
        return rows, few, (n_states - few) * self.h.shape[2]
