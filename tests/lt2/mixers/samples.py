"""Small configs of every shipped mixer, for the tests that run over all of them."""

from __future__ import annotations

from typing import Any

from lt2.analysis.parity import Sample
from lt2.config import MixerConfig, mixer_types

# Fields that fit each mixer to dim 32, 2 heads and 24 tokens; one entry per variant worth a test of its own.
FIELDS: dict[str, list[dict[str, Any]]] = {
    "full": [
        {},
        {"num_heads": 4, "num_kv_heads": 2, "qk_norm": True, "gate": "elementwise"},
        {"gate": "headwise"},
        {"bias": "qkvo"},
    ],
    "window": [
        {"window": 7},
        {"window": 2, "bias": "qkv"},
        {"window": 6, "num_kv_heads": 1, "gate": "headwise", "rope": False},
    ],
    "la": [{}, {"normalize": True}, {"feature_map": "identity", "expand_v": 1.5}],
    "retnet": [{}],
    "mamba2": [{"head_dim": 16, "d_state": 12}],
    "gla": [{}],
    "hgrn2": [{}, {"num_heads": 4}],
    "deltanet": [{}, {"use_gate": True, "allow_neg_eigval": True, "conv_size": 0}],
    "gdn": [{}, {"expand_v": 2.0, "allow_neg_eigval": True, "head_dim": 12}, {"conv_size": 0, "use_gate": False}],
    "kda": [{}, {"expand_v": 0.5, "allow_neg_eigval": True}],
    "nsa": [{"backend": "torch", "num_heads": 4, "num_kv_heads": 2, "block_size": 4, "num_blocks": 4, "window": 5}],
    "dsa": [{"top_k": 6, "index_heads": 2, "index_dim": 8, "index_rope_dim": 4, "num_kv_heads": 1, "bias": "qkvo"}],
    "mla": [{"kv_rank": 12, "rope_head_dim": 4}, {"kv_rank": 12, "q_rank": 10, "rope_head_dim": 4, "gate": "headwise"}],
}


def shipped_types() -> list[str]:
    """Types of the mixers that come with lt2, whatever a test may have registered besides."""
    return sorted(name for name, cls in mixer_types().items() if cls.__module__.startswith("lt2."))


def config(name: str, variant: int = 0) -> MixerConfig:
    return mixer_types()[name](**FIELDS[name][variant])


def samples() -> dict[str, Sample]:
    """Test id -> sample, every variant of every type."""
    return {
        f"{name}{variant or ''}": Sample(config(name, variant))
        for name, variants in FIELDS.items()
        for variant in range(len(variants))
    }
