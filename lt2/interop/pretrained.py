"""Models that others trained, by the `model_type` of their config.json."""

from __future__ import annotations

from pathlib import Path

import torch

from lt2.config import ConfigError, ModelConfig
from lt2.interop.llama import config_from_llama
from lt2.interop.ouro import config_from_ouro
from lt2.interop.reading import read_config, read_model
from lt2.model import LoopedLM

FAMILIES = {
    "ouro": config_from_ouro,
    "llama": config_from_llama,
    "mistral": config_from_llama,
    "qwen2": config_from_llama,
    "qwen3": config_from_llama,
}
"""model_type -> our config of a config.json."""


def pretrained_config(folder: str | Path) -> ModelConfig:
    """Our config of the model in a folder. Raises ConfigError where there is none that we can import."""
    stored = read_config(folder)
    kind = stored.get("model_type")
    if kind not in FAMILIES:
        raise ConfigError(f"{folder} has a model of type {kind!r}; only {', '.join(FAMILIES)} can be imported")
    return FAMILIES[kind](stored)


def import_pretrained(folder: str | Path, *, dtype: torch.dtype | None = None, device: str = "cpu") -> LoopedLM:
    """The model in a folder, in eval mode, in its stored dtype unless another is asked for.

    Raises:
        ConfigError: no model there, one of another kind, or keys or shapes that are not its config's, each named.
    """
    return read_model(pretrained_config(folder), folder, dtype=dtype, device=device)
