"""NSA's table of blocks: tokens laid out so that every block belongs to one document and starts at its multiple of S.

Shapes: B batch, L tokens, G KV heads, E head dim, P blocks of S tokens.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor
from torch.nn import functional as F
from torch.utils.weak import WeakTensorKeyDictionary

from lt2.ops.documents import document_starts


@dataclass(frozen=True)
class BlockTable:
    """Where each token of a pass sits in blocks.

    Attributes:
        first: (B, L) int64, first block of the token's document.
        position: (B, L) int64, the token's position in its document.
        count: P, blocks per row.
        source: (B, P·S) int64, token held by each slot (0 in empty slots, which nothing reads); None when a row is one
            document, whose blocks are simply consecutive.
    """

    first: Tensor
    position: Tensor
    count: int
    source: Tensor | None = None


# Every layer of every loop asks for the table of the same documents, and finding it synchronises with the device.
_tables: WeakTensorKeyDictionary = WeakTensorKeyDictionary()


def block_table(like: Tensor, doc_ids: Tensor | None, block_size: int) -> BlockTable:
    """The table for tokens `like` (B, L, ...). With doc_ids (B, L) it is remembered per tensor object."""
    B, L = like.shape[:2]
    if doc_ids is None:
        position = torch.arange(L, device=like.device).expand(B, L)
        return BlockTable(torch.zeros_like(position), position, -(-L // block_size))
    tables: dict[int, BlockTable] | None = _tables.get(doc_ids)
    if tables is None:
        tables = _tables[doc_ids] = {}
    if block_size not in tables:
        tables[block_size] = _packed_table(doc_ids, block_size)
    return tables[block_size]


def _packed_table(doc_ids: Tensor, block_size: int) -> BlockTable:
    B, L = doc_ids.shape
    index = torch.arange(L, device=doc_ids.device).expand(B, L)
    position = index - document_starts(doc_ids)
    block = (position % block_size == 0).cumsum(dim=1) - 1
    count = int(block.max()) + 1
    source = index.new_zeros(B, count * block_size)
    source.scatter_(1, block * block_size + position % block_size, index)
    return BlockTable(block - position // block_size, position, count, source)


def into_blocks(x: Tensor, table: BlockTable, block_size: int) -> Tensor:
    """(B, L, G, E) -> (B, G, P, S, E)."""
    B, L, G, E = x.shape
    if table.source is None:
        x = F.pad(x, (0, 0, 0, 0, 0, table.count * block_size - L))
    else:
        x = x.gather(1, table.source[..., None, None].expand(-1, -1, G, E))
    return x.view(B, table.count, block_size, G, E).permute(0, 3, 1, 2, 4).contiguous()
