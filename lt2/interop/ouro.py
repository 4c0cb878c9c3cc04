"""Ouro checkpoints (Zhu et al. 2025) to a LoopedLM and back, with exactly their keys, dtypes and bytes.

An Ouro folder is config.json and safetensors, one file or shards with an index. Ouro loops full attention with sandwich
norms, applies `model.norm` after every loop, has no loop residual, and carries an exit gate. With a threshold below 1
its released code still runs every loop for every token and picks a state afterwards; here a token stops where it exits
(lt2.halting), so later tokens see it frozen.
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch
from safetensors import safe_open
from torch import Tensor

from lt2.config import ConfigError, ExitGate, ModelConfig, UniformLayout
from lt2.interop.shards import write_safetensors
from lt2.mixer_configs import FullConfig
from lt2.model import LoopedLM

_TOP = {
    "embed.weight": "model.embed_tokens.weight",
    "norm.weight": "model.norm.weight",
    "halt.weight": "model.early_exit_gate.weight",
    "halt.bias": "model.early_exit_gate.bias",
    "head.weight": "lm_head.weight",
}
_BLOCK = {
    "mixer_norm": "input_layernorm",
    "mixer_post_norm": "input_layernorm_2",
    "ffn_norm": "post_attention_layernorm",
    "ffn_post_norm": "post_attention_layernorm_2",
    **{f"mixers.softmax.{p}_proj": f"self_attn.{p}_proj" for p in "qkvo"},
    **{f"ffn.{p}_proj": f"mlp.{p}_proj" for p in ("gate", "up", "down")},
}

_SIZES = ("vocab_size", "hidden_size", "intermediate_size", "num_hidden_layers", "num_attention_heads")


def ouro_key(name: str) -> str:
    """The key in an Ouro checkpoint of one of our parameters, e.g. of blocks.3.ffn.up_proj.weight."""
    if name in _TOP:
        return _TOP[name]
    _, layer, rest = name.split(".", 2)
    module, _, kind = rest.rpartition(".")
    return f"model.layers.{layer}.{_BLOCK[module]}.{kind}"


def read_config(folder: str | Path) -> dict[str, Any]:
    """The config.json of an Ouro folder. Raises ConfigError where there is none, or no JSON in it."""
    file = Path(folder, "config.json")
    if not file.is_file():
        raise ConfigError(f"{folder} has no config.json; give the folder of an Ouro checkpoint")
    try:
        return json.loads(file.read_text())
    except ValueError as error:
        raise ConfigError(f"{file} is not JSON ({error}); download it again") from None


def config_from_ouro(ouro: dict[str, Any]) -> ModelConfig:
    """Our config of an Ouro config.json.

    Raises:
        ConfigError: another architecture's config, one that lacks sizes, or a setting whose computation we do not have
            (sliding windows, rope scaling, another activation).
    """
    if (kind := ouro.get("model_type", "ouro")) != "ouro":
        raise ConfigError(f"the config is of a model of type {kind!r}, not 'ouro'; give an Ouro checkpoint")
    if lacking := [name for name in _SIZES if name not in ouro]:
        raise ConfigError(f"Ouro config has no {', '.join(lacking)}; give an Ouro checkpoint, or download it again")
    unsupported = {
        "hidden_act": ouro.get("hidden_act", "silu") != "silu",
        "use_sliding_window": ouro.get("use_sliding_window", False),
        "layer_types": bool(set(ouro.get("layer_types") or ()) - {"full_attention"}),
        "attention_bias": ouro.get("attention_bias", False),
        "rope_scaling": ouro.get("rope_scaling") is not None,
        "rope_parameters": (ouro.get("rope_parameters") or {}).get("rope_type", "default") != "default",
    }
    wrong = [f"{name}={ouro.get(name)!r}" for name, bad in unsupported.items() if bad]
    if wrong:
        raise ConfigError(f"Ouro config has {', '.join(wrong)}; only plain full attention with SiLU can be imported")
    heads = ouro["num_attention_heads"]
    attention = {
        "type": "full",
        "num_kv_heads": ouro.get("num_key_value_heads", heads),
        "head_dim": ouro.get("head_dim") or ouro["hidden_size"] // heads,
    }
    places = {"rope_theta": 1e6, **ouro, **(ouro.get("rope_parameters") or {})}  # newer configs keep it in the latter
    return ModelConfig.model_validate(
        {
            "vocab_size": ouro["vocab_size"],
            "dim": ouro["hidden_size"],
            "n_layers": ouro["num_hidden_layers"],
            "n_loops": ouro.get("total_ut_steps", 4),
            "num_heads": heads,
            "layout": {"type": "uniform", "mixer": attention},
            "ffn_hidden": ouro["intermediate_size"],
            "rope_theta": places["rope_theta"],
            "norm_eps": ouro.get("rms_norm_eps", 1e-6),
            "tie_embeddings": ouro.get("tie_word_embeddings", False),
            "loop_residual": False,
            "norm_each_loop": True,
            "sandwich_norm": True,
            "halting": {"type": "exit_gate", "threshold": ouro.get("early_exit_threshold", 1.0)},
            "max_seq_len": ouro.get("max_position_embeddings", 65_536),
        }
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
    plain = full is not None and full.rope and full.gate is None and not full.qk_norm
    needs["attention with rotary positions, no output gate and no q/k norm"] = plain
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
        "rope_theta": config.rope_theta,
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
    folder = Path(folder)
    config = config_from_ouro(read_config(folder))
    with torch.device("meta"):
        model = LoopedLM(config)
    names = {ouro_key(name): name for name, _ in model.named_parameters()}
    weights: dict[str, Tensor] = {}
    for key, tensor in stored_tensors(folder):
        if key == "lm_head.weight" and config.tie_embeddings:
            continue
        if key not in names:
            raise ConfigError(f"{folder}: {key!r} is not a key of an Ouro checkpoint with this config")
        weights[names[key]] = tensor.to(device=device, dtype=dtype)
    missing = sorted(set(names) - {ouro_key(name) for name in weights})
    if missing:
        raise ConfigError(f"{folder}: {len(missing)} keys are missing, the first {missing[0]!r}; download it again")
    for name, parameter in model.named_parameters():
        if parameter.shape != weights[name].shape:
            shapes = f"{tuple(weights[name].shape)}, and the config asks for {tuple(parameter.shape)}"
            raise ConfigError(f"{folder}: {ouro_key(name)} has shape {shapes}")
    model.load_state_dict(weights, assign=True)
    return model.eval()


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
        if rope := config.get("rope_parameters"):
            described["rope_parameters"] = {**rope, "rope_theta": model.config.rope_theta}
    weights = {ouro_key(name): parameter.detach().cpu() for name, parameter in model.named_parameters()}
    described["torch_dtype"] = str(model.embed.weight.dtype).removeprefix("torch.")
    folder.mkdir(parents=True, exist_ok=True)
    write_safetensors(weights, folder, max_shard_bytes=max_shard_bytes)
    (folder / "config.json").write_text(json.dumps(described, indent=2, sort_keys=True) + "\n")


def stored_tensors(folder: Path) -> Iterator[tuple[str, Tensor]]:
    """Every tensor of a folder's safetensors, one at a time; shards are found through their index."""
    single, index = folder / "model.safetensors", folder / "model.safetensors.index.json"
    if index.is_file():
        files = sorted({folder / name for name in json.loads(index.read_text())["weight_map"].values()})
    elif single.is_file():
        files = [single]
    else:
        raise ConfigError(f"{folder} has neither model.safetensors nor model.safetensors.index.json")
    for file in files:
        if not file.is_file():
            raise ConfigError(f"{folder}: the index names {file.name}, which is not there; download it again")
        with safe_open(file, framework="pt") as tensors:
            for key in tensors.keys():  # noqa: SIM118  not a mapping
                yield key, tensors.get_tensor(key)
