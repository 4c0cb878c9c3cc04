"""Per-token depth: adaptive computation time (paper App. A) and Ouro's exit gate.

Both read one sigmoid per token after every loop and spend a budget of 1 on it. ACT spends s itself and halts when at
most epsilon is left; the gate spends s times what is left (so `left` is a survival probability) and exits when at most
1 - threshold is left. What a loop spends is its weight; the loop where a token halts takes all that is left, so a
token's weights sum to 1.

A halted token keeps its state, in training and inference, in a whole-sequence pass and in decoding alike. Tokens that
still run must find keys and values for it in the later loops: `frozen_kv` says whose (see `Adaptive.entry`).

Shapes: B batch, L tokens, D width, T loops.
"""

from __future__ import annotations

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from lt2.config import ActHalting, ExitGate


class EveryLoop:
    """No halting: every token runs every loop."""

    def entry(self, layer: int, h: Tensor) -> Tensor:
        return h

    def keep(self, old: Tensor, new: Tensor) -> Tensor:
        return new

    def after_loop(self, h: Tensor, *, last: bool) -> None:
        pass

    def all_halted(self, valid: Tensor | None) -> bool:
        return False

    def output(self, h: Tensor) -> Tensor:
        return h


class Adaptive:
    """Who still runs, what they have left, and what the loops so far weigh; one per forward pass.

    ACT in training outputs the weighted mix of the states (the Universal Transformer's relaxation, through which the
    head learns), in inference the state a token halted with. The exit gate learns from every loop's loss, so in
    training nothing exits and the weights are its full distribution over loops.
    """

    def __init__(self, config: ActHalting | ExitGate, head: nn.Linear, h: Tensor, *, training: bool):
        self.config, self.head = config, head
        self.is_act = isinstance(config, ActHalting)
        self.slack = config.epsilon if isinstance(config, ActHalting) else 1 - config.threshold
        self.freezes = self.is_act or not training
        self.mixed = torch.zeros_like(h) if self.is_act and training else None
        wide = torch.promote_types(h.dtype, torch.float32)
        self.left = torch.ones(h.shape[:2], dtype=wide, device=h.device)
        self.remainder = torch.zeros_like(self.left)
        self.running = torch.ones(h.shape[:2], dtype=torch.bool, device=h.device)
        self.loops_used = torch.zeros(h.shape[:2], dtype=torch.int64, device=h.device)
        self.weights: list[Tensor] = []
        self.entries: dict[int, Tensor] = {}

    def entry(self, layer: int, h: Tensor) -> Tensor:
        """What (B, L, D) a block reads. Its mixer makes keys, values and state updates of halted tokens from

        - "propagate": their frozen state, or
        - "share": what they fed this layer in their last loop, so that loop's keys and values serve all later ones.
        """
        if self.config.frozen_kv == "propagate":
            return h
        self.entries[layer] = torch.where(self.running[..., None], h, self.entries.get(layer, h))
        return self.entries[layer]

    def keep(self, old: Tensor, new: Tensor) -> Tensor:
        """`new` where a token runs, `old` where it has halted; (B, L, D)."""
        return torch.where(self.running[..., None], new, old)

    def after_loop(self, h: Tensor, *, last: bool) -> None:
        """Account for the loop that ended with h (B, L, D)."""
        wide, running = self.left.dtype, self.running
        with torch.autocast(h.device.type, enabled=False):  # in bf16 a sure gate would round to 1, without a gradient
            head = F.linear(h.to(wide), self.head.weight.to(wide), self.head.bias.to(wide))
        s = torch.sigmoid(head.squeeze(-1))
        after = self.left - s if self.is_act else self.left * (1 - s)
        halts = running & (after <= self.slack) if self.freezes else torch.zeros_like(running)
        if last:
            halts = running
        weight = torch.where(halts, self.left, self.left - after) * running
        self.weights.append(weight)
        if self.mixed is not None:
            self.mixed = self.mixed + weight[..., None].to(h.dtype) * h
        self.remainder = torch.where(halts, self.left, self.remainder)
        self.left = after  # of halted tokens nothing reads it
        self.loops_used = self.loops_used + running
        self.running = running & ~halts

    def all_halted(self, valid: Tensor | None) -> bool:
        """Whether no valid token of the batch runs any more; reads the device."""
        return not (self.running if valid is None else self.running & valid).any()

    def output(self, h: Tensor) -> Tensor:
        return h if self.mixed is None else self.mixed

    def ponder_cost(self) -> Tensor | None:
        """ACT's weighted mean of loops used + remainder of each row, (B,) (Graves 2016); None unless training ACT."""
        if self.mixed is None:
            return None
        assert isinstance(self.config, ActHalting)
        return self.config.ponder_weight * (self.loops_used + self.remainder).mean(1)


def start(
    config: ActHalting | ExitGate | None, head: nn.Linear | None, h: Tensor, *, training: bool
) -> EveryLoop | Adaptive:
    """The halting of one forward pass whose input states are h (B, L, D)."""
    if config is None or head is None:
        return EveryLoop()
    return Adaptive(config, head, h, training=training)
