"""Plain transformers of others, imported: transformers' own classes are the reference."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import nn
from transformers import AutoModelForCausalLM, LlamaConfig, MistralConfig, PreTrainedConfig, Qwen2Config, Qwen3Config

from lt2.analysis.accounting import parameters
from lt2.config import ConfigError, LinearRope, YarnRope
from lt2.distill.student import start_from
from lt2.interop.llama import config_from_llama
from lt2.interop.pretrained import import_pretrained, pretrained_config
from lt2.interop.reading import stored_key, stored_tensors, weight_files
from lt2.interop.shards import write_safetensors
from lt2.layout import layout
from lt2.model import LoopedLM, build
from lt2.sequence import slowed
from tests.lt2.tiny import tokens

SIZES: dict[str, Any] = {
    "vocab_size": 23, "hidden_size": 16, "intermediate_size": 24, "num_hidden_layers": 3, "num_attention_heads": 4,
    "num_key_value_heads": 2, "max_position_embeddings": 128, "head_dim": 8, "rms_norm_eps": 1e-2,
}  # fmt: skip
LLAMA3 = {
    "rope_type": "llama3", "rope_theta": 500.0, "factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0,
    "original_max_position_embeddings": 32,
}  # fmt: skip
YARN = {"rope_type": "yarn", "rope_theta": 1e4, "factor": 4.0, "original_max_position_embeddings": 32}
KINDS: dict[str, PreTrainedConfig] = {
    "llama": LlamaConfig(**SIZES),
    "tied": LlamaConfig(**SIZES, tie_word_embeddings=True),
    "llama3": LlamaConfig(**SIZES, rope_parameters=LLAMA3),
    "yarn": LlamaConfig(**SIZES, rope_parameters=YARN),
    "linear": LlamaConfig(**SIZES, rope_parameters={"rope_type": "linear", "rope_theta": 1e4, "factor": 4.0}),
    "mistral": MistralConfig(**SIZES, sliding_window=None),
    "qwen3": Qwen3Config(**SIZES),
    "qwen2": Qwen2Config(**SIZES),
    "llama with biases": LlamaConfig(**SIZES, attention_bias=True),
    "qwen3 with biases": Qwen3Config(**SIZES, attention_bias=True),
    "windows": MistralConfig(**SIZES, sliding_window=7),
    "narrow windows": MistralConfig(**SIZES, sliding_window=2),
    "upper windows": Qwen2Config(**SIZES, use_sliding_window=True, sliding_window=7, max_window_layers=1),
    "some windows": Qwen3Config(
        **SIZES,
        use_sliding_window=True,
        sliding_window=7,
        layer_types=["sliding_attention", "full_attention", "sliding_attention"],
    ),
}
NEW = ["qwen2", "llama with biases", "windows", "narrow windows", "upper windows", "some windows"]
"""With biases or windows: also decoded and differentiated."""


def write(kind: str, folder: Path) -> tuple[Any, LoopedLM]:
    """transformers' model with random weights, written to folder, and ours of it; both fp64."""
    torch.manual_seed(0)
    theirs = AutoModelForCausalLM.from_config(KINDS[kind]).double().eval()
    for parameter in theirs.parameters():
        nn.init.normal_(parameter, mean=float(parameter.dim() == 1), std=0.3)
    theirs.save_pretrained(folder)
    return theirs, import_pretrained(folder)


def in_fp64(theirs: Any, ours: LoopedLM) -> None:
    """transformers' norms round to fp32 in the middle; its rotary frequencies are 1 / theta^x in place of theta^-x."""
    for module in list(theirs.modules()):
        for name, child in module.named_children():
            if type(child).__name__.endswith("RMSNorm"):
                exact = nn.RMSNorm(len(child.weight), eps=child.variance_epsilon, dtype=torch.float64)
                exact.weight = child.weight
                setattr(module, name, exact)
    rotary, config = theirs.model.rotary_emb, ours.config
    frequencies = config.rope_theta ** -(torch.arange(0, 8, 2).float() / 8)
    if config.rope_scaling is not None:
        frequencies = slowed(frequencies, config.rope_theta, config.rope_scaling)
    torch.testing.assert_close(rotary.inv_freq.float(), frequencies, rtol=1e-6, atol=0)
    rotary.inv_freq = frequencies


@pytest.mark.parametrize("kind", KINDS)
def test_logits_are_those_of_transformers(kind: str, tmp_path: Path):
    theirs, ours = write(kind, tmp_path)
    in_fp64(theirs, ours)
    ids = tokens(2, 60)
    with torch.no_grad():
        torch.testing.assert_close(ours.logits(ours(ids).hidden), theirs(ids).logits, rtol=1e-11, atol=1e-11)


