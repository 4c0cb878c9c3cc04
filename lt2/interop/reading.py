"""Reading models that others wrote: a folder with config.json and safetensors, one file or shards with an index."""

from __future__ import annotations

import json
from collections.abc import Collection, Iterator
from pathlib import Path
from typing import Any

import torch
from pydantic import ValidationError
from safetensors import SafetensorError, safe_open
from torch import Tensor

from lt2.config import ConfigError, ModelConfig
from lt2.explain import explain
from lt2.model import LoopedLM

_TOP = {
    "embed.weight": "model.embed_tokens.weight",
    "norm.weight": "model.norm.weight",
    "head.weight": "lm_head.weight",
    "halt.weight": "model.early_exit_gate.weight",
    "halt.bias": "model.early_exit_gate.bias",
}
_BLOCK = {
    "mixer_norm": "input_layernorm",
    "mixer_post_norm": "input_layernorm_2",
    "ffn_norm": "post_attention_layernorm",
    "ffn_post_norm": "post_attention_layernorm_2",
    **{f"mixers.softmax.{name}": f"self_attn.{name}" for name in ("q_norm", "k_norm")},
    **{f"mixers.softmax.{p}_proj": f"self_attn.{p}_proj" for p in "qkvo"},
    **{f"ffn.{p}_proj": f"mlp.{p}_proj" for p in ("gate", "up", "down")},
}
SIZES = ("vocab_size", "hidden_size", "intermediate_size", "num_hidden_layers", "num_attention_heads")


def stored_key(name: str) -> str:
    """The key in a checkpoint of the Llama kind of one of our parameters, e.g. of blocks.3.ffn.up_proj.weight. What one
    family has and another has not, such as Ouro's sandwich norms and exit gate, is named by that one."""
    if name in _TOP:
        return _TOP[name]
    _, layer, rest = name.split(".", 2)
    module, _, kind = rest.rpartition(".")
    return f"model.layers.{layer}.{_BLOCK[module]}.{kind}"


def read_config(folder: str | Path) -> dict[str, Any]:
    """The config.json of a model's folder. Raises ConfigError where there is none, or no JSON in it."""
    if str(folder).startswith("s3:/"):
        raise ConfigError(f"{folder}: models are imported from folders of this machine; download it first")
    file = Path(folder, "config.json").expanduser()
    if not file.is_file():
        raise ConfigError(f"{folder} has no config.json; give the folder of a model in Hugging Face's format")
    return _json_object(file)


def check_sizes(stored: dict[str, Any], kind: str, *optional: str) -> None:
    """Raise ConfigError unless SIZES are whole numbers, and so are the `optional` settings that are there."""
    lacking = [name for name in SIZES if stored.get(name) is None]
    if lacking:
        raise ConfigError(f"{kind} config has no {', '.join(lacking)}; give another checkpoint, or download it again")
    given = [name for name in (*SIZES, *optional) if stored.get(name) is not None]
    if wrong := [f"{name}={stored[name]!r}" for name in given if type(stored[name]) is not int]:
        raise ConfigError(
            f"{kind} config has {', '.join(wrong)}, where a whole number belongs; correct its config.json"
        )


def model_config(
    stored: dict[str, Any],
    kind: str,
    *,
    attention: dict[str, Any],
    window: int | None = None,
    full_layers: Collection[int] = (),
    read: Collection[str] = (),
    **ours: Any,
) -> ModelConfig:
    """Our config of a config.json of the Llama kind: its sizes, its attention, and `ours`.

    attention: what it has in every layer. window: how many tokens it sees, outside `full_layers`. read: settings that
    the caller has understood, of those that are refused otherwise.

    Raises:
        ConfigError: sizes that are missing or impossible, or a setting whose computation we do not have.
    """
    check_sizes(stored, kind)
    unsupported = {
        "hidden_act": stored.get("hidden_act", "silu") != "silu",
        "use_sliding_window": stored.get("use_sliding_window", False),
        "layer_types": bool(set(stored.get("layer_types") or ()) - {"full_attention"}),
        "attention_bias": stored.get("attention_bias", False),
        "mlp_bias": stored.get("mlp_bias", False),
    }
    wrong = [f"{name}={stored.get(name)!r}" for name, bad in unsupported.items() if bad and name not in read]
    if wrong:
        raise ConfigError(f"{kind} config has {', '.join(wrong)}, which cannot be imported")
    heads = stored["num_attention_heads"]
    full = {
        "type": "full",
        "num_kv_heads": stored.get("num_key_value_heads") or heads,
        "head_dim": stored.get("head_dim") or stored["hidden_size"] // heads,
    } | attention
    windowed = full if window is None else full | {"type": "window", "window": window}
    layout = {"type": "uniform", "mixer": windowed}
    if window is not None and full_layers:
        layout = {"type": "kept", "attention": full, "mixer": windowed, "kept": tuple(full_layers)}
    fields = {
        "vocab_size": stored["vocab_size"],
        "dim": stored["hidden_size"],
        "n_layers": stored["num_hidden_layers"],
        "num_heads": heads,
        "layout": layout,
        "ffn_hidden": stored["intermediate_size"],
        "norm_eps": stored.get("rms_norm_eps", 1e-6),
        "tie_embeddings": stored.get("tie_word_embeddings", False),
        "loop_residual": False,
    }
    try:
        return ModelConfig.model_validate(fields | ours)
    except ValidationError as error:
        raise ConfigError(explain(error, f"{kind} config")) from None


