"""The only file that shards, checkpoints activations or compiles.

Loop-aware FSDP2. A looped model uses each block T times per pass. Plain per-block FSDP gathers and frees it every time:
2·T·N + 1 all-gathers per micro-step. Here every block is gathered once per optimizer step, on its first use (so the
gather of block i+1 overlaps the compute of block i), kept until the last micro-step's backward is done, and its
gradient is reduced once: N + 1 all-gathers and N + 1 reduce-scatters per optimizer step (N blocks and the root, which
holds embedding, head, norm and rho), independent of T and of gradient accumulation. The price is one gathered copy of
the parameters (2.6 GB at 1.3B in bf16) and of the gradients; `keep=False` gives plain FSDP's memory and traffic.

Hybrid sharding (`data_mesh(shard_workers=…)`) shards within groups and sums gradients between them: N + 1 all-reduces
more, the same number of gathers and reductions, each among the workers of one group only.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard
from torch.distributed.tensor import DTensor
from torch.utils._pytree import tree_leaves
from torch.utils.checkpoint import CheckpointPolicy, checkpoint, create_selective_checkpoint_contexts

from lt2.config import ConfigError, ModelConfig
from lt2.extension import SHIPPED
from lt2.layout import schedules
from lt2.train.config import check_recompute

# A bf16 policy would round these, and a decay of exp(-exp(A_log)) amplifies the rounding over thousands of tokens.
# They are a few numbers per head: every rank keeps them whole, in fp32, and their gradients travel in one all-reduce.
KEEP_FP32 = frozenset({"A_log", "dt_bias"})


@dataclass
class Sharding:
    """What the training loop needs to know about a sharded model."""

    model: Any  # the module that is now an FSDPModule too; no type says both
    mesh: DeviceMesh
    blocks: list[Any]
    last: bool = True
    started: set[nn.Module] = field(default_factory=set)


def wrap_blocks(model: nn.Module, *, recompute: str = "none", compile: bool = False) -> None:
    """Compile each block and recompute activations in backward, as asked; parameter names stay as they are.

    recompute: what backward finds of the forward pass, from most memory to least:

    - "none": everything.
    - "selective": what matrix products with weights and softmax attention gave; norms, gates and recurrences run again.
    - "block": the input of every use of a block; each block runs again.
    - "loop": the input of every loop; a loop runs again, and in it each block once more.

    Call before `shard`: FSDP's hooks then stay outside what is compiled and recomputed. The checkpoint is outside the
    compiled function because fla's kernels break the graph, which a checkpoint inside it does not survive.
    Raises ConfigError for "loop" on a model that halts per token or has no `run_loop`.
    """
    recomputed = partial(_recomputed, preserve_rng_state=_may_draw(model))
    for block in blocks_of(model):
        forward = block.forward
        if compile:
            forward = torch.compile(forward)
        if recompute == "selective":
            forward = recomputed(partial(_uncached, forward), context_fn=_selective_contexts)
        elif recompute != "none":
            forward = recomputed(forward)
        block.forward = forward
    if recompute == "loop":
        if not hasattr(model, "run_loop"):
            raise ConfigError(f"{type(model).__name__} has no run_loop to recompute; use 'block' instead of 'loop'")
        config: Any = model.config
        check_recompute(config, recompute)
        model.run_loop = recomputed(model.run_loop)  # type: ignore[assignment]


def _recomputed(function: Any, **options: Any) -> Any:
    return partial(checkpoint, function, use_reentrant=False, **options)


def _may_draw(model: nn.Module) -> bool:
    """Whether a block may draw random numbers, so that their generators must be put back before it runs again.

    Shipped mixers draw none, which saves N·T copies of the generators' states; one of a user's own may (dropout).
    """
    config = getattr(model, "config", None)
    if not isinstance(config, ModelConfig):
        return True
    specs = {type(spec) for schedule in schedules(config) for row in schedule for spec in row}
    return not all(spec.__module__.startswith(SHIPPED) for spec in specs)


def _uncached(forward: Any, h: Tensor, *args: Any, **kwargs: Any) -> Any:
    """`forward` without autocast's cache of cast weights, which would make a second run issue other operations."""
    device = h.device.type
    enabled, dtype = torch.is_autocast_enabled(device), torch.get_autocast_dtype(device)
    with torch.autocast(device, dtype=dtype, enabled=enabled, cache_enabled=False):
        return forward(h, *args, **kwargs)