@pytest.mark.parametrize("kind", NEW)
@torch.no_grad()
def test_decoding_gives_the_logits_of_transformers(kind: str, tmp_path: Path):
    theirs, ours = write(kind, tmp_path)
    in_fp64(theirs, ours)
    ids = tokens(2, 40)
    whole = theirs(ids).logits
    decoded, cache, held = [], ours.init_cache(2, 40), None
    for piece in ids.split([12, 5, *[1] * 23], dim=1):  # a prompt in two parts, beyond the window, then token by token
        decoded.append(ours.logits(ours(piece, cache=cache).hidden))
        step = theirs(piece, cache=held, use_cache=True)
        held = step.cache
        torch.testing.assert_close(decoded[-1], step.logits, rtol=1e-11, atol=1e-11)
    torch.testing.assert_close(torch.cat(decoded, 1), whole, rtol=1e-11, atol=1e-11)


@pytest.mark.parametrize("kind", NEW)
def test_gradients_are_those_of_transformers(kind: str, tmp_path: Path):
    theirs, ours = write(kind, tmp_path)
    in_fp64(theirs, ours)
    ids = tokens(2, 40)
    weights = torch.randn(2, 40, 23, generator=torch.Generator().manual_seed(0), dtype=torch.float64)
    for logits in (theirs(ids).logits, ours.logits(ours(ids).hidden)):
        (logits * weights).sum().backward()
    expected = {name: parameter.grad for name, parameter in theirs.named_parameters()}
    found = {stored_key(name): parameter.grad for name, parameter in ours.named_parameters()}
    torch.testing.assert_close(found, expected, rtol=1e-9, atol=1e-9)


@pytest.mark.parametrize(
    ("change", "layers"),
    [
        ({}, "fff"),
        ({"use_sliding_window": True, "sliding_window": 8}, "fff"),  # from layer 28 on
        ({"use_sliding_window": True, "sliding_window": 8, "max_window_layers": 0}, "www"),
        ({"use_sliding_window": True, "sliding_window": 8, "max_window_layers": 2}, "ffw"),
        ({"use_sliding_window": True, "sliding_window": 127, "max_window_layers": 2}, "ffw"),
        ({"use_sliding_window": True, "sliding_window": 128, "max_window_layers": 2}, "fff"),  # as long as rows are
        ({"use_sliding_window": True, "sliding_window": None, "max_window_layers": 2}, "fff"),
        ({"sliding_window": 8, "max_window_layers": 2}, "fff"),
        ({"layer_types": ["full_attention"] * 3}, "fff"),
        ({"model_type": "mistral", "sliding_window": 8}, "www"),
        ({"model_type": "mistral", "sliding_window": 128}, "fff"),
        ({"model_type": "mistral", "max_position_embeddings": 8192}, "www"),  # of 4096, where none is told
    ],
)
def test_which_layers_have_windows(change: dict, layers: str):
    config = config_from_llama(SIZES | {"model_type": "qwen2"} | change)
    assert "".join(mixer.type[0] for mixer in layout(config)[0]) == layers
    widths = {mixer.window for mixer in layout(config)[0] if mixer.type == "window"}
    assert widths == ({change.get("sliding_window", 4096)} if "w" in layers else set())


def test_a_config_says_how_long_rows_may_be_and_that_there_is_one_loop(tmp_path: Path):
    write("qwen3", tmp_path)
    config = pretrained_config(tmp_path)
    assert (config.n_loops, config.max_seq_len, config.loop_residual, config.halting) == (1, 128, False, None)
    stored = json.loads((tmp_path / "config.json").read_text())
    del stored["max_position_embeddings"]
    assert config_from_llama(stored).max_seq_len == 32_768


def test_a_looped_model_that_starts_from_one_is_it_at_one_loop(tmp_path: Path):
    _, ours = write("llama", tmp_path)
    looped = build(ours.config.model_copy(update={"n_loops": 4, "loop_residual": True})).double()
    start_from(looped, ours)
    ids = tokens(2, 9)
    torch.testing.assert_close(looped(ids, n_loops=1).hidden, ours(ids).hidden, rtol=1e-12, atol=1e-12)
    assert not torch.allclose(looped(ids).hidden, ours(ids).hidden)


def test_older_configs_keep_rope_scaling_beside_theta():
    older = SIZES | {"model_type": "llama", "rope_theta": 5e5, "rope_scaling": {"type": "linear", "factor": 2.0}}
    config = config_from_llama(older)
    assert (config.rope_theta, config.rope_scaling) == (5e5, LinearRope(factor=2.0))


