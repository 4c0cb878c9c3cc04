"""Which layers keep their attention (paper, Sec. Distilling; the set F). Importable without torch."""

from __future__ import annotations

import math
from collections.abc import Sequence

from lt2.config import ConfigError


def uniform_layers(n_layers: int, count: int) -> tuple[int, ...]:
    """`count` layers, evenly spaced, each at the end of its stretch: the interleaved pattern of hybrids.

    Raises:
        ConfigError: count is not between 0 and n_layers.
    """
    if not 0 <= count <= n_layers:
        raise ConfigError(f"{count} layers are to keep attention, of {n_layers}; give 0 to {n_layers}")
    return tuple((i + 1) * n_layers // count - 1 for i in range(count))


def best_layers(kl: Sequence[float], count: int) -> tuple[int, ...]:
    """The `count` layers whose attention alone, kept, leaves the smallest KL to the teacher; ties to the lower layer.

    Raises:
        ConfigError: count is not between 0 and the number of layers, or a KL is NaN, which has no rank.
    """
    if not 0 <= count <= len(kl):
        raise ConfigError(f"{count} layers are to keep attention, of {len(kl)}; give 0 to {len(kl)}")
    if wrong := [layer for layer, value in enumerate(kl) if math.isnan(value)]:
        raise ConfigError(
            f"the KL with layers {wrong} alone kept is NaN; check their runs, or name the layers to keep yourself"
        )
    ranked = sorted(range(len(kl)), key=lambda layer: (kl[layer], layer))
    return tuple(sorted(ranked[:count]))
