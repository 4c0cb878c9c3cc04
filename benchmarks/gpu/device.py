"""What the card can do, measured, and timing helpers shared by the parts."""

from __future__ import annotations

import os
import signal
import statistics
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager

import torch

from lt2.analysis.timing import repeat_seconds


def device() -> torch.device:
    return torch.device("cuda" if torch.cuda.is_available() else "cpu")


def card() -> str:
    return torch.cuda.get_device_name() if torch.cuda.is_available() else "CPU"


def median_seconds(work: Callable[[], object], *, warmups: int = 2, repeats: int = 5) -> float:
    """Median seconds of one call, by CUDA events on a GPU."""
    return statistics.median(repeat_seconds(work, device(), warmups=warmups, repeats=repeats))


def stopwatch(seconds: float) -> Callable[[float], bool]:
    """Started now; asks whether more than a share of `seconds` has gone."""
    started = time.perf_counter()
    return lambda share: time.perf_counter() - started > share * seconds


BACKGROUND = "LT2_GPU_CHECK_BACKGROUND"  # process group of the part that runs beside this one


@contextmanager
def quiet() -> Iterator[None]:
    """Nothing else of the check runs inside: the part in the background is stopped, its last kernels have ended."""
    group = int(os.environ.get(BACKGROUND, "0"))

    def send(number: int) -> None:
        if group:
            try:
                os.killpg(group, number)
            except ProcessLookupError:  # it has finished
                return

    send(signal.SIGSTOP)
    if group:
        time.sleep(0.5)  # synchronising waits for our own kernels only; theirs that are queued end by themselves
    try:
        if torch.cuda.is_available():
            torch.cuda.synchronize()
        yield
    finally:
        send(signal.SIGCONT)


def matmul_flops(dry_run: bool) -> float:
    """FLOP/s of a square bf16 product on random data."""
    n = 256 if dry_run else 8192
    a, b = (torch.randn(n, n, device=device(), dtype=torch.bfloat16) for _ in range(2))
    return 2.0 * n**3 / median_seconds(lambda: a @ b, warmups=3, repeats=10)


def copy_bandwidth(dry_run: bool) -> float:
    """Bytes/s of a device copy, counting bytes read and bytes written."""
    n_bytes = 2**20 if dry_run else 2**32
    a = torch.randint(255, (n_bytes,), dtype=torch.uint8, device=device())
    b = torch.empty_like(a)
    return 2.0 * n_bytes / median_seconds(lambda: b.copy_(a), warmups=3, repeats=10)
