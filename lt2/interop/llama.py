"""Checkpoints of plain transformers of the Llama kind: Llama, Mistral, Qwen2 and Qwen3, and what else uses their
classes (SmolLM2, TinyLlama, Qwen2.5). They are looped models of one loop, which training can make of several loops, and
hybrid.
"""

from __future__ import annotations

from typing import Any

from lt2.config import ConfigError, ModelConfig
from lt2.interop.reading import check_sizes, model_config
from lt2.interop.rope import rope_from

MAX_SEQ_LEN = {"llama": 2048, "mistral": 131_072, "qwen2": 32_768, "qwen3": 32_768}
"""max_position_embeddings of a config.json that does not tell it, by model_type (as transformers takes it)."""

READ = {
    "llama": {"attention_bias"},
    "mistral": set(),
    "qwen2": {"attention_bias", "use_sliding_window", "layer_types"},
    "qwen3": {"attention_bias", "use_sliding_window", "layer_types"},
}
"""What else than sizes the classes of a model_type read; Qwen2's have biases whatever attention_bias says."""


def config_from_llama(stored: dict[str, Any]) -> ModelConfig:
    """Our config, of one loop, of the config.json of a Llama, Mistral, Qwen2 or Qwen3 model.

    Raises:
        ConfigError: what `model_config`, `rope_from` and `windows` raise.
    """
    kind = stored["model_type"]
    check_sizes(stored, kind, "max_position_embeddings", "sliding_window", "max_window_layers")
    longest = stored.get("max_position_embeddings") or MAX_SEQ_LEN[kind]
    window, full_layers = windows(stored, kind)
    if window is not None and window >= longest:
        window = None
    biases = "qkv" if kind == "qwen2" else "qkvo" if stored.get("attention_bias") else None
    return model_config(
        stored,
        kind,
        attention={"qk_norm": kind == "qwen3", "bias": biases},
        window=window,
        full_layers=full_layers,
        read=READ[kind],
        n_loops=1,
        max_seq_len=longest,
        **rope_from(stored),
    )


def windows(stored: dict[str, Any], kind: str) -> tuple[int | None, tuple[int, ...]]:
    """How many tokens the attention of a model sees, itself included, and the layers that see all; (None, ()) without
    windows. Raises ConfigError for layer_types that go neither with the layers nor with the window."""
    if kind == "mistral":  # in every layer
        return stored.get("sliding_window", 4096), ()
    if kind == "llama":
        return None, ()
    window = stored.get("sliding_window", 4096) if stored.get("use_sliding_window") else None
    types = stored.get("layer_types")
    n_layers = stored["num_hidden_layers"]
    if types is None:
        upper = stored.get("max_window_layers", 28)
        if window is not None and upper is None:
            raise ConfigError(f"{kind} config has sliding windows and max_window_layers null; say from which layer on")
        first = n_layers if window is None else upper
        types = ["full_attention" if layer < first else "sliding_attention" for layer in range(n_layers)]
    if unknown := sorted(set(types) - {"full_attention", "sliding_attention"}):
        raise ConfigError(f"{kind} config has layer_types {', '.join(unknown)}, which cannot be imported")
    if len(types) != n_layers:
        raise ConfigError(f"{kind} config has {len(types)} layer_types for {n_layers} layers; give one of each")
    if "sliding_attention" not in types:
        return None, ()
    if window is None:
        raise ConfigError(f"{kind} config has layer_types with sliding_attention and no window; set use_sliding_window")
    return window, tuple(layer for layer in range(n_layers) if types[layer] == "full_attention")
