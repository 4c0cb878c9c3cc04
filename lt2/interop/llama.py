"""Checkpoints of plain transformers of the Llama kind: Llama, Mistral and Qwen3, and what else uses their classes
(SmolLM2, TinyLlama). They are looped models of one loop, which training can make of several loops, and hybrid.
"""

from __future__ import annotations

from typing import Any

from lt2.config import ConfigError, ModelConfig
from lt2.interop.reading import model_config
from lt2.interop.rope import rope_from

MAX_SEQ_LEN = {"llama": 2048, "mistral": 131_072, "qwen3": 32_768}
"""max_position_embeddings of a config.json that does not tell it, by model_type (as transformers takes it)."""


def config_from_llama(stored: dict[str, Any]) -> ModelConfig:
    """Our config, of one loop, of the config.json of a Llama, Mistral or Qwen3 model.

    Raises:
        ConfigError: what `model_config` and `rope_from` raise; windows that are shorter than the model's rows.
    """
    kind = stored["model_type"]
    longest = stored.get("max_position_embeddings") or MAX_SEQ_LEN[kind]
    window = stored.get("sliding_window", 4096) if kind == "mistral" else None  # Mistral's default where none is told
    if window is not None and window < longest:
        raise ConfigError(f"mistral config has sliding_window={window}; only full attention can be imported")
    return model_config(
        stored,
        kind,
        attention={"qk_norm": kind == "qwen3"},
        n_loops=1,
        max_seq_len=longest,
        **rope_from(stored),
    )
