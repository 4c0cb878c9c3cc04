"""A training step from its first gather to its update, with what is live at every point; the peak is remembered."""

from __future__ import annotations

from dataclasses import dataclass, replace

from lt2.model import LoopedLM
from lt2.train.muon import matrices_in_blocks


@dataclass(frozen=True)
class Memory:
    """Bytes of one worker at the step's peak, by what they are for. All but `total` add up to it.

    parameters: fp32 weights; teacher: a distillation's teacher, with what is gathered of it; optimizer: its
    moments; gradients; gathered: blocks gathered from all workers; activations: what backward waits with, and a
    teacher's states; workspace: of the unit that runs at the peak.
    """

    parameters: int = 0
    teacher: int = 0
    optimizer: int = 0
    gradients: int = 0
    gathered: int = 0
    activations: int = 0
    workspace: int = 0

    @property
    def total(self) -> int:
        return sum(vars(self).values())


@dataclass(frozen=True)
class Unit:
    """Bytes of one block's use: kept until its backward; once (weights cast by autocast, kept from the first use
    on); its gradients; peaks above what is live when its forward and its backward begin."""

    kept: int
    once: int
    gradients: int
    forward_peak: int
    backward_peak: int


@dataclass(frozen=True)
class Loss:
    """Bytes of the loss: peak of its computation; state: of the gradient that goes back from unit to unit (0: none
    does).

    Of losses after every loop: states, that each loop leaves to the loss and, as a gradient, to its own backward;
    together, all loops' gradients where they are one tensor, which stays until the first loop's backward; given, what a
    teacher gave, until the loss; asking, the teacher's own peak before the student's forward.
    """

    peak: int
    state: int
    states: int = 0
    together: int = 0
    given: int = 0
    asking: int = 0


@dataclass(frozen=True)
class Weights:
    """Numbers of elements: of all parameters, by block, and of those that learn; of `matrices`, and the (rows, columns)
    of their largest, those that Muon would take."""

    all: int
    blocks: list[int]
    learning: int
    learning_blocks: list[int]
    largest: int
    head: int
    embedding: int
    matrices: int
    largest_matrix: tuple[int, int]

    @classmethod
    def of(cls, model: LoopedLM) -> Weights:
        learning = [p for p in model.parameters() if p.requires_grad]
        matrices = [p for p in matrices_in_blocks(model) if p.requires_grad]
        rows, columns = max((p.shape for p in matrices), key=lambda shape: shape.numel(), default=(0, 0))
        return cls(
            all=sum(p.numel() for p in model.parameters()),
            blocks=[sum(p.numel() for p in block.parameters()) for block in model.blocks],
            learning=sum(p.numel() for p in learning),
            learning_blocks=[sum(p.numel() for p in block.parameters() if p.requires_grad) for block in model.blocks],
            largest=max((p.numel() for p in learning), default=0),
            head=model.head_weight.numel() if model.head_weight.requires_grad else 0,
            embedding=model.embed.weight.numel() if model.embed.weight.requires_grad else 0,
            matrices=sum(p.numel() for p in matrices),
            largest_matrix=(rows, columns),
        )


