"""Muon for matrices inside blocks, AdamW for everything else, as one optimizer (Jordan et al. 2024).

Shapes: a matrix is (m, n); worker r of the W that shard it holds (m_r, n) of it, of its gradient and of its momentum.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

from lt2.train.parallel import blocks_of, local

COEFFICIENTS = (3.4445, -4.7750, 2.0315)
"""Of the quintic that Jordan et al. iterate: 5 times, and singular values from 0.003 to 1 are between 0.68 and 1.21."""

RMS = 0.2
"""Root mean square of an update's elements at a rate of 1, about that of AdamW's (Liu et al., arXiv 2502.16982)."""


class Muon(torch.optim.Optimizer):
    """Groups that give `newton_schulz_steps` and `momentum` take Muon's steps, all others AdamW's.

    With gradient G, M ← momentum·M + (1 − momentum)·G, and with Nesterov's look ahead the update is
    0.2·√max(m, n) · orthogonalised((1 − momentum)·G + momentum·M). Its elements are as large as AdamW's late in a
    run, so both kinds of groups share a learning rate and a decoupled weight decay. A matrix is what is stored as one:
    several projections that are one product are one matrix.

    Each of W workers orthogonalises every W-th matrix of a shape whole, between two all-to-alls; groups of a hybrid
    mesh all do the same. Orthogonalised in bf16 on CUDA, elsewhere in the weights' dtype. `found_inf`, where set and
    not zero, leaves weights and momenta as they are (fused AdamW's way, which needs `fused`).
    """

    def __init__(
        self,
        groups: Iterable[dict[str, Any]],
        *,
        lr: float,
        betas: tuple[float, float] = (0.9, 0.95),
        eps: float = 1e-8,
        weight_decay: float = 0.1,
        fused: bool = False,
    ):
        super().__init__(groups, {"lr": lr, "weight_decay": weight_decay, "fused": fused})
        others = [group for group in self.param_groups if "momentum" not in group]
        self.others = torch.optim.AdamW(others, lr=lr, betas=betas, eps=eps, fused=fused) if others else None
        if self.others is not None:  # the very groups, so that a rate set here is theirs, and one state for all
            self.others.param_groups, self.others.state = others, self.state

    @torch.no_grad()
    def step(self, closure: None = None) -> None:  # type: ignore[override]  nobody has a closure
        bad: Tensor | None = getattr(self, "found_inf", None)
        if self.others is not None:
            self.others.found_inf = bad  # type: ignore[attr-defined]
            self.others.step()
        for group in self.param_groups:
            if "momentum" in group:
                for matrices in _at_a_time(group["params"]):
                    self._update(matrices, group, bad)

    def _update(self, matrices: list[nn.Parameter], group: dict[str, Any], bad: Tensor | None) -> None:
        """Up to W matrices of one shape."""
        lr, (m, n) = group["lr"], matrices[0].shape
        updates = [self._ahead(p, group["momentum"], bad) for p in matrices]
        for p, update in zip(matrices, _orthogonalise_shards(updates, matrices[0], group["newton_schulz_steps"])):
            weight = local(p)
            stepped = weight * (1 - lr * group["weight_decay"])
            _assign(weight, stepped.add_(update, alpha=-lr * RMS * math.sqrt(max(m, n))), bad)

    def _ahead(self, p: nn.Parameter, momentum: float, bad: Tensor | None) -> Tensor:
        """This worker's part of what is to be orthogonalised, (m_r, n); moves its part of the momentum."""
        assert p.grad is not None  # `_at_a_time` leaves others out
        if "momentum_buffer" not in self.state[p]:
            self.state[p]["momentum_buffer"] = torch.zeros_like(p)
        buffer, grad = local(self.state[p]["momentum_buffer"]), local(p.grad)
        _assign(buffer, buffer.lerp(grad, 1 - momentum), bad)
        return grad.lerp(buffer, momentum).to(torch.bfloat16 if grad.is_cuda else grad.dtype)


def matrices_in_blocks(model: nn.Module) -> list[nn.Parameter]:
    """Weights of linear layers inside `model.blocks`: not embeddings, heads, convolutions, norms or bare parameters."""
    layers = (layer for block in blocks_of(model) for layer in block.modules() if isinstance(layer, nn.Linear))
    return list(dict.fromkeys(layer.weight for layer in layers))  # type: ignore[misc]  nn.Linear says Tensor


def orthogonalised(x: Tensor, steps: int) -> Tensor:
    """U·S'·Vᵀ of x = U·S·Vᵀ (m, n), with S' near 1 where S is not tiny beside |x|: `steps` of Newton-Schulz."""
    a, b, c = COEFFICIENTS
    if x.shape[0] > x.shape[1]:
        return orthogonalised(x.mT, steps).mT
    x = x / torch.linalg.vector_norm(x).clamp(min=1e-30)  # of all elements, so that no singular value is above 1
    for _ in range(steps):
        gram = x @ x.mT
        x = torch.addmm(x, torch.addmm(gram, gram, gram, beta=b, alpha=c), x, beta=a)
    return x


def _at_a_time(parameters: list[nn.Parameter]) -> Iterator[list[nn.Parameter]]:
    """The parameters that have gradients, grouped by shape: as many at a time as there are workers to share them."""
    by_shape: dict[torch.Size, list[nn.Parameter]] = {}
    for p in parameters:
        if p.grad is not None:
            by_shape.setdefault(p.shape, []).append(p)
    for alike in by_shape.values():
        group = _shard_group(alike[0])
        count = 1 if group is None else dist.get_world_size(group)
        for start in range(0, len(alike), count):
            yield alike[start : start + count]


def _orthogonalise_shards(shards: list[Tensor], like: nn.Parameter, steps: int) -> list[Tensor]:
    """From and to this worker's parts of some matrices: the worker of rank i in their group has the i-th whole."""
    if (group := _shard_group(like)) is None:
        return [orthogonalised(whole, steps) for whole in shards]
    rank, workers, (m, n) = dist.get_rank(group), dist.get_world_size(group), like.shape
    sizes = [len(rows) * n for rows in torch.arange(m).chunk(workers)]  # as FSDP cuts: the last ones may have none
    parts = [*sizes, *[0] * (workers - len(sizes))] if rank < len(shards) else [0] * workers
    mine = [shards[0].numel() if i < len(shards) else 0 for i in range(workers)]
    whole = _exchange(torch.cat([shard.flatten() for shard in shards]), mine, parts, group)
    if whole.numel():
        whole = orthogonalised(whole.view(m, n), steps).flatten()
    back = _exchange(whole, parts, mine, group)
    return [part.view_as(shard) for part, shard in zip(back.split(shards[0].numel() or 1), shards)]


def _exchange(values: Tensor, sent: list[int], received: list[int], group: dist.ProcessGroup) -> Tensor:
    result = values.new_empty(sum(received))
    dist.all_to_all_single(result, values.contiguous(), received, sent, group=group)
    return result


def _shard_group(p: Tensor) -> dist.ProcessGroup | None:
    """Workers that hold a part of `p` each; the last dimension of a hybrid mesh is the one that shards."""
    return p.device_mesh.get_group(p.device_mesh.ndim - 1) if isinstance(p, DTensor) else None


def _assign(target: Tensor, value: Tensor, bad: Tensor | None) -> None:
    target.copy_(value if bad is None else torch.where(bad > 0, target, value))
