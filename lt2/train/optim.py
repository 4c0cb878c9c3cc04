"""AdamW, or Muon with AdamW, with the usual exemptions from weight decay."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any

import torch
from torch import nn
from torch.distributed.tensor import DTensor

from lt2.train.config import AnyOptimizer, MuonConfig
from lt2.train.muon import Muon, matrices_in_blocks

# Decaying these pulls gates and time constants towards values that mean nothing (A_log = 0 is a decay of e^-1).
NO_DECAY_NAMES = frozenset({"A_log", "dt_bias", "rho"})


def decays(name: str, parameter: nn.Parameter) -> bool:
    """True for matrices: everything but norms, biases, A_log, dt_bias and rho."""
    return parameter.ndim >= 2 and name.rsplit(".", 1)[-1] not in NO_DECAY_NAMES


def param_groups(
    parameters: Iterable[tuple[str, nn.Parameter]],
    *,
    weight_decay: float,
    decay_all: bool = False,
    lr_scale: Callable[[str], float] | None = None,
) -> list[dict[str, Any]]:
    """Groups of the trainable parameters, split by weight decay; `decay_all` is the paper's decay-everything.

    lr_scale: of a parameter's name, what its learning rate is multiplied by (see `set_lr`). Sharded and replicated
    parameters get separate groups: torch's multi-tensor kernels reject a mixture of the two.
    """
    groups: dict[tuple[float, float, bool], list[nn.Parameter]] = {}
    for name, parameter in parameters:
        if not parameter.requires_grad:
            continue
        decay = weight_decay if decay_all or decays(name, parameter) else 0.0
        scale = 1.0 if lr_scale is None else lr_scale(name)
        groups.setdefault((decay, scale, isinstance(parameter, DTensor)), []).append(parameter)
    return [
        {"params": params, "weight_decay": decay, "lr_scale": scale} for (decay, scale, _), params in groups.items()
    ]


def freeze(model: nn.Module, lr_scale: Callable[[str], float]) -> None:
    """Keep gradients of the parameters whose learning rate `lr_scale`, of their name, does not multiply by 0."""
    for name, parameter in model.named_parameters():
        parameter.requires_grad_(lr_scale(name) > 0)


def adamw(
    model: nn.Module,
    *,
    lr: float,
    betas: tuple[float, float] = (0.9, 0.95),
    eps: float = 1e-8,
    weight_decay: float = 0.1,
    decay_all: bool = False,
    lr_scale: Callable[[str], float] | None = None,
) -> torch.optim.AdamW:
    """AdamW over the model's trainable parameters; build it after sharding, so that its state is sharded too."""
    groups = param_groups(model.named_parameters(), weight_decay=weight_decay, decay_all=decay_all, lr_scale=lr_scale)
    return torch.optim.AdamW(groups, lr=lr, betas=betas, eps=eps, fused=_on_cuda(groups))


def muon(
    model: nn.Module,
    *,
    lr: float,
    momentum: float = 0.95,
    newton_schulz_steps: int = 5,
    weight_decay: float = 0.1,
    decay_all: bool = False,
    lr_scale: Callable[[str], float] | None = None,
    **adamw_options: Any,
) -> Muon:
    """Muon over trainable matrices in `model.blocks`, AdamW (betas, eps) over the rest; build it after sharding."""
    matrices = set(matrices_in_blocks(model))
    ours = [(name, p) for name, p in model.named_parameters() if p in matrices]
    others = [(name, p) for name, p in model.named_parameters() if p not in matrices]
    options: dict[str, Any] = {"weight_decay": weight_decay, "decay_all": decay_all, "lr_scale": lr_scale}
    steps = {"momentum": momentum, "newton_schulz_steps": newton_schulz_steps}
    groups = [group | steps for group in param_groups(ours, **options)] + param_groups(others, **options)
    return Muon(groups, lr=lr, weight_decay=weight_decay, fused=_on_cuda(groups), **adamw_options)


def _on_cuda(groups: list[dict[str, Any]]) -> bool:
    return all(p.is_cuda for group in groups for p in group["params"])


def build_optimizer(model: nn.Module, config: AnyOptimizer, **settings: Any) -> torch.optim.Optimizer:
    """What `train.optimizer` names; settings as of `adamw`."""
    if isinstance(config, MuonConfig):
        return muon(model, **config.model_dump(exclude={"type"}), **settings)
    return adamw(model, **settings)


def set_lr(optimizer: torch.optim.Optimizer, lr: float) -> None:
    """Give every group its rate; a group's own `lr_scale` (distillation's slow group) multiplies it."""
    for group in optimizer.param_groups:
        group["lr"] = lr * group.get("lr_scale", 1.0)
