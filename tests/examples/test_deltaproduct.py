"""The worked example of a user's mixer: passes every parity check, follows its equations, and plugs in by its path."""

from __future__ import annotations

import pickle
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from lt2.analysis.check_mixer import check_mixer, load_mixer
from lt2.analysis.parity import Sample, sample_model
from lt2.config import ModelConfig
from lt2.distill.student import convert
from lt2.layers import l2_normalise
from lt2.model import build

TARGET = f"{Path(__file__).parents[2] / 'examples' / 'deltaproduct.py'}:DeltaProductConfig"


@pytest.mark.parametrize("num_householder", [1, 3])
def test_passes_every_check(num_householder):
    report = check_mixer(TARGET, fields={"num_householder": num_householder})
    assert report.passed, report


def test_one_householder_step_is_gated_deltanet():
    product = sample_model(Sample(load_mixer(TARGET, {"num_householder": 1}))).blocks[0].mixers["deltaproduct"]
    model = sample_model(Sample(load_mixer("gdn", {"allow_neg_eigval": True})), seed=1)
    gdn = model.blocks[0].mixers["gdn"]
    gdn.load_state_dict(product.state_dict())
    x = torch.randn(2, 12, 32, dtype=torch.float64, generator=torch.Generator().manual_seed(0))
    seq = model.sequence_info(torch.zeros(2, 12, dtype=torch.int64), None, None, None)
    torch.testing.assert_close(product(x, None, seq, None)[0], gdn(x, None, seq, None)[0], rtol=1e-12, atol=1e-12)


def test_takes_the_place_of_attention_in_students_and_random_layouts():
    own, sizes = load_mixer(TARGET, {}), {"vocab_size": 9, "dim": 16, "n_layers": 2, "n_loops": 2, "num_heads": 2}
    net = build(ModelConfig.model_validate({**sizes, "layout": {"type": "uniform", "mixer": {"type": "full"}}}))
    mixer = convert(net, own).blocks[0].mixers["deltaproduct"]
    assert torch.equal(mixer.o_proj.weight, net.blocks[0].mixers["softmax"].o_proj.weight)  # q, k and v do not fit
    drawn = {"type": "random", "attention": {"type": "full"}, "mixer": own.model_dump(), "fraction": 0.5}
    hybrid = build(ModelConfig.model_validate({**sizes, "layout": drawn}))
    assert hybrid(torch.zeros(1, 5, dtype=torch.int64), step=3).hidden.isfinite().all()


def test_follows_its_equations():
    n, L, H, K = 3, 12, 2, 16
    model = sample_model(Sample(load_mixer(TARGET, {"num_householder": n})))
    layer = model.blocks[0].mixers["deltaproduct"]
    x = torch.randn(1, L, 32, dtype=torch.float64, generator=torch.Generator().manual_seed(0))
    seq = model.sequence_info(torch.zeros(1, L, dtype=torch.int64), None, None, None)

    q, k, v = layer.conv(layer.qkv_proj(x), seq, None)[0].split([H * K, n * H * K, n * H * K], dim=-1)
    q, k, v = l2_normalise(q.view(L, H, K)), l2_normalise(k.view(L, n, H, K)), v.view(L, n, H, K)
    a, b = layer.ab_proj(x)[0].split([H, n * H], dim=-1)
    alpha = torch.exp(-layer.A_log.exp() * torch.log1p(torch.exp(a + layer.dt_bias)))
    beta = 2 / (1 + torch.exp(-b.view(L, n, H)))
    state, outputs = torch.zeros(H, K, K, dtype=torch.float64), []
    for t in range(L):
        state = alpha[t, :, None, None] * state
        for j in range(n):
            key, value, rate = k[t, j], v[t, j], beta[t, j, :, None, None]
            state = state - rate * key[..., None] * (key[..., None] * state).sum(1, keepdim=True)
            state = state + rate * key[..., None] * value[:, None]
        outputs.append((q[t, ..., None] * state).sum(1) * K**-0.5)
    o = torch.stack(outputs)[None]
    expected = layer.o_proj(layer.o_norm(o, layer.gate_proj(x).view(1, L, H, K)).flatten(2))

    torch.testing.assert_close(layer(x, None, seq, None)[0], expected, rtol=1e-11, atol=1e-11)


def test_a_config_names_the_file_by_its_path():
    mixer = {"type": "deltaproduct", "source": TARGET.rpartition(":")[0], "num_householder": 2}
    layout = {"type": "hybrid", "attention": {"type": "full"}, "mixer": mixer, "ratio": "1:1"}
    sizes = {"vocab_size": 61, "dim": 32, "n_layers": 2, "n_loops": 2, "num_heads": 2}
    config = ModelConfig.model_validate({**sizes, "layout": layout})
    assert ModelConfig.model_validate_json(config.model_dump_json()) == config
    assert build(config)(torch.zeros(1, 4, dtype=torch.int64)).hidden.shape == (1, 4, 32)


def test_a_config_reaches_another_process(tmp_path):
    mixer = load_mixer(TARGET, {"num_householder": 3})
    (tmp_path / "mixer.pickle").write_bytes(pickle.dumps(mixer))
    code = "import pickle, sys; print(pickle.load(open(sys.argv[1], 'rb')).model_dump_json())"
    command = [sys.executable, "-c", code, str(tmp_path / "mixer.pickle")]
    run = subprocess.run(command, capture_output=True, text=True, check=True)
    assert run.stdout.strip() == mixer.model_dump_json()
