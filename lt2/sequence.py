"""What every layer of one forward pass needs to know about the tokens: positions, documents, padding.

Shapes: B batch, L tokens in this pass, D width.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, field

import torch
from torch import Tensor

from lt2.config import RopeScaling

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


def rotary(positions: Tensor, head_dim: int, theta: float, scaling: RopeScaling | None = None) -> tuple[Tensor, Tensor]:
    """cos and sin tables (B or 1, L, 1, head_dim // 2) in fp32 (RoFormer, Su et al. 2021)."""
    exponent = torch.arange(0, head_dim, 2, device=positions.device, dtype=torch.float32) / head_dim
    frequencies = theta**-exponent
    if scaling is None:
        angle = positions[..., None, None].float() * frequencies
        return angle.cos(), angle.sin()
    angle = positions[..., None, None].float() * slowed(frequencies, theta, scaling)
    size = attention_factor(scaling)
    return angle.cos() * size, angle.sin() * size


def slowed(frequencies: Tensor, theta: float, scaling: RopeScaling) -> Tensor:
    """Rotary frequencies (head_dim // 2,) as `scaling` changes them: each divided by up to its factor."""
    if scaling.type == "linear":
        return frequencies / scaling.factor
    if scaling.type == "llama3":
        turns = scaling.original_max_seq_len * frequencies / (2 * math.pi)
        low, high = scaling.low_freq_factor, scaling.high_freq_factor
        kept = ((turns - low) / (high - low)).clamp(0, 1)
    else:  # linear in the index of a frequency, between those that turn beta_fast and beta_slow times
        fast, slow = (
            len(frequencies) * math.log(scaling.original_max_seq_len / (turns * 2 * math.pi)) / math.log(theta)
            for turns in (scaling.beta_fast, scaling.beta_slow)
        )
        first, last = max(math.floor(fast), 0), min(math.ceil(slow), 2 * len(frequencies) - 1)
        index = torch.arange(len(frequencies), device=frequencies.device, dtype=torch.float32)
        kept = 1 - ((index - first) / max(last - first, 1e-3)).clamp(0, 1)
    return frequencies * (kept + (1 - kept) / scaling.factor)


def attention_factor(scaling: RopeScaling) -> float:
    """What queries and keys are each multiplied by."""
    if scaling.type != "yarn":
        return 1.0
    return scaling.attention_factor or 0.1 * math.log(scaling.factor) + 1


def rotate(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """Apply rotary positions to x (B, L, H, head_dim), pairing dimension i with i + head_dim / 2 (NeoX style)."""
    first, second = x.chunk(2, dim=-1)  # products promote to fp32 (fp64 stays fp64)
    return torch.cat([first * cos - second * sin, second * cos + first * sin], dim=-1).to(x.dtype)
