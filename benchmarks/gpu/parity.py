"""Every mixer's CUDA path against the same layer in fp64 on the PyTorch path: forward, gradients, decode, packing; and
the loss's.

The fp64 path itself is checked against token-by-token oracles in the test suite. Errors are ‖out - ref‖ / ‖ref‖.
Kernels are tuned over their first tile shapes only (`few_tiles`): this checks arithmetic, not every tile shape.
"""

from __future__ import annotations

import copy
import multiprocessing
import os
import time
from collections.abc import Iterator
from concurrent.futures import ProcessPoolExecutor, as_completed
from typing import Any

import torch
from torch import Tensor

from benchmarks.gpu.device import device
from benchmarks.gpu.training import KERNELS, compile_kernels, compile_peer
from lt2.config import ModelConfig, mixer_types
from lt2.decode import DecodeStep
from lt2.model import LoopedLM, build
from lt2.train.loss import IGNORE, chunked_cross_entropy

# fp32 runs on tf32 tensor cores inside the Triton kernels; a loop of two and a head pass errors on.
LIMITS = {"float32": 5e-3, "bfloat16": 3e-2}
GRADIENT_LIMITS = {"float32": 1e-2, "bfloat16": 8e-2}

# A top-k over rounded scores may select other blocks than the exact one: a jump, not an accumulation of rounding.
SELECTING = {"nsa", "dsa"}
SELECTING_FACTOR = 5.0

LOSS = "(cross entropy)"  # beside the mixers

DRAWS = 4
"""Batches of which the best conditioned is compared, see `drawn`."""

TILES = 3  # of up to dozens; one may not fit the card's shared memory

SMALL: dict[str, dict[str, Any]] = {
    "window": {"window": 48},
    "nsa": {"num_heads": 16, "num_kv_heads": 1, "head_dim": 64},
    "dsa": {"top_k": 32},
    "mla": {"kv_rank": 64},
}


def relative(out: Tensor, ref: Tensor) -> float:
    return float((out.double() - ref).norm() / ref.norm())


def tiny_model(mixer: str) -> ModelConfig:
    return ModelConfig(
        vocab_size=128,
        dim=256,
        num_heads=2,
        n_layers=1,
        n_loops=2,
        layout={"type": "uniform", "mixer": {"type": mixer, **SMALL.get(mixer, {})}},  # type: ignore[arg-type]
        max_seq_len=1024,
    )


def outputs(model: LoopedLM, ids: Tensor, weight: Tensor, doc_ids: Tensor | None = None) -> dict[str, Tensor]:
    """Hidden states of a training pass and the gradients of a fixed projection of them."""
    model.zero_grad()
    hidden = model(ids, doc_ids=doc_ids).hidden
    (hidden * weight.to(hidden.dtype)).sum().backward()
    gradient = torch.cat([p.grad.flatten().double() for p in model.blocks.parameters() if p.grad is not None])
    return {"forward": hidden.detach(), "gradient": gradient}


def drawn(
    oracle: LoopedLM, weight: Tensor, cases: dict[str, Tensor | None]
) -> tuple[Tensor, dict[str, dict[str, Tensor]]]:
    """Of DRAWS batches the one with the smallest gradient in fp64, and the oracle's outputs of it in every case.

    A document's first token has the output (q·k) v, and RetNet, GLA and DeltaNet normalise it: where q·k is nearly 0,
    its sign, and with it the output's, is a matter of rounding in whatever arithmetic, and the gradient is huge.
    """
    found = []
    for _ in range(DRAWS):
        ids = torch.randint(128, weight.shape[:2], device=weight.device)
        exact = {case: outputs(oracle, ids, weight, doc_ids) for case, doc_ids in cases.items()}
        found.append((ids, exact))
    return min(found, key=lambda draw: sum(float(out["gradient"].norm()) for out in draw[1].values()))


@torch.no_grad()
def decoded(model: LoopedLM, ids: Tensor, n_prefill: int) -> Tensor:
    """Hidden states of a prefill and token-by-token steps."""
    cache = model.init_cache(len(ids), ids.shape[1])
    parts = [model(ids[:, :n_prefill], cache=cache).hidden]
    parts += [model(ids[:, t : t + 1], cache=cache).hidden for t in range(n_prefill, ids.shape[1])]
    return torch.cat(parts, dim=1)


@torch.no_grad()
def replayed(model: LoopedLM, ids: Tensor, n_prefill: int) -> tuple[Tensor, bool]:
    """Logits of the same steps through `DecodeStep`, and whether it could record them."""
    cache = model.init_cache(len(ids), ids.shape[1])
    model(ids[:, :n_prefill], cache=cache)
    step = DecodeStep(model, cache)
    logits = [step(ids[:, t]).clone() for t in range(n_prefill, ids.shape[1])]
    return torch.stack(logits, dim=1), step.recording is not None


def check(mixer: str, dtype: torch.dtype, length: int) -> list[dict[str, Any]]:
    torch.manual_seed(0)
    model = build(tiny_model(mixer), seed=1, device=device())
    torch.nn.init.normal_(model.rho, std=0.3)  # type: ignore[arg-type]
    model = model.to(dtype)
    oracle = copy.deepcopy(model).double()
    weight = torch.randn(2, length, 256, device=device(), dtype=torch.float64)
    doc_ids = (torch.arange(length, device=device()) * 3 // length)[None].repeat(2, 1)
    cases = {"whole": None, "packed": doc_ids}
    ids, exact = drawn(oracle, weight, cases)
    name = str(dtype).removeprefix("torch.")
    rows = []
    for case, documents in cases.items():
        ours, ref = outputs(model, ids, weight, documents), exact[case]
        for what, limit in (("forward", LIMITS[name]), ("gradient", GRADIENT_LIMITS[name])):
            rows.append((case, what, relative(ours[what], ref[what]), limit))
    full = oracle(ids).hidden.detach()
    rows.append(("decode", "forward", relative(decoded(model, ids, length - 16), full), LIMITS[name]))
    logits, recorded = replayed(model, ids, length - 16)
    case = "decode, replayed" if recorded else "decode, not recorded"
    rows.append((case, "logits", relative(logits, oracle.logits(full[:, -16:]).detach()), LIMITS[name]))
    slack = SELECTING_FACTOR if mixer in SELECTING and dtype == torch.bfloat16 else 1.0
    return [row(mixer, name, case, what, error, limit * slack) for case, what, error, limit in rows]


def row(mixer: str, dtype: str, case: str, what: str, error: float, limit: float) -> dict[str, Any]:
    return {
        "part": "parity", "mixer": mixer, "dtype": dtype, "case": case, "what": what, "error": error, "limit": limit,
        "ok": bool(error <= limit),
    }  # fmt: skip


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
    name = str(dtype).removeprefix("torch.")
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
        rows = check_loss(dtype, length) if mixer == LOSS else check(mixer, dtype, length)
    except Exception as error:
        failure = f"{type(error).__name__}: {error}"[:400]
        rows = [{"part": "parity", "mixer": mixer, "dtype": str(dtype), "ok": False, "failure": failure}]
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
    with ProcessPoolExecutor(14, mp_context=context) as pool:
        warming = [pool.submit(compile_kernels, *shape) for shape in KERNELS]  # for the parts that follow
        warming.append(pool.submit(compile_peer))
        for finished in as_completed([pool.submit(check_safely, *case) for case in cases]):
            yield from finished.result()
        for warmed in warming:
            warmed.exception()  # the part that needs the kernel will say what is wrong with it
