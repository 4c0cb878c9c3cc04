"""Sparse attention on CPU, forward + backward, against full causal attention (SDPA) on the same q, k, v.

python benchmarks/sparse.py [--quick] [--json FILE]. DSA includes its indexer: scores, selection, the KL's gradients.
Every row is one op at the sizes of a layer with HEADS query heads; ratio > 1 means cheaper than full attention. Below
the length where that happens DSA and NSA cost more than they save.
"""

from __future__ import annotations

import argparse
from collections.abc import Callable
from functools import partial

import torch
from comparison import interleaved, print_rows, row, write_rows
from torch import Tensor

from lt2.ops import causal_attention, windowed_attention
from lt2.ops.sparse import nsa_attention, select_keys, selected_attention, selected_kl

HEADS, DIM, TOP_K, WINDOW = 4, 64, 512, 512
INDEX_HEADS, INDEX_DIM = 4, 64
LENGTHS, QUICK_LENGTHS = (1024, 2048, 4096, 8192, 16384), (1024,)


def works(length: int) -> dict[str, Callable[[], object]]:
    """Forward and backward of each op at one length, by name."""
    generator = torch.Generator().manual_seed(length)

    def leaf(*shape: int) -> Tensor:
        return torch.randn(1, length, *shape, generator=generator).requires_grad_()

    q, direction = leaf(HEADS, DIM), torch.randn(1, length, HEADS, DIM, generator=generator)
    index = (leaf(INDEX_HEADS, INDEX_DIM), leaf(INDEX_DIM), leaf(INDEX_HEADS))
    gates = torch.rand(1, length, HEADS, 3, generator=generator).requires_grad_()
    last = torch.arange(length)[None]

    def dsa(k: Tensor, v: Tensor) -> None:
        kv_heads = k.shape[2]
        keys, found = select_keys(*index, torch.zeros_like(last), last, top_k=TOP_K)
        grouped = q.view(length, kv_heads, -1, DIM).transpose(0, 1).contiguous()
        k, v = (x.squeeze(0).transpose(0, 1).unsqueeze(2).contiguous() for x in (k, v))
        o, weights = selected_attention(grouped, k, v, keys, found.long(), return_weights=True)
        assert weights is not None
        loss = selected_kl(*index, keys, found, weights).mean()
        o = o.transpose(0, 1).reshape(1, length, HEADS, DIM)
        torch.autograd.backward((o, loss), (direction, torch.ones(())))

    def backward(op: Callable[..., Tensor], k: Tensor, v: Tensor, **options) -> None:
        op(q, k, v, **options).backward(direction)

    calls: dict[str, Callable[[], object]] = {}
    for kv_heads in (HEADS, 1):
        k, v = leaf(kv_heads, DIM), leaf(kv_heads, DIM)
        name = "MHA" if kv_heads == HEADS else f"{kv_heads} KV head"
        calls[f"full, {name}"] = partial(backward, causal_attention, k, v)
        calls[f"window {WINDOW}, {name}"] = partial(backward, windowed_attention, k, v, window=WINDOW)
        calls[f"dsa top-{TOP_K}, {name}"] = partial(dsa, k, v)
    nsa = partial(nsa_attention, gates=gates, block_size=64, num_blocks=16, window=WINDOW)
    calls[f"nsa 16x64 + {WINDOW}, 1 KV head"] = partial(backward, nsa, k, v)
    return calls


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--quick", action="store_true", help="one short length")
    parser.add_argument("--json", metavar="FILE")
    arguments = parser.parse_args()
    torch.set_num_threads(1)
    rows = []
    for length in QUICK_LENGTHS if arguments.quick else LENGTHS:
        times = interleaved(works(length), repeats=2 if arguments.quick else 3, seconds=2.0)
        per_token = {name: 1e3 * time / length for name, time in times.items()}
        for name, time in per_token.items():
            if not name.startswith("full"):
                peer = f"full, {name.rpartition(', ')[2]}"
                rows.append(row(name, f"T={length}", time, f"SDPA causal, {peer}", per_token[peer], "us/token"))
    print_rows(rows)
    write_rows(rows, arguments.json)


if __name__ == "__main__":
    main()
