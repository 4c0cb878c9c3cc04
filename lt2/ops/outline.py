"""What kernels keep and need, without running them: for plans of memory (`lt2.memory`), on tensors without data.

`planning("cuda")` makes the ops of this package leave the memory behind that fla's and flash kernels would;
`planning("cpu")` lets the PyTorch path run as it is, except where it looks at the data. What fla 0.6 saves was read
off its autograd functions: inputs, the cumulated gate in fp32, and one 64 x 64 matrix per chunk and head where the
delta rule or per-channel decay needs one.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from contextvars import ContextVar
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

CHUNK = 64  # of fla's chunkwise kernels

_planned: ContextVar[str | None] = ContextVar("lt2-planned-device", default=None)


@contextmanager
def planning(device_type: str) -> Iterator[None]:
    """Within the block, ops stand in for themselves on `device_type`."""
    token = _planned.set(device_type)
    try:
        yield
    finally:
        _planned.reset(token)


def planned() -> str | None:
    """The device type planned for; None when ops are to run."""
    return _planned.get()


planned._dynamo_marked_constant = True  # type: ignore[attr-defined]  torch.compile cannot trace a ContextVar


class Shape(NamedTuple):
    size: Sequence[int]
    dtype: torch.dtype


class _Outline(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, outputs: list[Shape], kept: list[Shape], scratch: list[Shape], *inputs: Tensor) -> Any:
        results = tuple(_empty(inputs[0], shape) for shape in outputs)
        ctx.save_for_backward(*inputs, results[0], *(_empty(inputs[0], shape) for shape in kept))
        ctx.scratch, ctx.n_inputs = scratch, len(inputs)
        ctx.mark_non_differentiable(*results[1:])
        return results

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *grads: Tensor) -> Any:
        inputs = ctx.saved_tensors[: ctx.n_inputs]
        scratch = [_empty(grads[0], shape) for shape in ctx.scratch]
        found = [torch.empty_like(x) if x.is_floating_point() else None for x in inputs]
        del scratch
        return None, None, None, *found


def _empty(like: Tensor, shape: Shape) -> Tensor:
    return like.new_empty(tuple(shape.size), dtype=shape.dtype)


def recurrence(q: Tensor, k: Tensor, v: Tensor, g: Tensor | None, beta: Tensor | None) -> tuple[Tensor, Tensor]:
    """Either chunkwise recurrence: shapes as `gated_delta_rule`; (o, final state)."""
    (B, L, H, K), V, chunks = q.shape, v.shape[-1], -(-q.shape[1] // CHUNK)
    gate = () if g is None else (g.float(),)
    inputs = (q.to(v.dtype), k.to(v.dtype), v, *gate, *(() if beta is None else (beta,)))
    kept = [] if g is None else [Shape(g.shape, torch.float32)]
    if beta is not None or (g is not None and g.ndim == 4):
        kept.append(Shape((B, L, H, CHUNK), v.dtype))
    states = Shape((B, chunks, H, K, V), v.dtype)  # of all chunks and their gradients, computed again in backward
    scratch = [states, states, *([Shape(v.shape, v.dtype), Shape(k.shape, v.dtype)] if beta is not None else [])]
    o, state = _Outline.apply([Shape(v.shape, v.dtype), Shape((B, H, K, V), torch.float32)], kept, scratch, *inputs)  # type: ignore[misc]
    return o, state


def attention(q: Tensor, k: Tensor, v: Tensor, *kept: Tensor) -> Tensor:
    """A flash kernel, windowed or not, or fla's NSA: keeps inputs, output, a logsumexp, and what else is given."""
    lse = Shape(q.shape[:-1], torch.float32)
    extra = [lse, *(Shape(x.shape, x.dtype) for x in kept)]
    scratch = [Shape(q.shape, torch.float32)]  # dq is summed in fp32
    (o,) = _Outline.apply([Shape((*q.shape[:-1], v.shape[-1]), v.dtype)], extra, scratch, q, k, v)  # type: ignore[misc]
    return o


def selected(q: Tensor, k: Tensor, v: Tensor, blocks: Tensor, counts: Tensor) -> tuple[Tensor, Tensor]:
    """`selected_attention` and its weights; shapes as there."""
    B, L, K = blocks.shape
    outputs = [Shape((*q.shape[:-1], v.shape[-1]), v.dtype), Shape((B, L, K * k.shape[2]), torch.float32)]
    scratch = [Shape(x.shape, torch.float32) for x in (k, v)]
    o, weights = _Outline.apply(outputs, [], scratch, q, k, v, blocks, counts)  # type: ignore[misc]
    return o, weights
