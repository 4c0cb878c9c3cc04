"""Kernels are tuned once per machine, by its first rank; the others wait, then find the choice in Triton's cache.

fla's autotuner keeps what it finds on disk. Ranks that start together on an empty cache would all search, each timing
its candidates while the other processes load the machine.
"""

from __future__ import annotations

import os
from collections.abc import Callable
from contextlib import nullcontext
from typing import Any

import torch
import torch.distributed as dist

from lt2.model import LoopedLM
from lt2_platform.train import ranks


def first_rank_first(work: Callable[[], object]) -> None:
    """Run `work` on the first rank of every machine, and return on no rank before. Collective."""
    if int(os.environ.get("LOCAL_RANK", ranks.rank())) == 0:
        work()
    if ranks.world_size() > 1:
        dist.barrier()


def run_each_kind(model: LoopedLM, *, rows: int, seq_len: int, dtype: torch.dtype | None, packed: bool) -> int:
    """One block of every kind forward and backward on `rows` sequences of seq_len tokens; returns how many there are.

    The shape is that of a micro-batch, because tuning times candidates on the first one it meets. packed: with two
    documents per row. Leaves no gradients. Call it before the model is sharded.
    """
    device = model.embed.weight.device
    ids = torch.zeros(rows, seq_len, dtype=torch.int64, device=device)
    doc_ids = (torch.arange(seq_len, device=device) >= seq_len // 2).long().expand(rows, -1) if packed else None
    uses: dict[str, Any] = {}
    for row in model.schedule:
        for block, spec in zip(model.blocks, row):
            uses.setdefault(repr(spec), (block, spec))  # a mixer of one's own may have lists among its fields
    with torch.autocast(device.type, dtype) if dtype else nullcontext():
        h = model.embed(ids).detach()
        seq = model.sequence_info(ids, doc_ids, None, None)
        for block, spec in uses.values():
            out, aux = block(h.clone().requires_grad_(), spec, seq)
            (out.sum() if aux is None else out.sum() + aux).backward()
    model.zero_grad(set_to_none=True)
    return len(uses)
