"""Rotary frequencies that are slowed down for longer rows; transformers' own tables are the reference."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from pydantic import ValidationError
from transformers import LlamaConfig
from transformers.modeling_rope_utils import ROPE_INIT_FUNCTIONS

from lt2.config import ModelConfig
from lt2.explain import explain
from lt2.interop.rope import rope_from, rope_to
from lt2.sequence import attention_factor, rotary, slowed
from tests.lt2.tiny import config, model, tokens

LLAMA_32_1B = {
    "rope_type": "llama3", "rope_theta": 5e5, "factor": 32.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0,
    "original_max_position_embeddings": 8192,
}  # fmt: skip
QWEN3_LONG = {"rope_type": "yarn", "rope_theta": 1e6, "factor": 4.0, "original_max_position_embeddings": 32_768}
SHORT = {
    "rope_type": "yarn",
    "rope_theta": 1e4,
    "factor": 8.0,
    "original_max_position_embeddings": 64,
    "beta_fast": 4.0,
}
BELOW = {"rope_type": "yarn", "rope_theta": 1e4, "factor": 8.0, "original_max_position_embeddings": 40}  # first < 0
ABOVE = {"rope_type": "yarn", "rope_theta": 6.0, "factor": 8.0, "original_max_position_embeddings": 400}  # last > 63
LOUD = QWEN3_LONG | {"attention_factor": 1.5}


@pytest.mark.parametrize(
    "rope", [LLAMA_32_1B, QWEN3_LONG, SHORT, BELOW, ABOVE, LOUD, {"rope_type": "linear", "factor": 4.0}]
)
def test_frequencies_are_those_of_transformers(rope: dict[str, Any]):
    told = {"rope_theta": 1e4} | rope
    theirs = LlamaConfig(hidden_size=2048, num_attention_heads=32, rope_parameters=dict(told))
    frequencies, factor = ROPE_INIT_FUNCTIONS[rope["rope_type"]](theirs, device=torch.device("cpu"))
    ours = ModelConfig.model_validate(config().model_dump() | rope_from({"rope_parameters": told}))
    assert ours.rope_scaling is not None
    plain = ours.rope_theta ** -(torch.arange(0, 64, 2).float() / 64)
    torch.testing.assert_close(slowed(plain, ours.rope_theta, ours.rope_scaling), frequencies, rtol=1e-6, atol=0)
    assert attention_factor(ours.rope_scaling) == pytest.approx(factor)
    assert ModelConfig.model_validate(ours.model_dump() | rope_from(rope_to(ours))) == ours


def test_yarn_makes_queries_and_keys_longer():
    scaling = ModelConfig.model_validate(config().model_dump() | rope_from({"rope_parameters": LOUD})).rope_scaling
    cos, sin = rotary(torch.arange(9)[None], 8, 1e6, scaling)
    torch.testing.assert_close(cos.square() + sin.square(), torch.full((1, 9, 1, 4), 1.5**2))


@pytest.mark.parametrize("kind", ["linear", "llama3", "yarn"])
def test_token_by_token_is_the_whole_sequence(kind: str):
    scaling = {"type": kind, "factor": 4.0} | ({} if kind == "linear" else {"original_max_seq_len": 8})
    net, plain = model(rope_theta=100.0, rope_scaling=scaling), model(rope_theta=100.0)
    ids = tokens(2, 12)
    whole = net(ids).hidden
    assert not torch.allclose(whole, plain(ids).hidden)
    cache = net.init_cache(2, 12)
    steps = [
        net(ids[:, :5], cache=cache).hidden,
        *(net(ids[:, at : at + 1], cache=cache).hidden for at in range(5, 12)),
    ]
    torch.testing.assert_close(torch.cat(steps, 1), whole, rtol=1e-10, atol=1e-12)


@pytest.mark.parametrize(
    ("scaling", "told"),
    [
        ({"type": "yarn", "factor": 4.0}, "rope_scaling.yarn.original_max_seq_len: Field required"),
        ({"type": "ntk", "factor": 4.0}, "'linear', 'llama3', 'yarn'"),
        ({"type": "linear", "factor": 0.5}, "greater than or equal to 1"),
        ({"type": "linear", "facter": 2}, "did you mean 'factor'?"),
        (
            {"type": "yarn", "factor": 4.0, "original_max_seq_len": 8, "beta_slow": 40},
            "beta_slow 40.0 must be below beta_fast 32.0",
        ),
        (
            {"type": "llama3", "factor": 4.0, "original_max_seq_len": 8, "low_freq_factor": 4},
            "low_freq_factor 4.0 must be below high_freq_factor 4.0",
        ),
    ],
)
def test_a_scaling_that_cannot_be_is_explained(scaling: dict[str, Any], told: str):
    with pytest.raises(ValidationError) as error:
        ModelConfig.model_validate(config().model_dump() | {"rope_scaling": scaling})
    assert told in explain(error.value, "model")
