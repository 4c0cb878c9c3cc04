"""Time, memory and cache of whole mixer layers at the user's own shape: what would a mixer cost, and from where on?

Shapes: B batch, L tokens, D width.
"""

from __future__ import annotations

import math
import statistics
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import torch
from pydantic import ValidationError
from torch import Tensor

from lt2.analysis.accounting import cache_bytes
from lt2.analysis.timing import repeat_seconds
from lt2.config import ConfigError, ModelConfig, UniformLayout
from lt2.explain import explain
from lt2.model import LoopedLM, build

REPEATS, DECODE_STEPS = 3, 8


def bench_layers(
    mixers: Sequence[dict[str, Any]],
    *,
    dim: int,
    num_heads: int,
    seq_lens: Sequence[int],
    batch: int = 1,
    device: str = "cpu",
    dtype: torch.dtype = torch.float32,
) -> Iterator[dict[str, Any]]:
    """One row per (mixer, seq_len), as each is measured.

    `train_ms` is a forward and backward of the layer, projections included; `saved_bytes` what it keeps for backward;
    `peak_bytes` the allocator's peak above the start (CUDA only); `decode_ms` one token after seq_len cached ones;
    `cache_bytes` that layer's cache. Times are medians of REPEATS after one warm-up. Out of memory is a result.

    Raises:
        ConfigError: a mixer that cannot be built at this shape, before any is measured.
    """
    points = [(fields, seq_len) for fields in mixers for seq_len in seq_lens]
    configs = [one_layer(fields, dim, num_heads, seq_len + 2 * DECODE_STEPS) for fields, seq_len in points]
    for (fields, seq_len), config in zip(points, configs):
        model = build(config).to(device=device, dtype=dtype)
        row = {"mixer": name(fields), "seq_len": seq_len, "batch": batch}
        try:
            yield row | measure(model, batch, seq_len)
        except torch.OutOfMemoryError:
            torch.cuda.empty_cache()
            yield row | {"out_of_memory": True}


def name(fields: dict[str, Any]) -> str:
    """ "gdn", or "window(window=256)" when fields are set."""
    rest = ", ".join(f"{key}={value}" for key, value in fields.items() if key not in ("type", "source"))
    return fields["type"] + (f"({rest})" if rest else "")


def one_layer(fields: dict[str, Any], dim: int, num_heads: int, max_seq_len: int) -> ModelConfig:
    try:
        return ModelConfig(
            vocab_size=8,
            dim=dim,
            num_heads=num_heads,
            n_layers=1,
            n_loops=1,
            ffn_hidden=8,
            layout=UniformLayout(mixer=fields),  # type: ignore[arg-type]
            max_seq_len=max_seq_len,
        )
    except ValidationError as error:
        raise ConfigError(explain(error, name(fields))) from error


def measure(model: LoopedLM, batch: int, seq_len: int) -> dict[str, Any]:
    block: Any = model.blocks[0]
    spec = model.schedule[0][0]
    mixer = block.mixers[spec.weights]
    weight = model.embed.weight
    device, dtype = weight.device, weight.dtype
    generator = torch.Generator().manual_seed(0)
    x = torch.randn(batch, seq_len, model.config.dim, generator=generator).to(device, dtype).requires_grad_()
    out = torch.randn(batch, seq_len, model.config.dim, generator=generator).to(device, dtype)
    ids = torch.zeros(batch, seq_len, dtype=torch.int64, device=device)
    seq = model.sequence_info(ids, None, None, None)
    saved: set[tuple[int, int]] = set()

    def keep(tensor: Tensor) -> Tensor:
        storage = tensor.untyped_storage()
        saved.add((storage.data_ptr(), storage.nbytes()))
        return tensor

    def train() -> None:
        y, aux = mixer(x, spec, seq, None)
        loss = (y * out).sum()
        (loss if aux is None else loss + aux.mean()).backward()

    before = peak(device, reset=True)
    with torch.autograd.graph.saved_tensors_hooks(keep, lambda tensor: tensor):
        train()
    weights = {p.untyped_storage().data_ptr() for p in model.parameters()} | {x.untyped_storage().data_ptr()}
    train_ms = median_ms(train, device)
    after = peak(device, reset=False)
    return {
        "train_ms": train_ms,
        "us_per_token": 1e3 * train_ms / (batch * seq_len),
        "saved_bytes": sum(size for at, size in saved if at not in weights),
        "peak_bytes": None if before is None or after is None else after - before,
        "decode_ms": decode_ms(model, batch, seq_len),
        "cache_bytes": cache_bytes(model.config, seq_len, batch=batch, dtype=dtype),
    }


@torch.inference_mode()
def decode_ms(model: LoopedLM, batch: int, seq_len: int) -> float:
    """Milliseconds per token of the mixer alone, its cache holding seq_len tokens."""
    spec = model.schedule[0][0]
    block: Any = model.blocks[0]
    mixer = block.mixers[spec.weights]
    cache = model.init_cache(batch, seq_len + DECODE_STEPS)
    weight = model.embed.weight
    x = torch.randn(batch, 1, model.config.dim, device=weight.device, dtype=weight.dtype)
    ids = torch.zeros(batch, 1, dtype=torch.int64, device=weight.device)

    def decode() -> None:
        cache.rewind(seq_len)
        for _ in range(DECODE_STEPS):
            mixer(x, spec, model.sequence_info(ids, None, None, cache), cache.layers[0][0])
            cache.advance(None, 1)

    return median_ms(decode, weight.device) / DECODE_STEPS


def median_ms(work: Callable[[], None], device: torch.device) -> float:
    return 1e3 * statistics.median(repeat_seconds(work, device, warmups=1, repeats=REPEATS))


def peak(device: torch.device, *, reset: bool) -> int | None:
    """The CUDA allocator's peak so far, or what is allocated now after a reset; None on a CPU."""
    if device.type != "cuda":
        return None
    if reset:
        torch.cuda.reset_peak_memory_stats(device)
        return torch.cuda.memory_allocated(device)
    return torch.cuda.max_memory_allocated(device)


def crossover(rows: Sequence[dict[str, Any]], mixer: str) -> float | None:
    """Length from which `mixer` trains faster than full attention in all measured rows, interpolated on log-log axes.

    The shortest measured length when it is faster from the start; None when it never is.
    """
    times = {(row["mixer"], row["seq_len"]): row["train_ms"] for row in rows if "train_ms" in row}
    lengths = sorted({length for name, length in times if name == mixer and ("full", length) in times})
    gaps = [(length, math.log(times[mixer, length] / times["full", length])) for length in lengths]
    if not gaps or gaps[-1][1] >= 0:
        return None
    last_slower = max((index for index, (_, gap) in enumerate(gaps) if gap >= 0), default=None)
    if last_slower is None:
        return float(gaps[0][0])
    (left, high), (right, low) = gaps[last_slower], gaps[last_slower + 1]
    return math.exp(math.log(left) + (math.log(right) - math.log(left)) * high / (high - low))
