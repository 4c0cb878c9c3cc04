"""Tiny fp64 models with every special parameter moved off its initial value, so that no term is silently zero."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from lt2.config import ModelConfig
from lt2.model import LoopedLM, build

FULL: dict[str, Any] = {"type": "uniform", "mixer": {"type": "full"}}
HYBRID: dict[str, Any] = {
    "type": "hybrid", "attention": {"type": "full"}, "mixer": {"type": "gdn"}, "ratio": "1:1"
}  # fmt: skip
WINDOW_GDN: dict[str, Any] = {
    "type": "hybrid", "attention": {"type": "window", "window": 3}, "mixer": {"type": "gdn"}, "ratio": "1:1"
}  # fmt: skip


def config(layout: dict[str, Any] = HYBRID, **fields: Any) -> ModelConfig:
    sizes = {"vocab_size": 23, "dim": 16, "n_layers": 2, "n_loops": 3, "num_heads": 2, "ffn_hidden": 24}
    return ModelConfig.model_validate({**sizes, "layout": layout, **fields})


def model(layout: dict[str, Any] = HYBRID, *, seed: int = 0, **fields: Any) -> LoopedLM:
    """In eval mode, fp64; rho, norms, gates, biases and the halting head are random."""
    net = build(config(layout, **fields), seed=seed).double().eval()
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for name, parameter in net.named_parameters():
            special = name == "rho" or name.startswith("halt") or name.endswith(".bias")
            if special or "gate_proj" in name or "norm" in name:
                parameter.add_(0.3 * torch.randn(parameter.shape, generator=generator, dtype=torch.float64))
    return net


def tokens(batch: int, length: int, *, seed: int = 0, vocab_size: int = 23) -> Tensor:
    return torch.randint(0, vocab_size, (batch, length), generator=torch.Generator().manual_seed(seed))