_KEPT_OPS = {
    torch.ops.aten.mm.default,
    torch.ops.aten.addmm.default,
    torch.ops.aten._scaled_dot_product_flash_attention_for_cpu.default,
    torch.ops.aten._scaled_dot_product_flash_attention.default,
    torch.ops.aten._scaled_dot_product_efficient_attention.default,
    torch.ops.aten._scaled_dot_product_cudnn_attention.default,
}


def _selective_contexts() -> Any:
    def policy(context: Any, op: Any, *args: Any, **kwargs: Any) -> CheckpointPolicy:
        # flash-attn's and torch's variable-length kernels register under these names when they are imported.
        kept = op in _KEPT_OPS or op.namespace in ("flash_attn", "torch_attn")
        return CheckpointPolicy.MUST_SAVE if kept else CheckpointPolicy.PREFER_RECOMPUTE

    return create_selective_checkpoint_contexts(policy)


def blocks_of(model: nn.Module) -> list[nn.Module]:
    """The physical blocks: what is wrapped, compiled and sharded as one unit."""
    blocks = model.blocks
    if not isinstance(blocks, nn.ModuleList):
        raise TypeError(f"{type(model).__name__}.blocks must be an nn.ModuleList of the physical blocks")
    return list(blocks)


def data_mesh(device_type: str, shard_workers: int | None = None) -> DeviceMesh | None:
    """A mesh over every rank of the default process group; None when there is only one rank.

    shard_workers: shard within groups of so many neighbouring ranks and replicate between them (a node's GPUs, say);
    None shards over all. Raises ConfigError when the ranks do not divide into such groups.
    """
    if not dist.is_initialized() or dist.get_world_size() == 1:
        return None
    ranks = dist.get_world_size()
    if shard_workers is None or shard_workers == ranks:
        return init_device_mesh(device_type, (ranks,), mesh_dim_names=("data",))
    if shard_workers < 2:  # torch 2.13 gives wrong gradients in groups of one
        raise ConfigError(f"train.shard_workers {shard_workers}: a group is of 2 workers or more")
    if ranks % shard_workers:
        raise ConfigError(f"train.shard_workers {shard_workers} does not divide {ranks} workers; change either")
    return init_device_mesh(device_type, (ranks // shard_workers, shard_workers), mesh_dim_names=("replicate", "shard"))


def shard(model: nn.Module, mesh: DeviceMesh, *, param_dtype: torch.dtype | None = None, keep: bool = True) -> Sharding:
    """Shard `model` in place over `mesh`; gradients are summed over ranks (not averaged) in fp32.

    param_dtype: dtype in which blocks are gathered and run (bf16 halves the traffic); None keeps the parameters' own.
    keep: hold gathered blocks until backward is done (see the module docstring). Build the optimizer afterwards.
    """
    # Inputs are not cast: rotary tables and gates stay fp32, and autocast picks the dtype of each matmul.
    policy = MixedPrecisionPolicy(
        param_dtype=param_dtype, reduce_dtype=torch.float32 if param_dtype else None, cast_forward_inputs=False
    )
    replicated = _replicated_parameters(model)
    for parameter in replicated:
        dist.broadcast(parameter.data, src=0)
    wrap = partial(fully_shard, mesh=mesh, mp_policy=policy, ignored_params=set(replicated))
    blocks = [wrap(block, reshard_after_forward=not keep) for block in blocks_of(model)]
    root = wrap(model, reshard_after_forward=False)
    for module in (*blocks, root):
        module.set_gradient_divide_factor(1.0)
        module.set_force_sum_reduction_for_comms(True)  # gloo has no pre-multiplied sum
        module.set_reshard_after_backward(not keep, recurse=False)
    sharding = Sharding(root, mesh, blocks)
    _reduce_after_first_loop(sharding)
    return sharding


def cast_weights(model: nn.Module, dtype: torch.dtype) -> None:
    """In place, all parameters but those of KEEP_FP32."""
    kept = set(_replicated_parameters(model))
    for parameter in model.parameters():
        if parameter not in kept:
            parameter.data = parameter.data.to(dtype)


def _replicated_parameters(model: nn.Module) -> list[nn.Parameter]:
    return [p for name, p in model.named_parameters() if name.rsplit(".", 1)[-1] in KEEP_FP32]


def _reduce_after_first_loop(sharding: Sharding) -> None:
    """Let each block reduce its gradients once, when the backward of its first use (the last to run) is done.

    FSDP tries to reduce after the backward of every use. With gradients left from an earlier micro-step it would send
    those at the first of the T uses and the rest at the last. So reduction is off until the gradient of the
    block's first output arrives, which is when all other uses are behind.
    """

    def start_pass(module: nn.Module, args: Any) -> None:
        sharding.started.clear()

    def before(block: nn.Module, args: Any, kwargs: Any) -> None:
        # With frozen embeddings nothing would tell FSDP that the first use's backward has run.
        if block not in sharding.started and torch.is_grad_enabled():
            first = next((t for t in tree_leaves((args, kwargs)) if _is_float(t)), None)
            if first is not None and not first.requires_grad:
                first.requires_grad_()

    def after(block: Any, args: Any, output: Any) -> None:
        if block in sharding.started or not torch.is_grad_enabled():
            return
        sharding.started.add(block)
        first = next((t for t in tree_leaves(output) if _is_float(t) and t.requires_grad), None)
        if first is not None and sharding.last:
            first.register_hook(lambda grad: block.set_requires_gradient_sync(True, recurse=False))

    sharding.model.register_forward_pre_hook(start_pass)
    for block in sharding.blocks:
        block.register_forward_pre_hook(before, prepend=True, with_kwargs=True)
        block.register_forward_hook(after)


def _is_float(value: Any) -> bool:
    return isinstance(value, Tensor) and value.is_floating_point()


@contextmanager
def micro_step(sharding: Sharding | None, *, last: bool) -> Iterator[None]:
    """Run one micro-step's forward and backward inside; only the `last` of an optimizer step communicates gradients."""
    if sharding is None:
        yield
        return
    sharding.last = last
    for block in sharding.blocks:
        block.set_requires_gradient_sync(False, recurse=False)
    sharding.model.set_requires_gradient_sync(last, recurse=False)
    yield
    if last:
        reshard(sharding)


def reshard(sharding: Sharding | None) -> None:
    """Free every gathered parameter: before an optimizer step, a checkpoint, or after evaluating."""
    if sharding is None:
        return
    for module in (*sharding.blocks, sharding.model):
        module.reshard()


def all_reduce(sharding: Sharding | None, value: Tensor) -> Tensor:
    """Sum `value` over ranks in place and return it; the result is bit-identical on every rank."""
    if sharding is not None:
        dist.all_reduce(value)
    return value


def reduce_replicated_gradients(sharding: Sharding | None) -> None:
    """Sum over ranks the gradients FSDP does not handle (`KEEP_FP32`), in one all-reduce."""
    if sharding is None:
        return
    grads = [p.grad for p in _replicated_parameters(sharding.model) if p.grad is not None]
    if not grads:
        return
    flat = torch.cat([grad.flatten() for grad in grads])
    dist.all_reduce(flat)
    for grad, summed in zip(grads, flat.split([grad.numel() for grad in grads])):
        grad.copy_(summed.view_as(grad))


def gradient_square(model: nn.Module, sharding: Sharding | None) -> Tensor:
    """This rank's share of the squared gradient norm, fp64 scalar: summed over ranks it is the norm of the whole."""
    grads = [p.grad for p in model.parameters() if p.grad is not None]
    sharded = [local(grad) for grad in grads if isinstance(grad, DTensor)]
    whole = [grad for grad in grads if not isinstance(grad, DTensor)]
    # Every rank holds the same replicated gradients, so each contributes its part of them; so do the groups of a
    # hybrid mesh, which hold the same shards.
    ranks = 1 if sharding is None else sharding.mesh.size()
    groups = sharding.mesh.size(0) if sharding is not None and sharding.mesh.ndim == 2 else 1
    device = next(model.parameters()).device
    return _square(sharded, device) / groups + _square(whole, device) / ranks


def _square(tensors: list[Tensor], device: torch.device) -> Tensor:
    if not tensors:
        return torch.zeros((), dtype=torch.float64, device=device)
    return torch.stack([torch.linalg.vector_norm(tensor) for tensor in tensors]).double().square().sum()


@torch.no_grad()
def scale_gradients(model: nn.Module, factor: Tensor) -> None:
    """Multiply every gradient by the scalar `factor`, in place, whether sharded or whole."""
    for parameter in model.parameters():
        grad = parameter.grad
        if grad is not None:
            local(grad).mul_(factor.to(grad.dtype))


def local(value: Tensor) -> Tensor:
    """This rank's part of a sharded tensor, in the same memory; any other as it is."""
    return value.to_local() if isinstance(value, DTensor) else value
