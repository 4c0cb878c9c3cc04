"""Small byte-level checkpoints and a packed dataset of bytes, for evaluations that take a second."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch

from lt2.config import ModelConfig
from lt2.model import LoopedLM, build
from lt2.train.loop import TrainState
from lt2.train.optim import adamw
from lt2_platform.data.tokenizers.tokenize import ByteTokenizer, describe
from lt2_platform.train.checkpoints import checkpoint

HYBRID = {"type": "hybrid", "attention": {"type": "full"}, "mixer": {"type": "gdn"}, "ratio": "1:1"}
MODEL: dict[str, Any] = {"dim": 16, "n_layers": 2, "n_loops": 2, "num_heads": 2, "ffn_hidden": 24, "layout": HYBRID}


def model(*, seed: int = 0, **fields: Any) -> LoopedLM:
    """In eval mode, fp32, with weights large enough that answers differ."""
    config = ModelConfig.model_validate({"vocab_size": 259, **MODEL, **fields})
    net = build(config, seed=seed).eval()
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for parameter in net.parameters():
            parameter.add_(0.1 * torch.randn(parameter.shape, generator=generator))
    return net


def save(
    folder: Any, net: LoopedLM, *, tokenizer: dict[str, Any] | None = None, files: Mapping[str, bytes] | None = None
) -> str:
    """URI of a checkpoint of `net`; `files` are those of the tokenizer, by path within the checkpoint."""
    record = {**describe(ByteTokenizer()), "file": None} if tokenizer is None else tokenizer
    state = TrainState(step=3, position=24, tokens=288, loss=1.5)
    optimizer = adamw(net, lr=1e-2)
    return checkpoint.save(str(folder), net, optimizer, state, checkpoint.About(net.config, record, files or {}))
