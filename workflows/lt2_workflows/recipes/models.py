"""The architectures of the paper's main table, at 0.6B and 1.3B, as model configs.

The paper gives width, heads, loops and window, and layer counts of the full-attention and hybrid stacks; it says
neither whether embeddings are tied nor how deep each pure mixer's stack is. The readings taken, with the parameter
counts that follow in docs/models.md:

- 0.6B has separate embedding and head (tied, it would be 0.45B); 1.3B is tied (separate, it would be 1.55B).
- Full attention has 25 layers at 0.6B and 20 at 1.3B; hybrids have 17 + 4 and 16 + 4.
- A stack of one other mixer has the depth whose parameter count is nearest to full attention's.
- Delta mixers use expand_v 1 and head_dim d/16, the shapes that the fast kernels take.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from lt2.config import ConfigError, HybridLayout, MixerConfig, ModelConfig, UniformLayout
from lt2.mixer_configs import (
    DeltaNetConfig,
    DSAConfig,
    FullConfig,
    GatedDeltaNetConfig,
    HGRN2Config,
    KimiDeltaConfig,
    Mamba2Config,
    NSAConfig,
    RetNetConfig,
    WindowConfig,
)

Scale = Literal["0.6b", "1.3b"]

VOCAB_SIZE = 128_256  # Llama 3's tokenizer


@dataclass(frozen=True)
class ScaleSpec:
    """What all rows of one scale share; `full_layers` and `hybrid_layers` are the paper's."""

    dim: int
    full_layers: int
    hybrid_layers: int
    window: int
    tie_embeddings: bool


SCALES: dict[Scale, ScaleSpec] = {
    "0.6b": ScaleSpec(dim=1024, full_layers=25, hybrid_layers=21, window=256, tie_embeddings=False),
    "1.3b": ScaleSpec(dim=2048, full_layers=20, hybrid_layers=20, window=2048, tie_embeddings=True),
}

DEPTHS: dict[Scale, dict[str, int]] = {
    "0.6b": {"retnet": 19, "hgrn2": 25, "mamba2": 21, "deltanet": 25, "gdn": 23, "kda": 24, "window": 25, "nsa": 29,
             "dsa": 24},
    "1.3b": {"retnet": 15, "hgrn2": 20, "mamba2": 17, "deltanet": 20, "gdn": 18, "kda": 20, "window": 20, "nsa": 24,
             "dsa": 20},
}  # fmt: skip
"""Layers of the pure stacks, by mixer type."""


@dataclass(frozen=True)
class Row:
    """One line of the main table. `mixers` is (mixer,) or, for a 1:4 hybrid, (attention, mixer), by config type.

    `scales` are those at which the paper reports it; it can be built at both.
    """

    title: str
    mixers: tuple[str] | tuple[str, str]
    n_loops: int = 4
    scales: tuple[Scale, ...] = ("0.6b", "1.3b")


ROWS: dict[str, Row] = {
    "transformer": Row("Transformer", ("full",), n_loops=1),
    "looped-transformer": Row("Looped Transformer", ("full",)),
    "retnet": Row("Looped RetNet", ("retnet",), scales=("0.6b",)),
    "hgrn2": Row("Looped HGRN2", ("hgrn2",), scales=("0.6b",)),
    "mamba2": Row("Looped Mamba2", ("mamba2",)),
    "deltanet": Row("Looped DeltaNet", ("deltanet",), scales=("0.6b",)),
    "gdn": Row("Looped GDN", ("gdn",)),
    "kda": Row("Looped KDA", ("kda",)),
    "window": Row("Looped Window", ("window",)),
    "nsa": Row("Looped NSA", ("nsa",)),
    "dsa": Row("Looped DSA", ("dsa",)),
    "full+window": Row("Looped Hybrid (Full+Window)", ("full", "window")),
    "full+dsa": Row("Looped Hybrid (Full+DSA)", ("full", "dsa")),
    "full+gdn": Row("Looped Hybrid (Full+GDN)", ("full", "gdn")),
    "gdn+dsa": Row("Looped Hybrid (GDN+DSA)", ("dsa", "gdn")),
}


def paper_model(row: str, scale: Scale, *, seq_len: int = 4096) -> ModelConfig:
    """The model of one row of the main table (see ROWS), for training at seq_len.

    Raises:
        ConfigError: an unknown row or scale.
    """
    if row not in ROWS:
        raise ConfigError(f"unknown row {row!r} of the main table; choose one of {', '.join(ROWS)}")
    if scale not in SCALES:
        raise ConfigError(f"unknown scale {scale!r}; choose one of {', '.join(SCALES)}")
    spec, entry = SCALES[scale], ROWS[row]
    mixers = [mixer(name, spec) for name in entry.mixers]
    if len(mixers) == 2:
        layout, n_layers = HybridLayout(attention=mixers[0], mixer=mixers[1], ratio="1:4"), spec.hybrid_layers
    else:
        layout, n_layers = UniformLayout(mixer=mixers[0]), DEPTHS[scale].get(entry.mixers[0], spec.full_layers)
    return ModelConfig(
        vocab_size=VOCAB_SIZE,
        dim=spec.dim,
        n_layers=n_layers,
        n_loops=entry.n_loops,
        num_heads=16,
        layout=layout,
        rope_theta=10_000.0,
        tie_embeddings=spec.tie_embeddings,
        loop_residual=entry.n_loops > 1,
        max_seq_len=seq_len,
    )


def mixer(name: str, spec: ScaleSpec) -> MixerConfig:
    """A mixer of the main table at one scale."""
    if name == "window":
        return WindowConfig(window=spec.window)
    return {
        "full": FullConfig,
        "retnet": RetNetConfig,
        "hgrn2": HGRN2Config,
        "mamba2": Mamba2Config,
        "deltanet": DeltaNetConfig,
        "gdn": GatedDeltaNetConfig,
        "kda": KimiDeltaConfig,
        "nsa": NSAConfig,
        "dsa": DSAConfig,
    }[name]()
