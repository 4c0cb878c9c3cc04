"""Small models of one sparse mixer, and the memory their training step takes."""

from __future__ import annotations

from typing import Any

import torch
from torch.profiler import ProfilerActivity, profile

from lt2.config import Dims, ModelConfig, UniformLayout, mixer_types
from lt2.mixers import build_mixer
from lt2.model import LoopedLM, build
from lt2.sequence import SequenceInfo, packed, plain, rotary


def model(mixer: dict[str, Any], **fields: Any) -> LoopedLM:
    """Two layers, three loops, fp64, in training mode, gates off their zero initialisation."""
    spec = mixer_types()[mixer["type"]].model_validate(mixer)
    sizes = {"vocab_size": 31, "dim": 16, "n_layers": 2, "n_loops": 3, "num_heads": 4, "ffn_hidden": 16}
    net = build(ModelConfig(layout=UniformLayout(mixer=spec), **{**sizes, **fields})).double()
    generator = torch.Generator().manual_seed(0)
    with torch.no_grad():
        for name, parameter in net.named_parameters():
            if name == "rho" or "gate_proj" in name or "norm" in name:
                parameter.add_(0.3 * torch.randn(parameter.shape, generator=generator, dtype=torch.float64))
    return net


def tokens(batch: int, length: int) -> torch.Tensor:
    return torch.randint(0, 31, (batch, length), generator=torch.Generator().manual_seed(1))


def lone_mixer(mixer: dict[str, Any], dims: Dims) -> tuple[torch.nn.Module, Any]:
    """(module with random weights in fp64, its config)."""
    spec = mixer_types()[mixer["type"]].model_validate(mixer)
    spec.check(dims)
    module = build_mixer(spec, dims).double()
    generator = torch.Generator().manual_seed(2)
    with torch.no_grad():
        for parameter in module.parameters():
            parameter.copy_(0.5 * torch.randn(parameter.shape, generator=generator, dtype=torch.float64))
    return module, spec


def sequence(spec: Any, dims: Dims, length: int, doc_ids: torch.Tensor | None = None) -> SequenceInfo:
    seq = plain(length, torch.device("cpu")) if doc_ids is None else packed(doc_ids)
    for size in spec.rope_dims(dims):
        seq.rope[size] = rotary(seq.positions, size, dims.rope_theta)
    return seq


def peak_bytes(mixer: dict[str, Any], dims: Dims, length: int) -> int:
    """Most bytes the allocator held above the start during a forward and backward of one mixer in fp32."""
    module, spec = lone_mixer(mixer, dims)
    module = module.float().train()
    x = torch.randn(1, length, dims.dim, requires_grad=True)
    seq = sequence(spec, dims, length)
    with profile(activities=[ProfilerActivity.CPU], profile_memory=True) as recorded:
        y, aux = module(x, spec, seq, None)
        (y.sum() if aux is None else y.sum() + aux).backward()
        del y, aux
    events = [event for event in recorded.profiler.kineto_results.events() if event.name() == "[memory]"]
    held = most = 0
    for event in sorted(events, key=lambda event: event.start_ns()):
        held += event.nbytes()
        most = max(most, held)
    assert most > 0
    return most
