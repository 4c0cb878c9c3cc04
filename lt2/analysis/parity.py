"""Parity checks that every token mixer must pass, shipped or a user's own (see `lt2.analysis.check_mixer`).

Each check builds a small looped model in fp64 and returns the largest deviation between two computations that must
agree. They know nothing about the mixer but its config, so a new mixer is tested by the same code as the shipped ones.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.nn import Module

from lt2.analysis import accounting
from lt2.config import MixerConfig, ModelConfig, UniformLayout
from lt2.model import Block, LoopedLM, build

TOLERANCE = 1e-9
VOCAB = 61
LATE_STEP = 10**9  # past any warm-up phase of training


@dataclass(frozen=True)
class Sample:
    """A mixer and the small model and sequence length it is checked at."""

    mixer: MixerConfig
    dim: int = 32
    num_heads: int = 2
    seq_len: int = 24

    @property
    def config(self) -> ModelConfig:
        layout = UniformLayout(mixer=self.mixer)
        return ModelConfig(
            vocab_size=VOCAB,
            dim=self.dim,
            n_layers=2,
            n_loops=3,
            num_heads=self.num_heads,
            ffn_hidden=16,
            layout=layout,
        )


def config_round_trip(sample: Sample) -> float:
    """A config read back from its own JSON is equal to it."""
    config = sample.config
    again = ModelConfig.model_validate_json(config.model_dump_json())
    if again != config:
        raise ValueError(f"config changed from {config.model_dump()} to {again.model_dump()}")
    return 0.0


def decode_matches_forward(sample: Sample) -> float:
    """A prefill and then one token at a time gives every (loop, layer) what one forward pass gives it."""
    model, ids = sample_model(sample), sample_tokens(sample)
    whole = trace(model, ids)
    worst = 0.0
    for prefill in (1, sample.seq_len // 3):
        lengths = [prefill] + [1] * (sample.seq_len - prefill)
        worst = max(worst, deviation(whole, trace_in_pieces(model, ids, lengths)))
    return worst


def chunked_prefill(sample: Sample) -> float:
    """A prompt fed in unequal pieces, one of them a single token, gives what one forward pass gives."""
    model, ids = sample_model(sample), sample_tokens(sample)
    return deviation(trace(model, ids), trace_in_pieces(model, ids, [5, 1, 4, sample.seq_len - 10]))


def batch_invariance(sample: Sample) -> float:
    """A row gives the same alone and in a batch, in training and while decoding."""
    model, ids = sample_model(sample), sample_tokens(sample)
    lengths = [sample.seq_len // 2] + [1] * (sample.seq_len - sample.seq_len // 2)
    together, decoded = trace(model, ids), trace_in_pieces(model, ids, lengths)
    worst = 0.0
    for row in range(len(ids)):
        alone = ids[row : row + 1]
        worst = max(worst, deviation([t[row : row + 1] for t in together], trace(model, alone)))
        worst = max(worst, deviation([t[row : row + 1] for t in decoded], trace_in_pieces(model, alone, lengths)))
    return worst


def padding_leaks_nothing(sample: Sample) -> float:
    """Right-padded rows, prefilled in ragged passes and then decoded, give what each row gives alone.

    In the second pass a row is all padding, in the third the others have a single token.
    """
    model, ids = sample_model(sample), sample_tokens(sample)
    half = sample.seq_len // 2
    passes = torch.tensor([[half - 1, 3, 1], [2, 0, half - 3], [1, 1, 0]])  # valid tokens, [pass][row]
    steps = sample.seq_len - int(passes.sum(0).max())
    cache = model.init_cache(3, int(passes.amax(1).sum()) + steps)
    generator = torch.Generator().manual_seed(3)
    used = torch.zeros(3, dtype=torch.int64)
    got: list[list[Tensor]] = [[], [], []]
    for valid in [*passes, *[torch.ones(3, dtype=torch.int64)] * steps]:
        width = int(valid.max())
        batch = torch.randint(0, VOCAB, (3, width), generator=generator)  # pads are arbitrary tokens
        for row in range(3):
            batch[row, : valid[row]] = ids[row, used[row] : used[row] + valid[row]]
        hidden = trace(model, batch, cache=cache, lengths=None if (valid == 1).all() else valid)
        for row in range(3):
            got[row].append(torch.stack(hidden)[:, row : row + 1, : valid[row]])
        used += valid
    worst = 0.0
    for row in range(3):
        alone = trace(model, ids[row : row + 1, : used[row]])
        worst = max(worst, deviation(alone, list(torch.cat(got[row], dim=2))))
    return worst


def documents_leak_nothing(sample: Sample) -> float:
    """Documents packed into a row give what each gives in a row of its own; one of them is a single token."""
    model, ids = sample_model(sample), sample_tokens(sample)
    L = sample.seq_len
    bounds = [[0, 1, 7, L], [0, L // 2, L - 1, L], [0, L]]
    doc_ids = torch.zeros(3, L, dtype=torch.int32)
    for row, starts in enumerate(bounds):
        for start in starts[1:-1]:
            doc_ids[row, start:] += 1
    packed = trace(model, ids, doc_ids=doc_ids)
    worst = 0.0
    for row, starts in enumerate(bounds):
        for start, end in zip(starts[:-1], starts[1:]):
            alone = trace(model, ids[row : row + 1, start:end])
            worst = max(worst, deviation([t[row : row + 1, start:end] for t in packed], alone))
    return worst


def causality(sample: Sample) -> float:
    """Tokens after a position do not change what comes before it."""
    model, ids = sample_model(sample), sample_tokens(sample)
    cut = sample.seq_len // 2
    other = torch.cat([ids[:, :cut], (ids[:, cut:] + 1) % VOCAB], dim=1)
    before, after = trace(model, ids), trace(model, other)
    return deviation([t[:, :cut] for t in before], [t[:, :cut] for t in after])


def cache_accounting(sample: Sample) -> float:
    """Caches hold exactly the accounted bytes, are one per (loop, layer), and are written in place."""
    model, ids = sample_model(sample), sample_tokens(sample)
    cache = model.init_cache(3, sample.seq_len)
    dtype = model.embed.weight.dtype
    before = _addresses(cache.layers)
    trace(model, ids[:, :-1], cache=cache)
    trace(model, ids[:, -1:], cache=cache)
    if _addresses(cache.layers) != before:
        raise ValueError("a cache tensor was replaced instead of written in place, which breaks CUDA graphs")
    shapes = [(len(loop), len({id(layer) for layer in loop})) for loop in cache.layers]
    if shapes != [(2, 2)] * 3:
        raise ValueError(f"expected one cache per (loop, layer), got {shapes}")
    untouched = [name for loop in cache.layers for layer in loop for name, t in layer.items() if not t.any()]
    if untouched:
        raise ValueError(f"cache_spec declares {sorted(set(untouched))}, which the module never writes")
    return float(abs(cache.nbytes - accounting.cache_bytes(sample.config, sample.seq_len, batch=3, dtype=dtype)))


def flops_accounted(sample: Sample) -> float:
    """sequence_flops is a positive, finite number per token at any length."""
    flops = [sample.mixer.sequence_flops(sample.config.dims, length) for length in (1, 16, 4096)]
    if not all(0 < f < float("inf") for f in flops):
        raise ValueError(f"sequence_flops gives {flops} for lengths 1, 16 and 4096")
    return 0.0


def gradients_flow(sample: Sample) -> float:
    """Every parameter of the mixer gets a finite gradient, and not one of mere rounding."""
    model, ids = sample_model(sample), sample_tokens(sample)
    out = model(ids, step=LATE_STEP)
    weights = torch.randn(out.hidden.shape, generator=torch.Generator().manual_seed(2), dtype=out.hidden.dtype)
    torch.stack([(out.hidden * weights).sum(), *(aux.sum() for aux in out.aux.values())]).sum().backward()
    for name, parameter in model.blocks.named_parameters():
        largest = 0.0 if parameter.grad is None else float(parameter.grad.abs().max())
        if not TOLERANCE < largest < float("inf"):
            raise ValueError(f"parameter {name} has a largest gradient of {largest:.1e}")
    return 0.0


CHECKS: dict[str, Callable[[Sample], float]] = {
    check.__name__: check
    for check in (
        config_round_trip,
        causality,
        gradients_flow,
        decode_matches_forward,
        chunked_prefill,
        batch_invariance,
        padding_leaks_nothing,
        documents_leak_nothing,
        cache_accounting,
        flops_accounted,
    )
}


def sample_model(sample: Sample, seed: int = 0) -> LoopedLM:
    """A small fp64 model whose zero-initialised parameters (rho, gates) are drawn too, so that they take part."""
    model = build(sample.config, seed=seed).double()
    for block in model.blocks:
        assert isinstance(block, Block)
        for module in block.mixers.values():
            module.register_forward_hook(check_output)
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for parameter in model.parameters():
            if not parameter.any():
                parameter.copy_(0.3 * torch.randn(parameter.shape, generator=generator, dtype=parameter.dtype))
    return model


def check_output(module: Module, args: tuple[Any, ...], output: Any) -> None:
    """A forward hook. Raises TypeError unless a mixer returned (output (B, L, D), auxiliary loss (B,), () or None)."""
    x = args[0]
    returns = f"{type(module).__name__}.forward must return (output (B, L, D), auxiliary loss or None)"
    if not isinstance(output, tuple) or len(output) != 2:
        raise TypeError(f"{returns}, not a {type(output).__name__}")
    y, aux = output
    if not isinstance(y, Tensor) or y.shape != x.shape:
        raise TypeError(f"{returns}; its output is {_kind(y)} where its input is {_kind(x)}")
    if aux is not None and (not isinstance(aux, Tensor) or aux.shape not in ((), x.shape[:1])):
        raise TypeError(f"{returns}; the loss is a tensor, of each row (B,) or one of all, not {_kind(aux)}")


def _kind(value: Any) -> str:
    return f"{tuple(value.shape)}" if isinstance(value, Tensor) else f"a {type(value).__name__}"


def sample_tokens(sample: Sample) -> Tensor:
    """(3, seq_len) random tokens."""
    return torch.randint(0, VOCAB, (3, sample.seq_len), generator=torch.Generator().manual_seed(1))


@torch.no_grad()
def trace(model: LoopedLM, ids: Tensor, **kwargs: Any) -> list[Tensor]:
    """The output (B, L, D) of every (loop, layer) of one pass, loop-major."""
    outputs: list[Tensor] = []
    model(ids, record=lambda loop, layer, block, spec, seq, h_in, h_out: outputs.append(h_out), **kwargs)
    return outputs


def trace_in_pieces(model: LoopedLM, ids: Tensor, lengths: list[int]) -> list[Tensor]:
    """`trace` of the same tokens fed through a cache in consecutive pieces of the given lengths."""
    cache = model.init_cache(len(ids), ids.shape[1])
    pieces = [trace(model, piece, cache=cache) for piece in ids.split(lengths, dim=1)]
    return [torch.cat(outputs, dim=1) for outputs in zip(*pieces)]


def deviation(expected: list[Tensor], got: list[Tensor]) -> float:
    """Largest absolute difference over all (loop, layer); NaN counts as infinite."""
    worst = torch.stack([(a - b).abs().max() for a, b in zip(expected, got, strict=True)]).max().item()
    return float("inf") if worst != worst else worst


def _addresses(layers: list[list[dict[str, Tensor]]]) -> list[int]:
    return [t.data_ptr() for loop in layers for layer in loop for t in layer.values()]
