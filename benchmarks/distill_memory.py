"""Memory of distillation's loss at the full size of Ouro-1.4B: heads of teacher and student, and the top-64 KL of four
loops, forward and backward, against the same loss from whole logits.

python benchmarks/distill_memory.py [--json FILE]. Counts the storages that operations make (lt2.memory.LiveStorages) on
tensors without data, so it needs neither the memory nor a GPU; the peak is above the states and weights that go in.
"""

from __future__ import annotations

import argparse
from collections.abc import Callable

import torch
from comparison import print_rows, row, write_rows
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensorMode

from lt2.distill.kl import chunked_topk_kl, top_k
from lt2.memory import LiveStorages

DIM, VOCAB, K = 2048, 49_152, 64
ROWS = 2**27 // VOCAB  # of one chunk on a GPU
SIZES = ((4096, 1), (4096, 4), (16_384, 4), (32_768, 4))


def chunked(ours: list[Tensor], weight: Tensor, theirs: list[Tensor], head: Tensor) -> Tensor:
    counted = torch.ones(len(ours[0]), dtype=torch.bool)
    return chunked_topk_kl(
        ours,
        weight,
        lambda loop, start, stop: top_k(theirs[loop][start:stop], head, K),
        loop_weights=[1 / len(ours)] * len(ours),
        counted=counted,
        chunk_rows=ROWS,
    ).loss


def whole(ours: list[Tensor], weight: Tensor, theirs: list[Tensor], head: Tensor) -> Tensor:
    total = torch.zeros(())
    for hidden, state in zip(ours, theirs):
        with torch.no_grad():
            values, ids = (state @ head.T).float().topk(K, dim=-1)
        log_q = (hidden @ weight.T).gather(1, ids).float().log_softmax(-1)
        log_p = values.log_softmax(-1)
        total = total + (log_p.exp() * (log_p - log_q)).sum() / len(ours)
    return total


def peak(loss: Callable[..., Tensor], length: int, loops: int) -> float:
    """GB above what goes in, of one sequence in bf16."""
    with FakeTensorMode():
        draw = lambda *shape: torch.empty(*shape, dtype=torch.bfloat16)  # noqa: E731
        ours = [draw(length, DIM).requires_grad_() for _ in range(loops)]
        weight, head = draw(VOCAB, DIM).requires_grad_(), draw(VOCAB, DIM)
        theirs = [draw(length, DIM) for _ in range(loops)]
        with LiveStorages() as live:
            loss(ours, weight, theirs, head).backward()
    return live.peak / 1e9


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--json", help="also write the rows to this file")
    arguments = parser.parse_args()
    rows = [
        row(
            f"top-{K} KL, V = {VOCAB:,}",
            f"L = {length:,}, T = {loops}",
            peak(chunked, length, loops),
            "whole logits",
            peak(whole, length, loops),
            "GB",
        )
        for length, loops in SIZES
    ]
    print_rows(rows)
    write_rows(rows, arguments.json)


if __name__ == "__main__":
    main()
