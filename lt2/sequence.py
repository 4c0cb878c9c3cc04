"""What every layer of one forward pass needs to know about the tokens: positions, documents, padding.

Shapes: B batch, L tokens in this pass, D width.
"""

from __future__ import annotations

from dataclasses import dataclass, field

import torch
from torch import Tensor

Rope = dict[int, tuple[Tensor, Tensor]]


@dataclass
class SequenceInfo:
    """Computed once per forward and read by every (loop, layer).

    Attributes:
        positions: (B or 1, L) int64, position of each token in its document (packed) or sequence.
        doc_ids: (B, L) int, None unless attention and recurrent state must stop at document boundaries.
        reset: (B, L) bool, True where a document starts and recurrent state is cleared; None with doc_ids.
        starts: (B,) int64, tokens already in the cache; None without a cache.
        lengths: (B,) int64, valid tokens of this pass (right padding); None without a cache.
        valid: (B, L) bool, None when nothing is padded.
        fresh: the cache is empty, so this pass sees the whole prefix itself.
        step: training step, for mixers that train in phases; None outside training.
        rope: head_dim -> (cos, sin), each (B or 1, L, 1, head_dim // 2), fp32.
    """

    positions: Tensor
    doc_ids: Tensor | None = None
    reset: Tensor | None = None
    starts: Tensor | None = None
    lengths: Tensor | None = None
    valid: Tensor | None = None
    fresh: bool = True
    step: int | None = None
    rope: Rope = field(default_factory=dict)


def packed(doc_ids: Tensor) -> SequenceInfo:
    """Documents packed into rows; doc_ids (B, L) is constant within a document and changes at its end."""
    B, L = doc_ids.shape
    reset = torch.ones_like(doc_ids, dtype=torch.bool)
    reset[:, 1:] = doc_ids[:, 1:] != doc_ids[:, :-1]
    index = torch.arange(L, device=doc_ids.device).expand(B, L)
    start = torch.where(reset, index, 0).cummax(dim=1).values
    return SequenceInfo(positions=index - start, doc_ids=doc_ids, reset=reset)


def plain(L: int, device: torch.device) -> SequenceInfo:
    """Rows of one document each, starting at position 0."""
    return SequenceInfo(positions=torch.arange(L, device=device)[None])


def cached(L: int, starts: Tensor, lengths: Tensor | None, *, fresh: bool) -> SequenceInfo:
    """A pass that continues a cache holding `starts` (B,) tokens per row; row b has lengths[b] valid tokens."""
    offsets = torch.arange(L, device=starts.device)
    valid = None if lengths is None else offsets[None] < lengths[:, None]
    return SequenceInfo(
        positions=starts[:, None] + offsets,
        starts=starts,
        lengths=torch.full_like(starts, L) if lengths is None else lengths,
        valid=valid,
        fresh=fresh,
    )


def rotary(positions: Tensor, head_dim: int, theta: float) -> tuple[Tensor, Tensor]:
    """cos and sin tables (B or 1, L, 1, head_dim // 2) in fp32 (RoFormer, Su et al. 2021)."""
    exponent = torch.arange(0, head_dim, 2, device=positions.device, dtype=torch.float32) / head_dim
    angle = positions[..., None, None].float() * theta**-exponent
    return angle.cos(), angle.sin()


def rotate(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """Apply rotary positions to x (B, L, H, head_dim), pairing dimension i with i + head_dim / 2 (NeoX style)."""
    first, second = x.chunk(2, dim=-1)  # products promote to fp32 (fp64 stays fp64)
    return torch.cat([first * cos - second * sin, second * cos + first * sin], dim=-1).to(x.dtype)
