"""Top-k with a total order, so that the same scores always select the same keys.

Scores of a lightning indexer tie exactly (every ReLU of a key may be zero), and `torch.topk` breaks ties by an order
that depends on the length of the row: decoding would then read other keys than the full forward did.
"""

from __future__ import annotations

import torch
from torch import Tensor

POSITION_BITS = 24
_POSITION_MASK = (1 << POSITION_BITS) - 1
_NOT_CANDIDATE = torch.iinfo(torch.int64).min


def top_positions(scores: Tensor, candidates: Tensor, k: int) -> tuple[Tensor, Tensor]:
    """Positions of the k best candidates along the last dimension, best by (fp32 score, then latest position).

    scores: (..., M) float, M < 2^24; candidates: bool, broadcastable to scores. Returns positions (..., min(k, M))
    int64 in no particular order, 0 where fewer candidates exist, and a bool of the same shape, False in those slots.
    """
    bits = (scores.to(torch.float32) + 0.0).view(torch.int32)  # + 0.0 turns -0.0 into 0.0
    ordered = bits ^ ((bits >> 31) & 0x7FFFFFFF)  # integers ordered as the floats are
    position = torch.arange(scores.shape[-1], device=scores.device)
    rank = (ordered.to(torch.int64) << POSITION_BITS) | position
    rank = torch.where(candidates, rank, _NOT_CANDIDATE)
    best = rank.topk(min(k, scores.shape[-1]), dim=-1, sorted=False).values
    found = best != _NOT_CANDIDATE
    return torch.where(found, best & _POSITION_MASK, 0), found