def test_the_length_that_a_scaling_is_from_may_stand_outside_it():
    yarn = SIZES | {"model_type": "llama", "rope_scaling": {"rope_type": "yarn", "factor": 2.0}}
    told = [config_from_llama(yarn), config_from_llama(yarn | {"original_max_position_embeddings": 64})]
    assert [config.rope_scaling for config in told] == [
        YarnRope(factor=2.0, original_max_seq_len=length) for length in (128, 64)
    ]


def test_the_real_llama_and_qwen_have_their_published_sizes():
    llama = {
        "model_type": "llama", "vocab_size": 128_256, "hidden_size": 2048, "intermediate_size": 8192, "head_dim": 64,
        "num_hidden_layers": 16, "num_attention_heads": 32, "num_key_value_heads": 8, "tie_word_embeddings": True,
    }  # fmt: skip
    assert parameters(config_from_llama(llama)).total == 1_235_814_400
    qwen = {
        "model_type": "qwen3", "vocab_size": 151_936, "hidden_size": 1024, "intermediate_size": 3072, "head_dim": 128,
        "num_hidden_layers": 28, "num_attention_heads": 16, "num_key_value_heads": 8, "tie_word_embeddings": True,
    }  # fmt: skip
    assert parameters(config_from_llama(qwen)).total == 596_049_920
    biased = {
        "model_type": "qwen2", "vocab_size": 151_936, "hidden_size": 896, "intermediate_size": 4864,
        "num_hidden_layers": 24, "num_attention_heads": 14, "num_key_value_heads": 2, "tie_word_embeddings": True,
        "use_sliding_window": False, "sliding_window": 32_768, "max_window_layers": 21,
    }  # fmt: skip
    assert parameters(config_from_llama(biased)).total == 494_032_768


def test_a_head_that_is_stored_beside_the_embedding_it_is_tied_to_is_left_out(tmp_path: Path):
    _, ours = write("tied", tmp_path)
    weights = load_file(tmp_path / "model.safetensors")
    save_file(weights | {"lm_head.weight": weights["model.embed_tokens.weight"] + 1}, tmp_path / "model.safetensors")
    torch.testing.assert_close(dict(import_pretrained(tmp_path).named_parameters()), dict(ours.named_parameters()))


def test_the_rotary_table_that_old_checkpoints_hold_is_left_out(tmp_path: Path):
    _, ours = write("llama", tmp_path)
    weights = load_file(tmp_path / "model.safetensors")
    table = {"model.layers.0.self_attn.rotary_emb.inv_freq": torch.ones(4)}
    save_file(weights | table, tmp_path / "model.safetensors")
    torch.testing.assert_close(dict(import_pretrained(tmp_path).named_parameters()), dict(ours.named_parameters()))


