"""The looped language model: embed -> T loops over N shared blocks -> norm -> head (paper Eq. 2).

Shapes: B batch, L tokens, D width, V vocabulary, T loops, N layers.
"""

from __future__ import annotations

import copy
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import cast

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from lt2 import halting, sequence
from lt2.cache import Cache, LayerCache, allocate
from lt2.config import ConfigError, MixerConfig, ModelConfig
from lt2.init import init_fresh
from lt2.layers import RMSNorm, SwiGLU
from lt2.layout import Schedule, draw_layers, layout, of_each_loop, weights_per_layer
from lt2.mixers import build_mixer
from lt2.mixers.shared import share_projections
from lt2.sequence import SequenceInfo


@dataclass
class LoopedOutput:
    """What a forward pass gives.

    Attributes:
        hidden: (B, L, D) after the final norm.
        loops: the same after every loop, on request.
        aux: losses by name, already weighted: of each row (B,), or one of all.
        weights: (B, L, T) share of each loop under halting: ACT's mixing weights or the exit gate's probabilities.
        loops_used: (B, L) int64, loops each token ran under halting.
    """

    hidden: Tensor
    loops: list[Tensor] | None = None
    aux: dict[str, Tensor] = field(default_factory=dict)
    weights: Tensor | None = None
    loops_used: Tensor | None = None


Record = Callable[[int, int, "Block", MixerConfig, SequenceInfo, Tensor, Tensor], None]
"""Sees every (loop, layer): its block, mixer config, tokens, and the block's input and output states (B, L, D)."""


Force = Callable[["Block", MixerConfig, SequenceInfo, Tensor], tuple[Tensor, Tensor | None]]
"""Teacher forcing (lt2.distill.align), in the mixer's place: (block, mixer config, tokens, normed input) -> (update of
the residual stream, loss). No gradient follows the stream."""


class Block(nn.Module):
    """Pre-norm residual block: a token mixer, then a SwiGLU. `spec` says which mixer runs in this loop."""

    def __init__(self, config: ModelConfig, specs: list[MixerConfig]):
        super().__init__()
        norm = lambda: RMSNorm(config.dim, eps=config.norm_eps)  # noqa: E731
        self.mixer_norm = norm()
        self.mixers = nn.ModuleDict({spec.weights: build_mixer(spec, config.dims) for spec in specs})
        if config.layout.type == "random":
            share_projections(self.mixers)
        self.mixer_post_norm = norm() if config.sandwich_norm else nn.Identity()
        self.ffn_norm = norm()
        self.ffn = SwiGLU(config.dim, config.ffn_dim)
        self.ffn_post_norm = norm() if config.sandwich_norm else nn.Identity()

    def forward(
        self,
        h: Tensor,
        spec: MixerConfig,
        seq: SequenceInfo,
        cache: LayerCache | None = None,
        force: Force | None = None,
    ) -> tuple[Tensor, Tensor | None]:  # (B, L, D) -> (B, L, D), auxiliary loss
        if force is None:
            y, aux = self.mixers[spec.weights](self.mixer_norm(h), spec, seq, cache)
            h = h + self.mixer_post_norm(y)
        else:
            h = h.detach()
            update, aux = force(self, spec, seq, self.mixer_norm(h))
            h = h + update
        h = h + self.ffn_post_norm(self.ffn(self.ffn_norm(h)))
        return h, aux

    def remember(self, h: Tensor, spec: MixerConfig, seq: SequenceInfo, cache: LayerCache | None) -> None:
        """Write the cache as `forward` would, without computing the output state."""
        self.mixers[spec.weights](self.mixer_norm(h), spec, seq, cache)


