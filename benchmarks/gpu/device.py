"""What the card can do, measured, and timing helpers shared by the parts."""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable

import torch


def device() -> torch.device:
    return torch.device("cuda" if torch.cuda.is_available() else "cpu")


def card() -> str:
    return torch.cuda.get_device_name() if torch.cuda.is_available() else "CPU"


def seconds(work: Callable[[], object], *, warmups: int = 2, repeats: int = 5) -> float:
    """Median seconds of one call, by CUDA events on a GPU."""
    for _ in range(warmups):
        work()
    times = []
    for _ in range(repeats):
        if torch.cuda.is_available():
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
    return statistics.median(times)


def matmul_flops(n: int) -> float:
    """FLOP/s of an n×n×n bf16 product on random data."""
    a, b = (torch.randn(n, n, device=device(), dtype=torch.bfloat16) for _ in range(2))
    return 2.0 * n**3 / seconds(lambda: a @ b, warmups=3, repeats=10)


def copy_bandwidth(n_bytes: int) -> float:
    """Bytes/s of a device copy, counting bytes read and bytes written."""
    a = torch.randint(255, (n_bytes,), dtype=torch.uint8, device=device())
    b = torch.empty_like(a)
    return 2.0 * n_bytes / seconds(lambda: b.copy_(a), warmups=3, repeats=10)


def ceilings(dry_run: bool) -> dict[str, float]:
    return {
        "matmul_flops": matmul_flops(256 if dry_run else 8192),
        "copy_bandwidth": copy_bandwidth(2**20 if dry_run else 2**32),
    }
