"""Decode caches: one set of static tensors per (loop, layer), so loops never overwrite each other's state."""

from __future__ import annotations

from dataclasses import dataclass, field

import torch
from torch import Tensor

from lt2.config import CacheSpec, Dims, MixerConfig
from lt2.layout import Schedule

LayerCache = dict[str, Tensor]


@dataclass
class Cache:
    """All state of a batch of sequences being decoded.

    Attributes:
        layers: layers[loop][layer] is that position's tensors, named and shaped by its mixer's `cache_spec`, with the
            batch in front. Mixers write them in place (static addresses, as CUDA graphs need).
        lengths: (B,) int64, tokens held per row.
        max_len: capacity in tokens per row.
        used: upper bound of `lengths` known without a device sync.
        by_position: by_position[loop][layer] names the tensors with one slot per token of the row's capacity. What a
            pass writes there beyond `lengths` is never read before it is overwritten.
    """

    layers: list[list[LayerCache]]
    lengths: Tensor
    max_len: int
    used: int = 0
    by_position: list[list[frozenset[str]]] = field(default_factory=list)

    @property
    def nbytes(self) -> int:
        """Bytes of all caches and states."""
        return sum(t.numel() * t.element_size() for loop in self.layers for layer in loop for t in layer.values())

    def advance(self, lengths: Tensor | None, n_tokens: int) -> None:
        """Count one pass of n_tokens, of which lengths (B,) were valid."""
        self.lengths += n_tokens if lengths is None else lengths
        self.used += n_tokens

    def clear(self) -> None:
        """Forget everything held, keeping the allocation."""
        for loop in self.layers:
            for layer in loop:
                for tensor in layer.values():
                    tensor.zero_()
        self.rewind(0)

    def rewind(self, n_tokens: int) -> None:
        """Set the counters back to n_tokens. Positions beyond are overwritten; recurrent states are not undone."""
        self.lengths.fill_(n_tokens)
        self.used = n_tokens

    def take(self, shorter: Cache) -> None:
        """Hold what `shorter`, a cache of the same rows and mixers with room for fewer tokens, holds."""
        for loop, its_loop in zip(self.layers, shorter.layers, strict=True):
            for layer, its_layer in zip(loop, its_loop, strict=True):
                for name, tensor in its_layer.items():
                    layer[name][tuple(map(slice, tensor.shape))] = tensor
        self.lengths, self.used = shorter.lengths.clone(), shorter.used

    def reorder(self, rows: Tensor) -> None:
        """Keep rows (B',) of the batch, in that order."""
        for loop in self.layers:
            for layer in loop:
                for name, tensor in layer.items():
                    layer[name] = tensor[rows]
        self.lengths = self.lengths[rows]


def cache_dtype(name: str, compute: torch.dtype) -> torch.dtype:
    """A cache spec's dtype: "compute" follows the model; states are fp32, or fp64 in an fp64 model."""
    if name == "compute":
        return compute
    dtype = getattr(torch, name)
    return torch.float64 if compute == torch.float64 and dtype == torch.float32 else dtype


def allocate(
    schedule: Schedule, dims: Dims, *, batch: int, max_len: int, dtype: torch.dtype, device: torch.device
) -> Cache:
    """Zeroed caches for `batch` rows of up to `max_len` tokens."""

    def tensors(spec: CacheSpec) -> LayerCache:
        return {
            name: torch.zeros(batch, *shape, dtype=cache_dtype(kind, dtype), device=device)
            for name, (shape, kind) in spec.items()
        }

    layers = [[tensors(mixer.cache_spec(dims, max_len)) for mixer in loop] for loop in schedule]
    lengths = torch.zeros(batch, dtype=torch.int64, device=device)
    by_position = [[has_slot_per_token(mixer, dims) for mixer in loop] for loop in schedule]
    return Cache(layers, lengths, max_len, by_position=by_position)


def has_slot_per_token(mixer: MixerConfig, dims: Dims) -> frozenset[str]:
    """Names of the cache tensors of which some axis grows by one slot with every token of capacity."""
    capacities = 1 << 20, 1 << 21  # beyond any window; NSA's slots come in whole blocks, mostly powers of two
    few, many = (mixer.cache_spec(dims, capacity) for capacity in capacities)
    return frozenset(
        name for name in few if any(b - a == 1 << 20 for a, b in zip(few[name][0], many[name][0], strict=True))
    )
