"""What a checkpoint holds of a training run: the model, the optimizer's moments by parameter name, the generators."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn

from lt2_platform.train.ranks import rank


def contents(model: nn.Module, optimizer: torch.optim.Optimizer) -> dict[str, Any]:
    """Everything but the step counters, not copied; a sharded model's are DTensors, so each rank writes a part."""
    moments = {name: optimizer.state[p] for name, p in _trained(model, optimizer) if p in optimizer.state}
    return {"model": model.state_dict(), "optimizer": moments, "rng": {str(rank()): generators()}}


def _trained(model: nn.Module, optimizer: torch.optim.Optimizer) -> list[tuple[str, nn.Parameter]]:
    held = {p for group in optimizer.param_groups for p in group["params"]}
    return [(name, p) for name, p in model.named_parameters() if p in held]


def allocate_moments(model: nn.Module, optimizer: torch.optim.Optimizer, saved: set[str]) -> None:
    """Give an optimizer the empty moments that a fresh one lacks, for every parameter whose moments were saved."""
    fused = {p for group in optimizer.param_groups if group.get("fused") for p in group["params"]}
    for name, p in _trained(model, optimizer):
        if f"optimizer.{name}.exp_avg" in saved:
            device = p.device if p in fused else torch.device("cpu")
            step = torch.zeros((), dtype=torch.float32, device=device)
            optimizer.state[p] = {"step": step, "exp_avg": torch.zeros_like(p), "exp_avg_sq": torch.zeros_like(p)}
        elif f"optimizer.{name}.momentum_buffer" in saved:
            optimizer.state[p] = {"momentum_buffer": torch.zeros_like(p)}


def generators() -> dict[str, Tensor]:
    """States of the generators training may draw from: torch's, on CPU and on this rank's GPU."""
    states = {"cpu": torch.get_rng_state()}
    if torch.cuda.is_available():
        states["cuda"] = torch.cuda.get_rng_state()
    return states
