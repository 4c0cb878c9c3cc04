"""Mixer configs: what is refused, how, and what the accounting says."""

from __future__ import annotations

import math
import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest
import torch
from pydantic import ValidationError

from lt2.config import ConfigError, Dims, MixerConfig, ModelConfig, load_source, mixer_types
from lt2.explain import explain
from lt2.layout import layout as layout_of
from lt2.mixers import build_mixer

MODEL = {"vocab_size": 61, "dim": 32, "n_layers": 2, "n_loops": 2, "num_heads": 2}

DELTA = ("deltanet", "gdn", "kda")
BAD = {
    "la num_heads": ({"type": "la", "num_heads": 3}, ["num_heads 3", "dim 32", "divide"]),
    "la expand_v": ({"type": "la", "expand_v": 0.3}, ["dim 32", "expand_v 0.3"]),
    "la normalize": ({"type": "la", "normalize": True, "feature_map": "identity"}, ["normalize", "'identity'", "elu"]),
    "retnet odd": ({"type": "retnet", "num_heads": 32}, ["even", "got 1"]),
    "gla expand_k": ({"type": "gla", "num_heads": 32}, ["num_heads 32", "expand_k 0.5"]),
    "gla rank": ({"type": "gla", "gate_low_rank": 0}, ["gate_low_rank is 0", "at least 1"]),
    "gla normalizer": ({"type": "gla", "gate_logit_normalizer": 0}, ["gate_logit_normalizer is 0", "positive"]),
    "hgrn2 num_heads": ({"type": "hgrn2", "num_heads": 5}, ["num_heads 5", "dim 32"]),
    "mamba2 head_dim": ({"type": "mamba2", "head_dim": 48}, ["head_dim 48", "expand 2", "dim 32"]),
    "mamba2 conv": ({"type": "mamba2", "head_dim": 16, "conv_size": 1}, ["conv_size is 1", "at least 2"]),
    "mamba2 d_state": ({"type": "mamba2", "head_dim": 16, "d_state": 0}, ["d_state is 0", "at least 1"]),
    "deltanet num_heads": ({"type": "deltanet", "num_heads": 5}, ["num_heads 5", "dim 32", "head_dim"]),
    "gdn expand_v": ({"type": "gdn", "expand_v": 0.3}, ["expand_v 0.3", "head_dim 16"]),
    "gdn conv": ({"type": "gdn", "conv_size": -1}, ["conv_size is -1", "0 for none"]),
    "gdn conv of one": ({"type": "gdn", "conv_size": 1}, ["conv_size is 1", "0 for none", "at least 2"]),
    "gdn expand_v nan": ({"type": "gdn", "expand_v": float("nan")}, ["expand_v", "finite"]),
    "gla expand_k inf": ({"type": "gla", "expand_k": float("inf")}, ["expand_k", "finite"]),
    "gla normalizer nan": ({"type": "gla", "gate_logit_normalizer": float("nan")}, ["gate_logit_normalizer", "finite"]),
    "gdn heads": ({"type": "gdn", "num_heads": 0}, ["num_heads", "greater than 0"]),
    **{f"{kind} head_dim": ({"type": kind, "head_dim": 257}, [f"{kind}: head_dim 257", "256"]) for kind in DELTA},
    "window heads": ({"type": "window", "num_heads": 3}, ["window: num_heads 3", "dim 32"]),
    "window": ({"type": "window", "window": 0}, ["window is 0", "at least 1"]),
    "full heads": ({"type": "full", "num_heads": 3}, ["num_heads 3", "dim 32"]),
    "full kv": ({"type": "full", "num_heads": 4, "num_kv_heads": 3}, ["num_kv_heads 3", "num_heads 4"]),
    "full no heads": ({"type": "full", "num_heads": 0}, ["num_heads", "greater than 0"]),
    "window kv heads": ({"type": "window", "num_kv_heads": -1}, ["num_kv_heads", "greater than 0"]),
    "dsa head_dim": ({"type": "dsa", "head_dim": 0}, ["head_dim", "greater than 0"]),
    "nsa kv heads": ({"type": "nsa", "num_kv_heads": 0}, ["num_kv_heads", "greater than 0"]),
    "mla v_head_dim": ({"type": "mla", "v_head_dim": 0}, ["v_head_dim", "greater than 0"]),
    "nsa group": ({"type": "nsa"}, ["2 query heads over 1 KV heads", "power of two >= 16"]),
    "nsa head_dim": ({"type": "nsa", "num_heads": 16, "head_dim": 258}, ["nsa: head_dim 258", "256"]),
    "nsa window": ({"type": "nsa", "backend": "torch", "window": 0}, ["window is 0", "at least 1"]),
    "dsa top_k": ({"type": "dsa", "top_k": 4096}, ["top_k 4096", "max_seq_len 4096"]),
    "mla rope": ({"type": "mla", "rope_head_dim": 3}, ["rope_head_dim is 3", "even"]),
    "gate without SDPA": ({"type": "gla", "gate": "headwise"}, ["gate", "unknown key"]),
    "unknown type": ({"type": "retnt"}, ["'retnt'", "did you mean 'retnet'"]),
}


