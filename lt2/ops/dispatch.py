"""Which implementation an op runs on: PyTorch on CPU; fla and flash kernels on CUDA. Every choice is logged once.

fla has no CPU path, except under Triton's interpreter (TRITON_INTERPRET=1), where CPU tensors take the fla path so
that tests reach the real kernels.
"""

from __future__ import annotations

import functools
import importlib.util
import inspect
import logging
import os
from collections.abc import Callable
from importlib import metadata
from typing import ParamSpec, TypeVar

import torch
from torch import Tensor

from lt2.ops import outline

log = logging.getLogger("lt2.ops")

P = ParamSpec("P")
T = TypeVar("T")

BACKENDS = ("auto", "torch", "fla")
HALF = (torch.bfloat16, torch.float16)
HOPPER = (9, 0)

_announced: set[tuple[str, str, str, str]] = set()


def _constant_when_compiled(function: Callable[P, T]) -> Callable[P, T]:
    """Have torch.compile run `function` while tracing: tracing into it would break the graph at the logging.

    This is all that `torch.compiler.assume_constant_result` does, except that it first imports Dynamo and so Triton,
    which every process that imports lt2 would pay for.
    """
    function._dynamo_marked_constant = True  # type: ignore[attr-defined]
    return function


def backend_for(op: str, tensor: Tensor, requested: str = "auto") -> str:
    """Return "torch" or "fla" for a recurrent op on `tensor`'s device and dtype; "outline" in a plan for CUDA.

    Raises ValueError for an unknown `requested`, or for "fla" where its kernels cannot run.
    """
    return _recurrent_backend(op, tensor.device.type, tensor.dtype, requested)


def attention_backend(op: str, tensor: Tensor) -> str:
    """Return "flash_attn", "varlen" (torch's own flash kernels) or "torch" for a softmax op on `tensor`'s device and
    dtype; "outline" in a plan for CUDA."""
    return _attention_backend(op, tensor.device.type, tensor.dtype)


@_constant_when_compiled
def _recurrent_backend(op: str, device: str, dtype: torch.dtype, requested: str) -> str:
    if requested not in BACKENDS:
        raise ValueError(f"backend must be one of {', '.join(BACKENDS)}, got {requested!r}")
    if outline.planned() == "cuda":
        return "outline"
    if requested == "torch":
        return "torch"
    obstacle = _fla_obstacle(device, dtype)
    if obstacle and requested == "fla":
        raise ValueError(f"backend 'fla' cannot run {op}: {obstacle}")
    backend = "torch" if obstacle else "fla"
    announce(op, device, backend, obstacle if device == "cuda" else "")
    return backend


@_constant_when_compiled
def _attention_backend(op: str, device: str, dtype: torch.dtype) -> str:
    if outline.planned() == "cuda":
        return "outline"
    backend = "torch"
    if device == "cuda" and dtype in HALF:
        backend = "flash_attn" if _installed("flash_attn") else "varlen" if _has_varlen() else "torch"
    announce(op, device, backend)
    return backend


@_constant_when_compiled
def announce(op: str, device: str, backend: str, reason: str = "") -> None:
    """Log a choice the first time it is made; a slow choice on CUDA is a warning that names its reason."""
    choice = (op, device, backend, reason)
    if choice in _announced:
        return
    _announced.add(choice)
    level = logging.WARNING if reason else logging.INFO
    log.log(level, "%s on %s: %s%s", op, device, backend, f" ({reason})" if reason else "")


def furthest(ends: Tensor, capacity: int, *, plus: int = 0) -> int:
    """How many of `capacity` cached tokens to read where rows end at ends + plus: their maximum on a CPU, where looking
    is free; all on CUDA, where it would wait for the device and no CUDA graph could hold it."""
    return capacity if ends.is_cuda or outline.planned() else min(int(ends.max()) + plus, capacity)


def triton_runs(tensor: Tensor) -> bool:
    """Whether our own Triton kernels run on `tensor`: on CUDA, and on a CPU under Triton's interpreter."""
    return tensor.is_cuda or (tensor.device.type == "cpu" and _interpreted())


@_constant_when_compiled
def _interpreted() -> bool:
    return os.environ.get("TRITON_INTERPRET") == "1"


@_constant_when_compiled
def scalar_gate_backward_is_broken(delta: bool = True) -> bool:
    """True on Hopper with Triton 3.4.0 <= v < 3.7.1: fla's scalar-gated backward (GDN, Mamba2, RetNet) raises there
    because the compiler miscompiles it (fla issue 640). tilelang stands in for the delta rule only: without it fla
    keeps states in fp32, which its tilelang kernel refuses beside half inputs. The per-channel kernels are not
    affected."""
    if not torch.cuda.is_available() or torch.cuda.get_device_capability() != HOPPER:
        return False
    return (3, 4, 0) <= _triton_version() < (3, 7, 1) and not (delta and _installed("tilelang"))


def startup_problems() -> list[str]:
    """One line per problem of this machine's kernels, each naming its fix; empty when there is nothing to say."""
    if not torch.cuda.is_available():
        return []
    problems = []
    if not _installed("triton") or not _installed("fla"):
        problems.append("fla is not installed: linear mixers run on plain PyTorch; install the `fla` extra")
    elif scalar_gate_backward_is_broken(delta=False):
        mixers = "GDN, Mamba2 and RetNet" if scalar_gate_backward_is_broken() else "Mamba2 and RetNet"
        version = ".".join(map(str, _triton_version()))
        problems.append(
            f"triton {version} miscompiles fla's scalar-gated backward on Hopper: {mixers} run on "
            "the slower per-channel kernels; install triton >= 3.7.1 (or, for GDN, tilelang)"
        )
    if not _installed("flash_attn"):
        problems.append(
            "flash-attn is not installed: softmax attention runs on PyTorch's own kernels; docs/install.md says how to "
            "build it"
        )
    return problems


def _fla_obstacle(device: str, dtype: torch.dtype) -> str:
    """Why fla cannot run on this device and dtype; empty if it can."""
    if device == "cpu" and not _interpreted():
        return "fla has no CPU kernels; use backend='torch', or TRITON_INTERPRET=1 in tests"
    if device not in ("cpu", "cuda"):
        return f"no fla kernels for device {device}"
    if dtype == torch.float64:
        return "fla has no fp64 kernels"
    if not _installed("triton") or not _installed("fla"):
        return "fla or triton is not installed; install the `fla` extra"
    return ""


@functools.cache
def _installed(package: str) -> bool:
    return importlib.util.find_spec(package) is not None


@functools.cache
def _triton_version() -> tuple[int, ...]:
    if not _installed("triton"):
        return (0, 0, 0)
    return tuple(int(part) for part in metadata.version("triton").split("+")[0].split(".")[:3])


def _has_varlen() -> bool:
    """Whether this torch has variable-length flash attention with windows."""
    return "window_size" in _varlen_options()


@_constant_when_compiled
def varlen_shares_heads() -> bool:
    """Whether several query heads of it may have one key/value head; torch 2.11's may not."""
    return "enable_gqa" in _varlen_options()


@functools.cache
def _varlen_options() -> frozenset[str]:
    if not _installed("torch.nn.attention.varlen"):
        return frozenset()
    from torch.nn.attention.varlen import varlen_attn

    return frozenset(inspect.signature(varlen_attn).parameters)
