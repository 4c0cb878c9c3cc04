"""Timing a call honestly on whatever device it runs on."""

from __future__ import annotations

import time
from collections.abc import Callable

import torch


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
