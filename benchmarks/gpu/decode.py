"""Decode throughput of 1.3B models as a share of the memory-bandwidth limit, with static caches and CUDA graphs.

The limit is the time to read the blocks' weights T times, the head once, and the caches (states also written) at the
measured copy bandwidth. Caches are filled to the context by setting their lengths: a step's cost does not depend on
their values. All contexts share one cache of the largest that fits.
"""

from __future__ import annotations

import time
from collections.abc import Iterator
from typing import Any

import torch
import torch._inductor.config

from benchmarks.gpu.device import copy_bandwidth, device, median_seconds, quiet, stopwatch
from benchmarks.gpu.models import model_config
from lt2.analysis.accounting import cache_table
from lt2.analysis.timing import random_model
from lt2.config import ModelConfig
from lt2.decode import DecodeStep, merge_projections
from lt2.generate import generate
from lt2.model import LoopedLM
from lt2.train.parallel import wrap_blocks


def inference_model(config: ModelConfig, *, compile: bool) -> LoopedLM:
    """In bf16; see `random_model`."""
    model = random_model(config, dtype=torch.bfloat16, device=device()).requires_grad_(False).eval()
    merge_projections(model)
    if compile:
        torch._dynamo.config.automatic_dynamic_shapes = False  # a second batch size gets kernels of its own too
        wrap_blocks(model, compile=True)
    return model


def bytes_per_step(model: LoopedLM, batch: int, context: int) -> float:
    """What a decode step must move: weights of every unrolled block, the head, caches read, states written back."""
    config = model.config
    weights = 2.0 * config.vocab_size * config.dim
    weights += sum(2.0 * p.numel() for p in model.blocks.parameters()) * config.n_loops
    caches = 0.0
    for loop in cache_table(config, context):
        for layer in loop:
            caches += sum(size * (2 if name == "state" else 1) for name, size in layer.items())
    return weights + batch * caches


# (model, batch, what inductor is asked for; None leaves it out, as `generate` does): first what the paper's ratios
# need, last what may be faster.
PLAIN: dict[str, Any] = {}
TUNED = {"coordinate_descent_tuning": True}  # also turns products with one row into reductions that fuse
CASES = [
    ("full+gdn", 8, PLAIN),
    ("full+gdn", 1, PLAIN),
    ("full", 8, PLAIN),
    ("gdn", 8, PLAIN),
    ("gdn", 1, PLAIN),
    ("full", 1, PLAIN),
    ("gdn+dsa", 8, PLAIN),
    ("full+gdn", 8, None),
    ("full+gdn", 1, TUNED),
    ("gdn", 1, TUNED),
    ("gdn", 1, {**TUNED, "combo_kernels": True}),
]


def part(dry_run: bool, only: set[str] | None, seconds: float) -> Iterator[dict[str, Any]]:
    size, n_layers = ("tiny", 5) if dry_run else ("1.3b", 20)
    contexts = (16, 64) if dry_run else (1024, 8192, 32768)
    steps = 8 if dry_run else 32
    late = stopwatch(seconds)
    with quiet():
        limit = copy_bandwidth(dry_run)
    for name, batch, options in CASES:
        if only is not None and name not in only:
            continue
        inductor = "none" if options is None else "+".join(options) or "default"
        row = {"model": name, "batch": batch, "inductor": inductor}
        if late(0.8):
            yield {**row, "skipped": "time"}
            continue
        torch._dynamo.reset()
        with torch._inductor.config.patch(**(options or {})):
            compiled = options is not None and not dry_run
            model = inference_model(model_config(name, size, n_layers=n_layers), compile=compiled)
            for context, measured in over_contexts(model, batch, contexts, limit, steps):
                yield {**row, "context": context, **measured}
            if options is None:
                yield {
                    **row,
                    "context": contexts[0],
                    "generate_tokens_per_s": generated(model, batch, contexts[0], steps),
                }
        del model
        empty()


def empty() -> None:
    if device().type == "cuda":
        torch.cuda.empty_cache()


def generated(model: LoopedLM, batch: int, context: int, steps: int) -> float:
    """New tokens per second of `generate`, the prompts' reading and the recording of its step included."""
    prompts = torch.randint(model.config.vocab_size, (batch, context)).tolist()
    new_tokens = 8 * steps
    with quiet():
        seconds = median_seconds(lambda: generate(model, prompts, max_new_tokens=new_tokens), warmups=1, repeats=1)
    return batch * new_tokens / seconds


@torch.inference_mode()
def over_contexts(
    model: LoopedLM, batch: int, contexts: tuple[int, ...], limit: float, steps: int
) -> Iterator[tuple[int, dict[str, Any]]]:
    """One cache, compilation and CUDA graph for every context: what a server with a fixed capacity would run."""
    fits = list(contexts)
    while fits:
        try:
            cache = model.init_cache(batch, fits[-1] + 4 * steps)
            break
        except torch.OutOfMemoryError:
            empty()
            yield fits.pop(), {"out_of_memory": True}
    else:
        return
    cache.rewind(fits[0])
    step = DecodeStep(model, cache)
    token = torch.zeros_like(cache.lengths)
    begin = time.perf_counter()
    step(token)
    capture = time.perf_counter() - begin
    for context in fits:

        def decode(context: int = context) -> None:
            cache.rewind(context)
            for _ in range(steps):
                step(token).argmax(-1)

        with quiet():
            elapsed = median_seconds(decode, warmups=1, repeats=3) / steps
        needed = bytes_per_step(model, batch, context)
        yield (
            context,
            {
                "tokens_per_s": batch / elapsed,
                "ms_per_step": elapsed * 1e3,
                "share_of_limit": needed / limit / elapsed,
                "gigabytes_per_step": needed / 1e9,
                "cache_gib": cache.nbytes / 2**30,
                "capture_s": capture,
            },
        )