def read_model(config: ModelConfig, folder: str | Path, *, dtype: torch.dtype | None, device: str) -> LoopedLM:
    """The model of `config` with the folder's weights, in eval mode, in their dtype unless another is asked for.

    Raises:
        ConfigError: no weights there, or keys or shapes that are not the config's, each named.
    """
    folder = Path(folder).expanduser()
    with torch.device("meta"):
        model = LoopedLM(config)
    names = {stored_key(name): name for name, _ in model.named_parameters()}
    weights: dict[str, Tensor] = {}
    for stored, tensor in stored_tensors(folder):
        if stored == "lm_head.weight" and config.tie_embeddings:
            continue
        if stored.endswith("rotary_emb.inv_freq"):  # older Llama checkpoints keep this table
            continue
        if stored not in names:
            raise ConfigError(f"{folder}: {stored!r} is not a key of a checkpoint with this config")
        weights[names[stored]] = tensor.to(device=device, dtype=dtype)
    missing = sorted(set(names) - {stored_key(name) for name in weights})
    if missing:
        raise ConfigError(f"{folder}: {len(missing)} keys are missing, the first {missing[0]!r}; download it again")
    for name, parameter in model.named_parameters():
        if parameter.shape != weights[name].shape:
            shapes = f"{tuple(weights[name].shape)}, and the config asks for {tuple(parameter.shape)}"
            raise ConfigError(f"{folder}: {stored_key(name)} has shape {shapes}")
    model.load_state_dict(weights, assign=True)
    return model.eval()


def weight_files(folder: str | Path) -> list[Path]:
    """A folder's safetensors: one file, else shards by their index; of both the one file is read, as transformers does.

    Raises:
        ConfigError: neither is there, or a shard is not.
    """
    folder = Path(folder).expanduser()
    single, index = folder / "model.safetensors", folder / "model.safetensors.index.json"
    if single.is_file():
        return [single]
    if not index.is_file():
        raise ConfigError(
            f"{folder} has neither model.safetensors nor model.safetensors.index.json; download them, or, where there "
            "are .bin files alone, save the model again by transformers' save_pretrained"
        )
    names = _json_object(index).get("weight_map")
    if not isinstance(names, dict):
        raise ConfigError(f"{index} has no weight_map; download it again")
    files = sorted({folder / name for name in names.values()})
    for file in files:
        if not file.is_file():
            raise ConfigError(f"{folder}: the index names {file.name}, which is not there; download it again")
    return files


def stored_tensors(folder: Path) -> Iterator[tuple[str, Tensor]]:
    """Every tensor of a folder's safetensors, one at a time."""
    for file in weight_files(folder):
        try:
            with safe_open(file, framework="pt") as tensors:
                for key in tensors.keys():  # noqa: SIM118  not a mapping
                    yield key, tensors.get_tensor(key)
        except SafetensorError as error:
            raise ConfigError(f"{file} is damaged, or no safetensors ({error}); download it again") from None


def _json_object(file: Path) -> dict[str, Any]:
    try:
        found = json.loads(file.read_text())
    except ValueError as error:
        raise ConfigError(f"{file} is not JSON ({error}); download it again") from None
    if not isinstance(found, dict):
        raise ConfigError(f"{file} is not a JSON object; download it again")
    return found