@pytest.mark.parametrize("case", BAD)
def test_bad_configs_name_the_rule_and_the_values(case):
    mixer, words = BAD[case]
    with pytest.raises(ValidationError) as caught:
        ModelConfig.model_validate({**MODEL, "layout": {"type": "uniform", "mixer": mixer}})
    message = explain(caught.value, "model")
    assert [word for word in words if word not in message] == [], message


EDGES = [
    *({"type": kind, "head_dim": 256, "conv_size": 2} for kind in DELTA),
    {"type": "window", "window": 1},
    {"type": "gla", "gate_low_rank": 1},
    {"type": "mamba2", "expand": 1, "head_dim": 1, "d_state": 1, "conv_size": 2},
    {"type": "nsa", "backend": "torch", "window": 1, "block_size": 1, "num_blocks": 4},
    {"type": "nsa", "backend": "torch", "head_dim": 258},
    {"type": "nsa", "num_heads": 16, "head_dim": 256},
    {"type": "dsa", "top_k": 1, "index_heads": 1, "index_dim": 1, "index_rope_dim": 0, "warmup_steps": 0},
    {"type": "dsa", "top_k": 4095, "index_dim": 2, "index_rope_dim": 2},
    {"type": "mla", "kv_rank": 1, "q_rank": 1, "rope_head_dim": 2},
]


@pytest.mark.parametrize("mixer", EDGES, ids=lambda mixer: mixer["type"])
def test_the_least_and_the_most_that_a_rule_allows(mixer):
    MixerConfig.read(mixer).check(Dims(dim=32, num_heads=2, max_seq_len=4096))


@pytest.mark.parametrize("kind", DELTA)
def test_a_convolution_is_there_from_two_tokens_on(kind):
    dims = Dims(dim=32, num_heads=2)
    for size in (0, 2, 3):
        config = MixerConfig.read({"type": kind, "conv_size": size})
        with torch.device("meta"):
            conv = build_mixer(config, dims).conv
        held = config.cache_spec(dims, 8).get("conv")
        assert (conv.weight.shape, held) == ((96, size), ((size - 1, 96), "compute")) if size else conv is held is None


FULL, GATED, WINDOW = {"type": "full"}, {"type": "full", "gate": "headwise"}, {"type": "window", "window": 3}
RANDOM = {"type": "random", "attention": FULL, "mixer": WINDOW}
KEPT = {"type": "kept", "attention": FULL, "mixer": {"type": "gdn"}}
BAD_LAYOUTS = {
    "fraction none": (RANDOM | {"fraction": 0}, ["fraction", "greater than 0"]),
    "fraction above 1": (RANDOM | {"fraction": 1.5}, ["fraction", "less than or equal to 1"]),
    "votes": (RANDOM | {"votes": 0}, ["votes", "greater than 0"]),
    "one set of weights": (RANDOM | {"attention": GATED}, ["on one set of weights", "differ only in ['window']"]),
    "a mixer that is not drawn": (RANDOM | {"mixer": {"type": "gla", "num_heads": 3}, "fraction": 1}, ["num_heads 3"]),
    "a mixer that is not run": (
        KEPT | {"mixer": {"type": "gla", "num_heads": 3}, "kept": [0, 1], "both": True},
        ["num_heads 3"],
    ),
    "both of one": (KEPT | {"mixer": WINDOW, "both": True}, ["both: 'full' and 'window' run on one set of weights"]),
    "ratio": ({"type": "hybrid", "attention": FULL, "mixer": WINDOW, "ratio": "²:1"}, ["'a:b' with whole numbers"]),
}


@pytest.mark.parametrize("case", BAD_LAYOUTS)
def test_bad_layouts_name_the_rule_and_the_values(case):
    layout, words = BAD_LAYOUTS[case]
    with pytest.raises(ValidationError) as caught:
        ModelConfig.model_validate({**MODEL, "layout": layout})
    message = explain(caught.value, "model")
    assert [word for word in words if word not in message] == [], message


