"""Prefill throughput of 1.3B models over context and batch, and where each runs out of memory (the paper's figure)."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch

from benchmarks.gpu.decode import inference_model
from benchmarks.gpu.device import device, median_seconds, stopwatch
from benchmarks.gpu.models import model_config
from lt2.model import LoopedLM


def part(dry_run: bool, only: set[str] | None, seconds: float) -> Iterator[dict[str, Any]]:
    size, n_layers = ("tiny", 5) if dry_run else ("1.3b", 20)
    cells = [(1, 16), (2, 32)] if dry_run else [(1, 1024), (1, 8192), (1, 32768), (8, 8192), (8, 32768)]
    late = stopwatch(seconds)
    for name in ("full", "full+gdn", "gdn", "gdn+dsa"):  # the first compiles nothing
        if only is not None and name not in only:
            continue
        model = inference_model(model_config(name, size, n_layers=n_layers), compile=False)
        for batch, context in cells:
            row = {"model": name, "batch": batch, "context": context}
            if late(0.8):
                yield {**row, "skipped": "time"}
                continue
            yield {**row, **one(model, batch, context)}
        del model
        if device().type == "cuda":
            torch.cuda.empty_cache()


@torch.inference_mode()
def one(model: LoopedLM, batch: int, context: int) -> dict[str, Any]:
    try:
        if device().type == "cuda":
            torch.cuda.reset_peak_memory_stats()
        ids = torch.randint(model.config.vocab_size, (batch, context), device=device())
        cache = model.init_cache(batch, context)

        def prefill() -> None:
            cache.rewind(0)
            model.logits(model(ids, cache=cache).hidden[:, -1])

        elapsed = median_seconds(prefill, warmups=1, repeats=2)
        memory = torch.cuda.max_memory_allocated() if device().type == "cuda" else 0
    except torch.OutOfMemoryError:
        torch.cuda.empty_cache()
        return {"out_of_memory": True}
    return {"tokens_per_s": batch * context / elapsed, "peak_memory_gib": memory / 2**30}
