"""Timing a call honestly on whatever device it runs on, and models whose weights do not matter to do it with."""

from __future__ import annotations

import time
from collections.abc import Callable

import torch

from lt2.config import ModelConfig
from lt2.model import LoopedLM


def repeat_seconds(work: Callable[[], object], device: torch.device, *, warmups: int, repeats: int) -> list[float]:
    """Seconds of each of `repeats` calls after `warmups` uncounted ones; by CUDA events on a GPU."""
    for _ in range(warmups):
        work()
    times = []
    for _ in range(repeats):
        if device.type == "cuda":
            start, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
            start.record()
            work()
            end.record()
            end.synchronize()
            times.append(start.elapsed_time(end) / 1e3)
        else:
            begin = time.perf_counter()
            work()
            times.append(time.perf_counter() - begin)
    return times


@torch.no_grad()
def random_model(config: ModelConfig, *, dtype: torch.dtype, device: torch.device | str) -> LoopedLM:
    """Weights of a sensible scale, the same every time, drawn on the device: seconds where `build` takes minutes."""
    with torch.device("meta"):
        model = LoopedLM(config).to(dtype)
    model = model.to_empty(device=device)
    generator = torch.Generator(device).manual_seed(0)
    for name, parameter in model.named_parameters():
        if parameter.dim() > 1:
            parameter.normal_(std=parameter.shape[-1] ** -0.5, generator=generator)
        else:
            parameter.fill_(0.0 if "log" in name or "bias" in name else 1.0)
    return model