def test_an_error_of_a_whole_config_is_named_by_its_source_alone():
    with pytest.raises(ValidationError) as caught:
        ModelConfig.model_validate(3)
    assert explain(caught.value).startswith("config: give fields, {name: value, …}, not 3")


@pytest.mark.parametrize(
    ("name", "value"), [("ffn_hidden", 0), ("ffn_hidden", -8), ("rope_theta", 0), ("norm_eps", -1)]
)
def test_bad_sizes_name_their_field(name, value):
    with pytest.raises(ValidationError, match=rf"{name}\n +Input should be greater than"):
        ModelConfig.model_validate({**MODEL, "layout": {"type": "uniform", "mixer": FULL}, name: value})


def test_a_users_mixer_cannot_take_a_shipped_type():
    with pytest.raises(ConfigError, match="'gdn' of Mine is a shipped one"):

        class Mine(MixerConfig):
            type: str = "gdn"


def test_two_files_may_have_a_type_of_the_same_name(tmp_path):
    shipped = (Path(__file__).parents[3] / "examples" / "deltaproduct.py").read_text()
    for name in ("first", "second"):
        (tmp_path / f"{name}.py").write_text(shipped)

    def mixer(name):
        layout = {"type": "uniform", "mixer": {"type": "deltaproduct", "source": str(tmp_path / f"{name}.py")}}
        fields = {"vocab_size": 8, "dim": 8, "n_layers": 1, "num_heads": 1, "layout": layout}
        (spec,) = {spec for row in layout_of(ModelConfig.model_validate(fields)) for spec in row}
        return spec.implementation().__module__.rpartition("_")[2]

    assert [mixer(name) for name in ("first", "second", "first")] == ["first", "second", "first"]


def test_configs_need_no_torch():
    code = "import sys, lt2.config, lt2.mixer_configs; assert 'torch' not in sys.modules"
    subprocess.run([sys.executable, "-c", code], check=True)


@pytest.mark.parametrize(
    ("mixer", "size"),
    [
        # Mixer cost in d² at d=1024, 16 heads (design: DeltaNet, GLA, HGRN2 ≈ 4.0, RetNet 8.0, Mamba2 6.16, KDA 4.26).
        ({"type": "la"}, 4.0),
        ({"type": "deltanet"}, 4.03),
        ({"type": "hgrn2"}, 4.0),
        ({"type": "gla"}, 4.03),
        ({"type": "retnet"}, 8.0),
        ({"type": "mamba2"}, 6.16),
        ({"type": "gdn"}, 5.04),
        ({"type": "kda"}, 4.29),
    ],
)
def test_parameter_cost(mixer, size):
    config = mixer_types()[mixer["type"]](**mixer)
    with torch.device("meta"):
        module = build_mixer(config, Dims(dim=1024, num_heads=16))
    assert sum(p.numel() for p in module.parameters()) / 1024**2 == pytest.approx(size, abs=0.02)


@pytest.mark.parametrize(
    ("mixer", "width", "seen"),
    [
        ({"type": "full", "num_heads": 4, "num_kv_heads": 2}, 2 * 32, 20),  # of each head's query · key and value
        ({"type": "window", "window": 7}, 2 * 32, 7),
        ({"type": "window", "window": 30}, 2 * 32, 20),
        ({"type": "mla", "head_dim": 6, "v_head_dim": 5, "rope_head_dim": 4}, 2 * (6 + 4 + 5), 20),
    ],
)
def test_sequence_flops_of_attention_count_the_keys_read(mixer, width, seen):
    length = 20
    read = sum(min(position + 1, seen) for position in range(length))
    found = MixerConfig.read(mixer).sequence_flops(Dims(dim=32, num_heads=2), length)
    assert found == pytest.approx(2 * width * read / length)


@pytest.mark.parametrize("kind", ["la", "retnet", "mamba2", "gla", "hgrn2", "deltanet", "gdn", "kda"])
def test_a_token_costs_a_recurrence_the_same_in_every_sequence(kind):
    config, dims = MixerConfig.read({"type": kind}), Dims(dim=1024, num_heads=16)
    shape, _ = config.cache_spec(dims, 1)["state"]
    short, long = (config.sequence_flops(dims, length) for length in (128, 128_000))
    assert short == long >= 4 * math.prod(shape)  # to write the state and to read it


def test_threads_that_read_a_file_at_once_find_it_whole(tmp_path):
    (tmp_path / "slow.py").write_text("import time\ntime.sleep(0.5)\nDONE = True\n")
    with ThreadPoolExecutor(4) as pool:
        whole = pool.map(lambda path: hasattr(load_source(path), "DONE"), [str(tmp_path / "slow.py")] * 4)
    assert list(whole) == [True] * 4