@pytest.mark.parametrize(
    ("change", "named"),
    [
        ({"model_type": "phi"}, "has a model of type 'phi'; only ouro, llama, mistral, qwen2, qwen3 can be imported"),
        ({"model_type": "mistral", "attention_bias": True}, "mistral config has attention_bias=True, which cannot be"),
        ({"mlp_bias": True}, "llama config has mlp_bias=True"),
        ({"hidden_size": None}, "llama config has no hidden_size; give another checkpoint"),
        ({"model_type": "qwen2", "num_hidden_layers": None}, "qwen2 config has no num_hidden_layers"),
        ({"model_type": "mistral", "sliding_window": "8"}, "sliding_window='8', where a whole number belongs"),
        (
            {"model_type": "qwen2", "use_sliding_window": True, "sliding_window": 8, "max_window_layers": None},
            "qwen2 config has sliding windows and max_window_layers null; say from which layer on",
        ),
        ({"use_sliding_window": True}, "llama config has use_sliding_window=True"),
        ({"model_type": "mistral", "layer_types": ["sliding_attention"] * 3}, "mistral config has layer_types=["),
        ({"model_type": "mistral", "sliding_window": 0}, "mistral config: window: window is 0; it counts the token"),
        ({"model_type": "qwen2", "layer_types": ["sliding_attention"] * 3}, "no window; set use_sliding_window"),
        (
            {"model_type": "qwen3", "use_sliding_window": True, "layer_types": ["sliding_attention"] * 2},
            "qwen3 config has 2 layer_types for 3 layers; give one of each",
        ),
        (
            {"model_type": "qwen3", "layer_types": ["full_attention", "chunked_attention", "full_attention"]},
            "qwen3 config has layer_types chunked_attention, which cannot be imported",
        ),
        ({"rope_scaling": {"rope_type": "longrope"}}, "rope_scaling of type 'longrope'; only linear, llama3, yarn"),
        ({"rope_scaling": {"type": "yarn", "factor": 2.0, "mscale": 1.0}}, "rope_scaling 'yarn' with mscale"),
        ({"partial_rotary_factor": 0.5}, "partial_rotary_factor=0.5; only heads that are rotated whole"),
        ({"rope_parameters": {"rope_type": "default", "partial_rotary_factor": 0.5}}, "partial_rotary_factor=0.5"),
        ({"rope_parameters": {"full_attention": {"rope_type": "yarn"}}}, "rope_scaling 'default' with full_attention"),
        (
            {"rope_scaling": {"type": "yarn", "factor": 4.0}, "rope_parameters": {"rope_type": "default"}},
            "rope_scaling of type 'yarn' and rope_parameters of type 'default'; keep one",
        ),
        (
            {"rope_scaling": YARN, "original_max_position_embeddings": 64},
            "config has original_max_position_embeddings twice, [32, 64]; keep the one",
        ),
        ({"rope_scaling": {"type": "linear"}}, "llama config: rope_scaling.linear.factor: Field required"),
        ({"num_key_value_heads": 3}, "llama config: full: num_kv_heads 3 does not divide num_heads 4"),
    ],
)
def test_what_cannot_be_computed_is_refused(change: dict, named: str, tmp_path: Path):
    (tmp_path / "config.json").write_text(json.dumps(SIZES | {"model_type": "llama"} | change))
    with pytest.raises(ConfigError, match=re.escape(named)):
        import_pretrained(tmp_path)


def test_biases_that_a_config_does_not_tell_are_refused_by_name(tmp_path: Path):
    write("llama", tmp_path)
    weights = load_file(tmp_path / "model.safetensors")
    save_file(weights | {"model.layers.0.self_attn.q_proj.bias": torch.ones(32)}, tmp_path / "model.safetensors")
    with pytest.raises(ConfigError, match="self_attn.q_proj.bias' is not a key of a checkpoint with this config"):
        import_pretrained(tmp_path)


def test_biases_that_a_config_tells_must_be_there(tmp_path: Path):
    write("llama", tmp_path)
    stored = json.loads((tmp_path / "config.json").read_text())
    (tmp_path / "config.json").write_text(json.dumps(stored | {"model_type": "qwen2"}))
    with pytest.raises(ConfigError, match="9 keys are missing, the first 'model.layers.0.self_attn.k_proj.bias'"):
        import_pretrained(tmp_path)


def test_weights_that_cannot_be_read_are_told_in_a_line(tmp_path: Path):
    write("llama", tmp_path)
    single, index = tmp_path / "model.safetensors", tmp_path / "model.safetensors.index.json"
    content = single.read_bytes()
    single.write_text("version https://git-lfs.github.com/spec/v1")  # what git leaves there without git-lfs
    with pytest.raises(ConfigError, match=r"model.safetensors is damaged, or no safetensors \(.*\); download it again"):
        import_pretrained(tmp_path)
    single.rename(tmp_path / "pytorch_model.bin")
    with pytest.raises(ConfigError, match="where there are .bin files alone, save the model again"):
        weight_files(tmp_path)
    index.write_text("{}")
    with pytest.raises(ConfigError, match="index.json has no weight_map; download it again"):
        weight_files(tmp_path)
    single.write_bytes(content)  # goes before an index, as in transformers
    assert weight_files(tmp_path) == [single]
    (tmp_path / "config.json").write_text("[1]")
    with pytest.raises(ConfigError, match="config.json is not a JSON object"):
        pretrained_config(tmp_path)
    with pytest.raises(ConfigError, match="s3://b/llama: models are imported from folders of this machine"):
        pretrained_config("s3://b/llama")


def test_a_folder_may_be_named_from_the_home(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    write("llama", tmp_path / "here")
    monkeypatch.setenv("HOME", str(tmp_path))
    assert import_pretrained("~/here").config == pretrained_config("~/here")


def test_shards_take_the_place_of_an_earlier_model_in_one_file(tmp_path: Path):
    write_safetensors({"a": torch.zeros(4)}, tmp_path, max_shard_bytes=100)
    write_safetensors({"a": torch.ones(4), "b": torch.ones(4)}, tmp_path, max_shard_bytes=16)
    assert {name: tensor.sum() for name, tensor in stored_tensors(tmp_path)} == {"a": 4, "b": 4}
