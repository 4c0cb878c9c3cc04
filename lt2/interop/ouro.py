"""Ouro checkpoints (Zhu et al. 2025) to a LoopedLM and back, with exactly their keys, dtypes and bytes.

An Ouro folder is config.json and safetensors, one file or shards with an index. Ouro loops full attention with sandwich
norms, applies `model.norm` after every loop, has no loop residual, and carries an exit gate. With a threshold below 1
its released code still runs every loop for every token and picks a state afterwards; here a token stops where it exits
(lt2.halting), so later tokens see it frozen.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import torch

from lt2.config import ConfigError, ExitGate, ModelConfig, UniformLayout
from lt2.interop.reading import model_config, read_config, read_model, stored_key
from lt2.interop.rope import rope_from, rope_to
from lt2.interop.shards import write_safetensors
from lt2.mixer_configs import FullConfig
from lt2.model import LoopedLM


def config_from_ouro(ouro: dict[str, Any]) -> ModelConfig:
    """Our config of an Ouro config.json.

    Raises:
        ConfigError: another architecture's config, or what `model_config` and `rope_from` raise.
    """
    if (kind := ouro.get("model_type", "ouro")) != "ouro":
        raise ConfigError(f"the config is of a model of type {kind!r}, not 'ouro'; give an Ouro checkpoint")
    return model_config(
        ouro,
        "Ouro",
        attention={},
        n_loops=ouro.get("total_ut_steps", 4),
        norm_each_loop=True,
        sandwich_norm=True,
        halting={"type": "exit_gate", "threshold": ouro.get("early_exit_threshold", 1.0)},
        max_seq_len=ouro.get("max_position_embeddings", 65_536),
        **rope_from(ouro, default_theta=1e6),
    )


def config_to_ouro(config: ModelConfig) -> dict[str, Any]:
    """The config.json of a model that Ouro's architecture can express.

    Raises:
        ConfigError: naming what this model has that Ouro has not.
    """
    mixer = config.layout.mixer if isinstance(config.layout, UniformLayout) else None
    full = mixer if isinstance(mixer, FullConfig) else None
    needs = {
        "a uniform layout of full attention": full is not None,
        "norm_each_loop": config.norm_each_loop,
        "sandwich_norm": config.sandwich_norm,
        "loop_residual off": not config.loop_residual,
        "an exit gate": isinstance(config.halting, ExitGate),
    }
    plain = full is not None and full.rope and full.gate is None and full.bias is None and not full.qk_norm
    needs["attention with rotary positions, no output gate, no biases and no q/k norm"] = plain
    missing = [name for name, met in needs.items() if not met]
    if missing or full is None or not isinstance(config.halting, ExitGate):
        raise ConfigError(f"not an Ouro architecture, which needs {'; '.join(missing)}")
    heads, kv_heads, head_dim = full.heads(config.dims)
    return {
        "architectures": ["OuroForCausalLM"],
        "model_type": "ouro",
        "vocab_size": config.vocab_size,
        "hidden_size": config.dim,
        "intermediate_size": config.ffn_dim,
        "num_hidden_layers": config.n_layers,
        "num_attention_heads": heads,
        "num_key_value_heads": kv_heads,
        "head_dim": head_dim,
        "hidden_act": "silu",
        "max_position_embeddings": config.max_seq_len,
        "rms_norm_eps": config.norm_eps,
        **rope_to(config),
        "tie_word_embeddings": config.tie_embeddings,
        "total_ut_steps": config.n_loops,
        "early_exit_threshold": config.halting.threshold,
        "bos_token_id": 0,
        "eos_token_id": 0,
    }


def import_ouro(folder: str | Path, *, dtype: torch.dtype | None = None, device: str = "cpu") -> LoopedLM:
    """The model in an Ouro folder, in eval mode, in its stored dtype unless another is asked for.

    Raises:
        ConfigError: no config or weights there, or keys or shapes that are not Ouro's, each named.
    """
    config = config_from_ouro(read_config(folder))
    return read_model(config, folder, dtype=dtype, device=device)


def export_ouro(
    model: LoopedLM, folder: str | Path, *, config: dict[str, Any] | None = None, max_shard_bytes: int = 5 * 10**9
) -> None:
    """Write model as an Ouro folder; an import of it gives the same tensors.

    config: entries to keep from the checkpoint's original config.json (auto_map, token ids); ours win where both speak.
    """
    folder = Path(folder)
    described = {**(config or {}), **config_to_ouro(model.config)}
    if config is not None:
        described.update({key: config[key] for key in ("bos_token_id", "eos_token_id") if key in config})
        if config.get("rope_parameters"):
            described["rope_parameters"] = {"rope_type": "default"} | (described["rope_scaling"] or {})
            described["rope_parameters"]["rope_theta"] = model.config.rope_theta
    weights = {stored_key(name): parameter.detach().cpu() for name, parameter in model.named_parameters()}
    described["torch_dtype"] = str(model.embed.weight.dtype).removeprefix("torch.")
    folder.mkdir(parents=True, exist_ok=True)
    write_safetensors(weights, folder, max_shard_bytes=max_shard_bytes)
    (folder / "config.json").write_text(json.dumps(described, indent=2, sort_keys=True) + "\n")