class Walk:
    """shards: workers that hold a part each; keep: gathered blocks stay; itemsize: of what is gathered; waiting:
    whether gradients of earlier micro-batches wait for this one's; muon: bytes of an element while Muon
    orthogonalises it, 0 under AdamW."""

    def __init__(
        self, weights: Weights, *, waiting: bool, sharded: bool, shards: int, keep: bool, itemsize: int, tied: bool,
        muon: int = 0,
    ):  # fmt: skip
        self.weights, self.sharded, self.shards, self.keep = weights, sharded, shards, keep
        self.waiting, self.itemsize, self.tied, self.muon = waiting, itemsize, tied, muon
        self.now = self.peak = Memory()
        moments = 8 * weights.learning - (4 * weights.matrices if muon else 0)
        self.add(parameters=4 * weights.all // shards, optimizer=moments // shards)

    def add(self, **changes: int) -> None:
        self.now = replace(self.now, **{name: getattr(self.now, name) + value for name, value in changes.items()})
        self.look(0)

    def look(self, workspace: int) -> None:
        here = replace(self.now, workspace=workspace)
        if here.total > self.peak.total:
            self.peak = here

    def run(self, table: list[list[Unit]], start: int, end: Unit, loss: Loss, state: int, *, recompute: str) -> None:
        """table: units by [loop][layer]; start: kept by the embedding; end: of a loop's own residual and norm; state:
        bytes of one (B, L, D)."""
        head = 4 * self.weights.head
        # Gradients of earlier micro-steps wait for the last one, whole.
        self.add(gradients=4 * self.weights.learning if self.waiting else 0)
        self.look(loss.asking)
        self.add(activations=start + loss.given)
        self._gather(self.weights.all - sum(self.weights.blocks))
        self._forward(table, end, loss, state, recompute)
        self.look(loss.peak)
        # The head's gradient is found along with the loss; a tied one waits for the embedding's to be added.
        # From here on one gradient goes back from unit to unit.
        self.add(gradients=0 if self.waiting and not self.tied else head, activations=loss.state - loss.given)
        if loss.together:
            self.add(activations=loss.together - len(table) * loss.states)
        if recompute != "none":
            self.add(activations=-sum(unit.once for unit in table[0]))  # autocast's cache, with the forward pass
        self._backward(table, end, loss, state, recompute)
        self.look(self.weights.embedding * self.itemsize)  # its gradient
        everything = 4 * self.weights.learning // self.shards
        self.now = replace(self.now, activations=0, gathered=0, gradients=everything)
        self.look(max(2 * 4 * self.weights.largest // self.shards, self._orthogonalising()))

    def _forward(self, table: list[list[Unit]], end: Unit, loss: Loss, state: int, recompute: str) -> None:
        for loop, row in enumerate(table):
            for layer, unit in enumerate(row):
                if loop == 0:
                    self._gather(self.weights.blocks[layer], of_block=True)
                self.look(unit.forward_peak + self._regathered(layer))
                self.add(activations=(0 if recompute == "loop" else unit.kept) + (unit.once if loop == 0 else 0))
            self.look(end.forward_peak)
            self.add(activations=(state if recompute == "loop" else end.kept) + loss.states)

    def _backward(self, table: list[list[Unit]], end: Unit, loss: Loss, state: int, recompute: str) -> None:
        for loop, row in reversed(list(enumerate(table))):
            self.add(activations=0 if loss.together else -loss.states)
            if recompute == "loop":  # its blocks' inputs are there again
                self.add(activations=sum(unit.kept for unit in row) + end.kept - state)
            self.look(end.backward_peak)
            self.add(activations=-end.kept - (loss.together if loop == 0 else 0))
            for layer, unit in reversed(list(enumerate(row))):
                self.look(unit.backward_peak + self._regathered(layer))
                # Autograd sums a weight's gradients over its uses before it adds them to those that wait.
                summed = self.sharded or not self.waiting or len(table) > 1
                # Those of copies that autocast keeps are summed as such, and become the weights' after the first loop.
                first = unit.once if recompute == "none" and unit.once else unit.gradients
                if summed and loop == len(table) - 1:
                    self.add(gradients=first)
                if loop == 0:
                    self.add(gradients=unit.gradients - first if summed else 0)
                    self._finish(layer, unit, summed)
                self.add(activations=-unit.kept - (unit.once if loop == 0 and recompute == "none" else 0))

    def _finish(self, layer: int, unit: Unit, summed: bool) -> None:
        """A block's gradient is complete: added to what waits, or reduced over the workers."""
        if self.sharded:
            whole = 4 * self.weights.learning_blocks[layer]
            self.look(whole)  # the reduction's fp32 input
            self.add(gradients=whole // self.shards - unit.gradients - (whole if self.waiting else 0))
        elif self.waiting and summed:
            self.add(gradients=-unit.gradients)

    def _orthogonalising(self) -> int:
        """Bytes beside what stays: a matrix as parts (sent, received), as it was and will be, and two Gram matrices."""
        small, large = sorted(self.weights.largest_matrix)
        return self.muon * ((4 if self.sharded else 3) * small * large + 2 * small * small)

    def _gather(self, numel: int, *, of_block: bool = False) -> None:
        if self.sharded and (self.keep or not of_block):
            self.add(gathered=numel * self.itemsize)

    def _regathered(self, layer: int) -> int:
        """Bytes of the running block and the one that is prefetched, where blocks are not kept."""
        return 2 * self.weights.blocks[layer] * self.itemsize if self.sharded and not self.keep else 0
