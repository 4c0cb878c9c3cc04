"""Prefill and decode throughput, measured apart (protocol of the paper's efficiency figure).

Prefill: B·L tokens over the time to the last position's logits. Decode at context L: greedy steps after a prefill of L
tokens, EOS off, B·steps over their time. Warm-ups are excluded; the median and quartiles over repeats are reported.
"""

from __future__ import annotations

import copy
import platform
import statistics
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch

from lt2.analysis.accounting import forward_flops, parameters
from lt2.analysis.timing import repeat_seconds
from lt2.decode import DecodeStep, merge_projections
from lt2.model import LoopedLM
from lt2_platform.evaluate.config import ThroughputConfig
from lt2_platform.evaluate.tasks import TaskContext
from lt2_platform.storage import Storage


def throughput_rows(config: ThroughputConfig, model: LoopedLM, context: TaskContext) -> list[dict[str, Any]]:
    """The task "throughput": tokens per second of prefill and decode, on a GPU of a bf16 copy of the model.

    All else that was measured goes to `<out>/throughput.json`.
    """
    if model.embed.weight.is_cuda:
        model = copy.deepcopy(model).bfloat16()
        merge_projections(model)
    found = measure(model, config)
    Storage(context.out).write_json("throughput.json", found)
    where = f"batch {config.batch_size}, context {config.context:,}, {found['dtype']}"
    place = {key: found[key] for key in ("batch_size", "context", "device", "dtype", "cache_bytes")}
    return [
        {"metric": name, "value": found[name]["median"], "n": config.repeats, "unit": "tokens/s", "note": where}
        | {"q1": found[name]["q1"], "q3": found[name]["q3"], **place}
        for name in ("prefill_tokens_per_s", "decode_tokens_per_s")
    ]


@torch.inference_mode()
def measure(model: LoopedLM, config: ThroughputConfig) -> dict[str, Any]:
    """Tokens per second of prefill and decode with their quartiles, and what is needed to compare them.

    Raises:
        OutOfMemoryError: says in which phase, "cache", "prefill" or "decode".
    """
    model.eval()
    device = model.embed.weight.device
    generator = torch.Generator().manual_seed(0)
    shape = (config.batch_size, config.context)
    input_ids = torch.randint(model.config.vocab_size, shape, generator=generator).to(device)
    if device.type == "cuda":
        torch.cuda.reset_peak_memory_stats()

    with phase("cache"):  # one spare step for the graph's own first call
        cache = model.init_cache(config.batch_size, config.context + config.decode_steps + 1)

    def prefill() -> torch.Tensor:
        cache.clear()
        return model.logits(model(input_ids, cache=cache).hidden[:, -1]).argmax(-1)

    with phase("prefill"):
        prefill_times = repeat_seconds(prefill, device, warmups=config.warmups, repeats=config.repeats)
        token = prefill()
    step = DecodeStep(model, cache)

    def decode() -> None:
        cache.rewind(config.context + 1)
        current = token
        for _ in range(config.decode_steps):
            current = step(current).argmax(-1)

    with phase("decode"):
        step(token)
        decode_times = repeat_seconds(decode, device, warmups=config.warmups, repeats=config.repeats)
    counts = parameters(model.config)
    n_prefill = config.batch_size * config.context
    n_decode = config.batch_size * config.decode_steps
    return {
        **config.model_dump(exclude={"type", "source"}),
        "prefill_tokens_per_s": rate(n_prefill, prefill_times),
        "decode_tokens_per_s": rate(n_decode, decode_times),
        "n_loops": model.depth,
        "parameters": counts.total,
        "unrolled_parameters": counts.total + counts.stack * (model.depth - 1),
        "forward_flops_per_token": forward_flops(model.config, config.context, n_loops=model.depth),
        "cache_bytes": cache.nbytes,
        "cache_bytes_per_layer": [[sum(t.nbytes for t in layer.values()) for layer in loop] for loop in cache.layers],
        "peak_memory_bytes": torch.cuda.max_memory_allocated() if device.type == "cuda" else None,
        "device": torch.cuda.get_device_name() if device.type == "cuda" else platform.processor() or platform.machine(),
        "dtype": str(model.embed.weight.dtype).removeprefix("torch."),
        "torch": torch.__version__,
        "cuda_graphs": step.recording is not None,
    }


class OutOfMemoryError(Exception):
    """What was measured did not fit. `phase` says when: model, cache, prefill or decode."""

    def __init__(self, phase: str):
        super().__init__(f"out of memory in {phase}")
        self.phase = phase


@contextmanager
def phase(name: str) -> Iterator[None]:
    """Turns every way in which memory runs out into OutOfMemoryError(name)."""
    try:
        yield
    except (torch.OutOfMemoryError, MemoryError) as error:
        raise OutOfMemoryError(name) from error
    except RuntimeError as error:
        if "can't allocate memory" not in str(error):  # the CPU allocator has no exception of its own
            raise
        raise OutOfMemoryError(name) from error


def rate(tokens: int, times: list[float]) -> dict[str, float]:
    """Median and quartiles of tokens per second."""
    rates = sorted(tokens / t for t in times)
    low, _, high = statistics.quantiles(rates, n=4) if len(rates) > 1 else (rates[0],) * 3
    # Of two the quartiles would lie beyond both, below zero even.
    return {"median": statistics.median(rates), "q1": max(low, rates[0]), "q3": min(high, rates[-1])}
