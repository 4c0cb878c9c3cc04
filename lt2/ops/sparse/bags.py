"""Products with selected rows of a table, the three ways sparse attention needs them.

On CPU the time goes to moving rows. Only the scores gather them (a matrix product needs them side by side); weighted
sums of rows are embedding bags, which read rows where they lie, and sums into selected single tokens are bags over the
inverted selection: together 5x faster than gathering, multiplying and scattering. Whole blocks scatter well as is.

Shapes: C queries, R heads that share a selection, K selected blocks of S tokens, T = K·S, M table rows, D width.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

import torch
from torch import Tensor
from torch.nn import functional as F

GATHERED = {"cpu": 1 << 19, "cuda": 1 << 26}
"""Gathered numbers of one step: on CPU few enough to stay in cache between the gather and the product."""
INVERTED = {"cpu": 1 << 22, "cuda": 1 << 25}
"""Weights kept at a time for the inverted selection."""


@dataclass(frozen=True)
class Inverse:
    """A selection (C, T) sorted by token: slots (C·T,) in that order, the query of each, each token's first place."""

    slots: Tensor
    queries: Tensor
    offsets: Tensor


def slices(length: int, size: int) -> Iterator[slice]:
    """Consecutive slices of at most `size` (at least 1) items."""
    size = max(1, size)
    for start in range(0, length, size):
        yield slice(start, min(start + size, length))


def gather_size(table: Tensor, n_blocks: int) -> int:
    """Queries whose rows of table (P, S, D) may be gathered in one step."""
    return GATHERED[table.device.type] // (n_blocks * table.shape[1] * table.shape[2])


def inverse_size(tokens: Tensor, heads: int) -> int:
    """Queries of tokens (…, T) to invert at a time, when each has weights for `heads` heads."""
    return INVERTED[tokens.device.type] // (tokens.shape[-1] * heads)


def block_tokens(blocks: Tensor, S: int) -> Tensor:
    """(…, K) blocks -> (…, K·S) tokens."""
    if S == 1:
        return blocks
    return (blocks[..., None] * S + torch.arange(S, device=blocks.device)).flatten(-2)


def selected_products(q: Tensor, table: Tensor, blocks: Tensor) -> Tensor:
    """q (C, R, D) times the rows of table (P, S, D) in its query's blocks (C, K) -> (C, R, T)."""
    rows = table.flatten(1).index_select(0, blocks.flatten()).view(blocks.shape[0], -1, table.shape[2])
    return q.to(table.dtype) @ rows.transpose(1, 2)


def weighted_rows(weights: Tensor, table: Tensor, tokens: Tensor) -> Tensor:
    """Sum over T of weights (C, R, T) times row tokens (C, T) of table (M, D) -> (C, R, D)."""
    C, R, T = weights.shape
    tokens = tokens[:, None].expand(C, R, T).reshape(C * R, T)
    summed = F.embedding_bag(tokens, table, mode="sum", per_sample_weights=weights.reshape(C * R, T))
    return summed.view(C, R, -1)


def invert(tokens: Tensor, count: int) -> Inverse:
    """The inverse of tokens (C, T), each in 0 .. count-1."""
    flat = tokens.flatten()
    ordered, slots = flat.to(torch.int32).sort(stable=True)  # int32 takes the radix sort
    each = torch.arange(count, dtype=torch.int32, device=tokens.device)
    # Not by bincount, which waits for the device to know its own length.
    return Inverse(slots, slots // tokens.shape[-1], torch.searchsorted(ordered, each))


def add_blocks(total: Tensor, weights: Tensor, rows: Tensor, blocks: Tensor) -> None:
    """total (P, S, D) += every query's rows (C, R, D), weighted by weights (C, R, T), at its blocks (C, K)."""
    products = weights.transpose(1, 2) @ rows.to(weights.dtype)
    total.flatten(1).index_add_(0, blocks.flatten(), products.view(blocks.numel(), -1).to(total.dtype))


def add_inverse(total: Tensor, weights: Tensor, rows: Tensor, inverse: Inverse) -> None:
    """total (M, D) += every query's rows (C, R, D), weighted by weights (C, R, T), at the tokens it selected."""
    for r in range(weights.shape[1]):
        ordered = weights[:, r].flatten()[inverse.slots]
        source = rows[:, r].to(total.dtype).contiguous()
        total += F.embedding_bag(inverse.queries, source, inverse.offsets, mode="sum", per_sample_weights=ordered)
