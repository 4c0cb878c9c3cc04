"""The models the GPU parts measure: the paper's 0.6B and 1.3B widths, any depth, and tiny ones for a dry run."""

from __future__ import annotations

from typing import Any

from lt2.config import ModelConfig

FULL: dict[str, Any] = {"type": "full"}
GDN: dict[str, Any] = {"type": "gdn"}
KDA: dict[str, Any] = {"type": "kda"}
DSA: dict[str, Any] = {"type": "dsa", "warmup_steps": 0}  # sparse from the first step: warm-up is dense


def uniform(mixer: dict[str, Any]) -> dict[str, Any]:
    return {"type": "uniform", "mixer": mixer}


def hybrid(attention: dict[str, Any], mixer: dict[str, Any], ratio: str = "1:4") -> dict[str, Any]:
    return {"type": "hybrid", "attention": attention, "mixer": mixer, "ratio": ratio}


LAYOUTS = {
    "full": uniform(FULL),
    "gdn": uniform(GDN),
    "kda": uniform(KDA),
    "full+gdn": hybrid(FULL, GDN),
    "gdn+dsa": hybrid(DSA, GDN),
}


def model_config(
    name: str, size: str, *, n_layers: int, vocab_size: int = 128_256, n_loops: int = 4, max_seq_len: int = 32_768
) -> ModelConfig:
    """LAYOUTS[name] at the width of "0.6b", "1.3b" or, for a dry run, "tiny"."""
    dim, num_heads = {"0.6b": (1024, 16), "1.3b": (2048, 16), "tiny": (64, 4)}[size]
    layout: Any = LAYOUTS[name]
    if size == "0.6b" and name != "full":
        num_heads = 8  # head_dim 128, which the fused Hopper kernels need
    if size == "tiny" and name == "gdn+dsa":
        layout = hybrid({**DSA, "top_k": 8}, GDN)
    return ModelConfig(
        vocab_size=vocab_size if size != "tiny" else 512,
        dim=dim,
        num_heads=num_heads,
        n_layers=n_layers,
        n_loops=n_loops,
        layout=layout,
        tie_embeddings=True,
        max_seq_len=max_seq_len,
    )
