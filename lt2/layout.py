"""Which mixer runs at (loop, layer). Pure data: no torch, no state."""

from __future__ import annotations

import math
import random
from collections.abc import Collection, Sequence
from typing import TYPE_CHECKING, TypeVar

if TYPE_CHECKING:
    from lt2.config import HybridLayout, KeptLayout, MixerConfig, ModelConfig, RandomLayout

T = TypeVar("T")
Schedule = tuple[tuple["MixerConfig", ...], ...]
"""Indexed [loop][layer]."""


def layout(config: ModelConfig, draw: Collection[int] | None = None) -> Schedule:
    """The mixer of every (loop, layer).

    Args:
        draw: for a random layout, the layers that run attention (see `draw_layers`); without one the first draw,
            step 0, is used. For a kept layout, other layers than its own.

    Raises:
        ValueError: a hybrid ratio that leaves no attention layer, or a loop schedule whose length is
            not n_loops, or kept layers that do not exist.
    """
    spec, n_layers, n_loops = config.layout, config.n_layers, config.n_loops
    if spec.type == "uniform":
        return ((spec.mixer,) * n_layers,) * n_loops
    if spec.type == "loops":
        if len(spec.mixers) != n_loops:
            raise ValueError(f"layout.mixers has {len(spec.mixers)} entries for n_loops {n_loops}; give one per loop")
        return tuple((mixer,) * n_layers for mixer in spec.mixers)
    chosen = attention_layers(spec, n_layers) if spec.type == "hybrid" else draw
    if spec.type == "kept" and chosen is None:
        chosen = kept_layers(spec, n_layers)
    if chosen is None:
        chosen = draw_layers(spec, n_layers, step=0)  # type: ignore[arg-type]
    row = tuple(spec.attention if layer in chosen else spec.mixer for layer in range(n_layers))
    return (row,) * n_loops


def of_each_loop(trained: Sequence[T], n_loops: int) -> tuple[T, ...]:
    """What each of n_loops loops has, of what the trained ones have: later loops repeat the last one's."""
    return tuple(trained[min(loop, len(trained) - 1)] for loop in range(n_loops))


def attention_layers(spec: HybridLayout, n_layers: int) -> tuple[int, ...]:
    """Indices of the attention layers of a depth-level hybrid.

    The count is that of the interleaved pattern (each period of a+b layers ends with its a attention layers), so
    that patterns compare at one ratio. Bookend splits it over bottom and top, the odd one at the bottom.
    """
    a, b = spec.parts
    interleaved = _interleaved(a, b, n_layers)
    count = len(interleaved)
    if a > 0 and count == 0:
        raise ValueError(
            f"ratio {spec.ratio} over {n_layers} layers leaves no attention layer; use at least {b + 1} layers"
        )
    if spec.pattern == "interleave":
        return interleaved
    if spec.pattern == "front":
        return tuple(range(count))
    if spec.pattern == "back":
        return tuple(range(n_layers - count, n_layers))
    bottom = (count + 1) // 2
    return tuple(range(bottom)) + tuple(range(n_layers - (count - bottom), n_layers))


def realised_ratio(ratio: str, n_layers: int) -> str:
    """How many layers of a hybrid are attention, and what ratio that is where the depth cannot have the asked one."""
    a, b = (int(part) for part in ratio.split(":"))
    count = len(_interleaved(a, b, n_layers))
    rest = n_layers - count
    whole = math.gcd(count, rest)
    other = "" if count * b == rest * a else f" ({count // whole}:{rest // whole} for {ratio})"
    return f"{count} of {n_layers} layers{other}"


def _interleaved(a: int, b: int, n_layers: int) -> tuple[int, ...]:
    return tuple(i for i in range(n_layers) if i % (a + b) >= b)


def kept_layers(spec: KeptLayout, n_layers: int) -> tuple[int, ...]:
    wrong = sorted(layer for layer in set(spec.kept) if not 0 <= layer < n_layers)
    if wrong or len(set(spec.kept)) < len(spec.kept):
        raise ValueError(f"kept layers {list(spec.kept)}: give different ones of 0 to {n_layers - 1}")
    return spec.kept


def draw_layers(spec: RandomLayout, n_layers: int, step: int) -> tuple[int, ...]:
    """The attention layers of training step `step`: a pure function of (seed, step), so equal on all ranks."""
    count = max(1, round(spec.fraction * n_layers))
    return tuple(sorted(random.Random(f"{spec.seed}:{step}").sample(range(n_layers), count)))


def schedules(config: ModelConfig) -> list[Schedule]:
    """Schedules that between them run every mixer that a layer may run: two where layers are drawn or hold both."""
    if config.layout.type == "random" or (config.layout.type == "kept" and config.layout.both):
        return [layout(config, draw) for draw in ((), range(config.n_layers))]
    return [layout(config)]


def weights_per_layer(config: ModelConfig) -> list[list[MixerConfig]]:
    """For each layer one config per distinct set of mixer weights it needs over all loops and draws."""
    found: list[dict[str, MixerConfig]] = [{} for _ in range(config.n_layers)]
    for loop in (row for schedule in schedules(config) for row in schedule):
        for layer, spec in enumerate(loop):
            found[layer].setdefault(spec.weights, spec)
    return [list(specs.values()) for specs in found]


def loops_text(count: int, early_exit: bool | None = False, exit_threshold: float | None = None) -> str:
    """A depth in words: '1 loop', '4 loops', '4 loops, early exit', '4 loops, early exit at 0.6'."""
    at = "" if exit_threshold is None else f" at {exit_threshold}"
    return f"{count} loop" + "s" * (count != 1) + f", early exit{at}" * bool(early_exit)