class LoopedLM(nn.Module):
    """A looped transformer with any token mixers; n_loops = 1 is the plain stack."""

    def __init__(self, config: ModelConfig):
        super().__init__()
        self.config = config
        self.depth = config.n_loops  # loops of a pass that does not say; see `at_depth`
        self.schedule: Schedule = layout(config)
        # No initial values of its own (`init_weights` has them): on the meta device they import all of torch._dynamo.
        self.embed = nn.Embedding.from_pretrained(torch.empty(config.vocab_size, config.dim), freeze=False)
        specs_per_layer = weights_per_layer(config)
        self.rope_dims = {size for specs in specs_per_layer for spec in specs for size in spec.rope_dims(config.dims)}
        self.blocks = nn.ModuleList(Block(config, specs) for specs in specs_per_layer)
        self.rho = nn.Parameter(torch.zeros(config.n_loops, config.dim)) if config.loop_residual else None
        self.norm = RMSNorm(config.dim, eps=config.norm_eps)
        self.halt = None if config.halting is None else nn.Linear(config.dim, 1)
        self.head = None if config.tie_embeddings else nn.Linear(config.dim, config.vocab_size, bias=False)

    def forward(
        self,
        input_ids: Tensor,  # (B, L) int64
        *,
        doc_ids: Tensor | None = None,  # (B, L): attention and state stop where it changes
        lengths: Tensor | None = None,  # (B,): valid tokens of right-padded rows; only read with a cache
        cache: Cache | None = None,
        n_loops: int | None = None,  # run another depth than trained; later loops repeat the last one's rho and mixers
        per_loop: bool = False,
        step: int | None = None,  # training step: random layouts draw layers from it, DSA leaves its warm-up
        record: Record | None = None,  # diagnostics
        force: Force | None = None,  # distillation's first stage
    ) -> LoopedOutput:
        seq = self.sequence_info(input_ids, doc_ids, lengths, cache)
        seq.step = step
        schedule = self.schedule_for(n_loops, step)
        if cache is not None and len(cache.layers) != len(schedule):
            raise ValueError(  # at fewer loops the later ones would miss these tokens, and be wrong from there on
                f"the cache has {len(cache.layers)} loops and this pass runs {len(schedule)}; give each depth its own: "
                f"init_cache(..., n_loops={len(schedule)})"
            )
        h = self.embed(input_ids)
        # What is decoded halts as in inference, whatever mode the model is in.
        depth = halting.start(self.config.halting, self.halt, h, training=self.training and cache is None)
        loops: list[Tensor] = []
        aux: dict[str, Tensor] = {}
        for loop, specs in enumerate(schedule):
            h, losses = self.run_loop(h, loop, specs, seq, depth, cache, record, force)
            for name, loss in losses.items():
                aux[name] = aux.get(name, 0.0) + loss / len(schedule)
            depth.after_loop(h, last=loop == len(schedule) - 1)
            if per_loop:
                loops.append(self.final_norm(h))
        if cache is not None:
            cache.advance(lengths, input_ids.shape[1])
        output = LoopedOutput(self.final_norm(depth.output(h)), loops if per_loop else None, aux)
        if isinstance(depth, halting.Adaptive):
            output.weights, output.loops_used = torch.stack(depth.weights, -1), depth.loops_used
            if (cost := depth.ponder_cost()) is not None:
                aux["ponder"] = cost
        return output

    def run_loop(
        self,
        h: Tensor,
        loop: int,
        specs: tuple[MixerConfig, ...],
        seq: SequenceInfo,
        depth: halting.EveryLoop | halting.Adaptive,
        cache: Cache | None,
        record: Record | None,
        force: Force | None,
    ) -> tuple[Tensor, dict[str, Tensor]]:  # (B, L, D) -> (B, L, D), the mixers' losses summed by type
        """One pass over the blocks; recomputed as a whole in backward where training asks for it."""
        h_in = h
        losses: dict[str, Tensor] = {}
        halted = cache is not None and loop > 0 and depth.all_halted(seq.valid)
        for layer, (block, spec) in enumerate(zip(cast(list[Block], self.blocks), specs)):
            state = cache.layers[loop][layer] if cache is not None else None
            entry = depth.entry(layer, h)
            if halted:
                block.remember(entry, spec, seq, state)
            else:
                out, loss = block(entry, spec, seq, state, force)
                h = depth.keep(h, out)
                if loss is not None:
                    losses[spec.type] = losses.get(spec.type, 0.0) + loss
            if record is not None:
                record(loop, layer, block, spec, seq, entry, h)
        return depth.keep(h_in, self.end_loop(h, h_in, loop)), losses

    def end_loop(self, h: Tensor, h_in: Tensor, loop: int) -> Tensor:
        """The loop's own residual and, as an option, its norm."""
        if self.rho is not None:
            h = h + self.rho[min(loop, len(self.rho) - 1)].to(h.dtype) * h_in
        return self.norm(h) if self.config.norm_each_loop else h

    def final_norm(self, h: Tensor) -> Tensor:
        return h if self.config.norm_each_loop else self.norm(h)

    def at_depth(self, n_loops: int, *, halting: bool = True, exit_threshold: float | None = None) -> LoopedLM:
        """A view on the same weights that runs n_loops loops; with `halting=False` no token stops earlier.

        exit_threshold: of the exit gate, in place of the model's own.

        Raises:
            ConfigError: an exit_threshold for a model without an exit gate, or none in (0, 1].
        """
        view = copy.copy(self)
        view.depth = n_loops
        if exit_threshold is not None:
            view.config = self.config.exits_at(exit_threshold)
        if not halting:
            view.config = self.config.model_copy(update={"halting": None})
        return view

    @property
    def head_weight(self) -> Tensor:  # (V, D)
        return self.embed.weight if self.head is None else self.head.weight

    def logits(self, hidden: Tensor) -> Tensor:  # (..., D) -> (..., V)
        return F.linear(hidden, self.head_weight.to(hidden.dtype))

    def schedule_for(self, n_loops: int | None = None, step: int | None = None) -> Schedule:
        """The mixers of n_loops loops, None: those of the model; past the trained depth the last loop's row repeats."""
        schedule, n_loops = self.schedule, self.depth if n_loops is None else n_loops
        if n_loops < 1:
            raise ConfigError(f"n_loops is {n_loops}; it must be at least 1")
        if self.config.layout.type == "random" and step is not None:
            schedule = layout(self.config, draw_layers(self.config.layout, self.config.n_layers, step))
        return of_each_loop(schedule, n_loops)

    def init_cache(
        self, batch: int, max_len: int, *, n_loops: int | None = None, dtype: torch.dtype | None = None
    ) -> Cache:
        """Empty caches for decoding `batch` rows of up to max_len tokens, in passes of n_loops loops each."""
        schedule = self.schedule_for(n_loops)
        weight = self.embed.weight
        kind = dtype or weight.dtype
        return allocate(schedule, self.config.dims, batch=batch, max_len=max_len, dtype=kind, device=weight.device)

    def sequence_info(
        self, input_ids: Tensor, doc_ids: Tensor | None, lengths: Tensor | None, cache: Cache | None
    ) -> SequenceInfo:
        B, L = input_ids.shape
        if cache is not None:
            if doc_ids is not None:
                raise ValueError("packed documents cannot be decoded from one cache; give each its own row")
            if cache.used + L > cache.max_len:
                raise ValueError(f"cache of {cache.max_len} tokens is too short for {cache.used} + {L}; make it longer")
            seq = sequence.cached(L, cache.lengths.clone(), lengths, fresh=cache.used == 0)
        elif doc_ids is not None:
            seq = sequence.packed(doc_ids)
        else:
            seq = sequence.plain(L, input_ids.device)
        for size in self.rope_dims:
            seq.rope[size] = sequence.rotary(seq.positions, size, self.config.rope_theta, self.config.rope_scaling)
        return seq


def build(config: ModelConfig, *, seed: int = 42, device: str | torch.device = "cpu") -> LoopedLM:
    """A model with fresh weights on `device`, fp32. Raises ConfigError where a mixer of one's own leaves one unset."""
    with torch.device("meta"):
        model = LoopedLM(config)
    model = model.to_empty(device="cpu")
    init_fresh(model, seed)
    return model.to(device)
