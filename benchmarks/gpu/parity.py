"""Every mixer's CUDA path against fp64 (`lt2.analysis.device_parity`), and the loss's.

Kernels are tuned over their first tile shapes only (`few_tiles`): this checks arithmetic, not every tile shape.
"""

from __future__ import annotations

import multiprocessing
import os
import time
from collections.abc import Iterator
from concurrent.futures import Future, ProcessPoolExecutor, as_completed, wait
from typing import Any

import torch

from benchmarks.gpu.device import device
from benchmarks.gpu.training import KERNELS, compile_kernels, compile_peer
from lt2.analysis.device_parity import GRADIENT_LIMITS, LIMITS, check, relative, row
from lt2.config import mixer_types
from lt2.train.loss import IGNORE, chunked_cross_entropy

LOSS = "(cross entropy)"  # beside the mixers

TILES = 3  # of up to dozens; one may not fit the card's shared memory


def check_loss(dtype: torch.dtype, n_tokens: int) -> list[dict[str, Any]]:
    """The chunked cross entropy over a large vocabulary, with its gradients."""
    torch.manual_seed(0)
    hidden = torch.randn(n_tokens, 256, device=device()).to(dtype)
    weight = (torch.randn(400 * n_tokens, 256, device=device()) / 8).to(dtype)
    targets = torch.randint(len(weight), (n_tokens,), device=device())
    targets[::5] = IGNORE
    found = {}
    for kind in (dtype, torch.float64):
        leaves = h, w = [x.detach().to(kind).requires_grad_() for x in (hidden, weight)]
        result = chunked_cross_entropy(h, w, targets, z_loss=1e-4, chunk_rows=n_tokens // 2)
        result.loss.backward()
        grads = [leaf.grad.double().flatten() for leaf in leaves if leaf.grad is not None]
        found[kind] = {"forward": result.loss.detach()[None], "gradient": torch.cat(grads)}
    name = name_of(dtype)
    limits = {"forward": LIMITS[name], "gradient": GRADIENT_LIMITS[name]}
    ours, exact = found[dtype], found[torch.float64]
    return [row(LOSS, name, "whole", what, relative(ours[what], exact[what]), limit) for what, limit in limits.items()]


def few_tiles() -> None:
    """Let fla's kernels choose among their first tile shapes only: compiling all of them takes most of ten minutes."""
    from triton.runtime.autotuner import Autotuner

    prune = Autotuner.prune_configs
    Autotuner.prune_configs = lambda self, *args, **kwargs: prune(self, *args, **kwargs)[:TILES]


def check_safely(mixer: str, dtype: torch.dtype, length: int) -> list[dict[str, Any]]:
    """One mixer's failure is a result; the others still get theirs."""
    started = time.perf_counter()
    try:
        if device().type == "cuda":
            few_tiles()
        rows = check_loss(dtype, length) if mixer == LOSS else check(mixer, dtype, length, device())
    except Exception as error:
        rows = [unchecked(mixer, dtype, length, error)]
    rows[-1]["seconds"] = round(time.perf_counter() - started, 1)
    return rows


def part(dry_run: bool, only: set[str] | None, seconds: float) -> Iterator[dict[str, Any]]:
    """Mixers in parallel processes: nearly all of the time is the compilation of kernels, on the CPU's cores."""
    mixers = [mixer for mixer in sorted(mixer_types()) if only is None or mixer in only]
    if only is None:
        mixers.append(LOSS)
    cases = [(mixer, dtype, 70 if dry_run else 300) for dtype in (torch.bfloat16, torch.float32) for mixer in mixers]
    if dry_run:
        for case in cases:
            yield from check_safely(*case)
        return
    context = multiprocessing.get_context("spawn")
    os.environ["FLA_CACHE_RESULTS"] = "0"  # tuned beside other processes: keep the kernels, not the times
    late = 0.9 * seconds + time.monotonic()
    with ProcessPoolExecutor(14, mp_context=context) as pool:
        warming = [pool.submit(compile_kernels, *shape) for shape in KERNELS]  # for the parts that follow
        warming.append(pool.submit(compile_peer))
        running = {pool.submit(check_safely, *case): case for case in cases}
        yield from finished_by(late, running)
        # What failed here, the part that needs the kernel will say.
        wait(warming, timeout=max(0.0, late - time.monotonic()))
        for process in multiprocessing.active_children():  # whoever is late is not waited for
            process.kill()


def finished_by(
    late: float, running: dict[Future[list[dict[str, Any]]], tuple[str, torch.dtype, int]]
) -> Iterator[dict[str, Any]]:
    """Rows of what is finished at the time `late` (of time.monotonic()), and which mixers are not checked."""
    try:
        for future in as_completed(running, timeout=max(0.0, late - time.monotonic())):
            error = future.exception()  # its process died
            yield from future.result() if error is None else [unchecked(*running[future], error)]
    except TimeoutError:
        for future, (mixer, dtype, _) in running.items():
            if not future.done():
                yield {"mixer": mixer, "dtype": name_of(dtype), "skipped": "time"}


def unchecked(mixer: str, dtype: torch.dtype, length: int, error: BaseException) -> dict[str, Any]:
    failure = f"{type(error).__name__}: {error}"[:400]
    return {"mixer": mixer, "dtype": name_of(dtype), "ok": False, "failure": failure}


def name_of(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")
