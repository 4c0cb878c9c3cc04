"""What passes through the training loop: batches of sequences, and where training stands."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor

_TENSORS = ("tokens", "doc_ids", "loss_mask", "ids", "topk_logits", "topk_ids")


@dataclass
class Batch:
    """Sequences of one rank: tokens (B, L+1) int64, of which L are inputs and L are targets.

    doc_ids (B, L+1): document ordinal within the row, -1 on padding. loss_mask (B, L+1): which tokens are learned.
    ids (B,): sequence ids. step: the optimizer step, for whatever draws at random per step. topk_logits (fp16) and
    topk_ids (int32), both (B, L, T, K): a teacher's largest logits after its last T loops, in descending order.
    """

    tokens: Tensor
    doc_ids: Tensor | None = None
    loss_mask: Tensor | None = None
    ids: Tensor | None = None
    step: int | None = None
    topk_logits: Tensor | None = None
    topk_ids: Tensor | None = None

    def input_doc_ids(self, document_mask: bool) -> Tensor | None:
        """(B, L): what the model is told of documents; None where it may look across them."""
        return self.doc_ids[:, :-1] if document_mask and self.doc_ids is not None else None

    @classmethod
    def from_numpy(cls, arrays: dict[str, Any], device: torch.device | str = "cpu") -> Batch:
        """From what a packed dataset yields: arrays under the names of the fields above."""
        tensors: dict[str, Any] = {name: torch.from_numpy(array) for name, array in arrays.items()}
        return cls(**tensors).to(device)

    def split(self, size: int) -> list[Batch]:
        """Micro-batches of at most `size` sequences, in order."""
        return [self._map(lambda tensor, at=at: tensor[at : at + size]) for at in range(0, len(self.tokens), size)]

    def to(self, device: torch.device | str) -> Batch:
        return self._map(lambda tensor: tensor.to(device, non_blocking=True))

    def _map(self, function: Any) -> Batch:
        values = {name: getattr(self, name) for name in _TENSORS}
        return replace(self, **{name: function(value) for name, value in values.items() if value is not None})


@dataclass
class TrainState:
    """Where training stands; with the model, the optimizer and the RNG it is everything a resume needs.

    step: optimizer steps done. position: sequences of the global order consumed. tokens: tokens that counted in a loss.
    loss: the last one read, at `step` whenever a checkpoint is written.
    """

    step: int = 0
    position: int = 0
    tokens: int = 0
    loss: float | None = None
