"""Ouro import and export against a plain implementation of Ouro written here from its description alone."""

from __future__ import annotations

import hashlib
import json
from pathlib import Path

import pytest
import torch
from safetensors import safe_open
from safetensors.torch import save_file
from torch import Tensor
from torch.nn.functional import silu

from lt2.analysis import accounting
from lt2.config import ConfigError
from lt2.interop.ouro import config_from_ouro, export_ouro, import_ouro
from lt2.model import build
from tests.lt2.tiny import model, tokens

D, N, H, F, V, T = 16, 2, 2, 24, 23, 4
OURO = {
    "architectures": ["OuroForCausalLM"], "auto_map": {"AutoConfig": "configuration_ouro.OuroConfig"},
    "model_type": "ouro", "hidden_size": D, "num_hidden_layers": N, "num_attention_heads": H,
    "num_key_value_heads": H, "head_dim": D // H, "intermediate_size": F, "vocab_size": V, "hidden_act": "silu",
    "rope_theta": 1e6, "max_position_embeddings": 128, "rms_norm_eps": 1e-6, "tie_word_embeddings": False,
    "total_ut_steps": T, "early_exit_threshold": 1.0, "bos_token_id": 0, "eos_token_id": 0, "rope_scaling": None,
    "use_sliding_window": False, "layer_types": ["full_attention"] * N,
}  # fmt: skip


def ouro_weights(dtype: torch.dtype = torch.float64) -> dict[str, Tensor]:
    """Random weights under exactly the keys of an Ouro checkpoint."""
    g = torch.Generator().manual_seed(0)

    def draw(*shape: int) -> Tensor:
        return (torch.randn(*shape, generator=g, dtype=torch.float64) * shape[-1] ** -0.5).to(dtype)

    def norm() -> Tensor:
        return (1 + 0.2 * torch.randn(D, generator=g, dtype=torch.float64)).to(dtype)

    weights = {"model.embed_tokens.weight": draw(V, D) * 4, "model.norm.weight": norm(), "lm_head.weight": draw(V, D)}
    weights["model.early_exit_gate.weight"] = draw(1, D)
    weights["model.early_exit_gate.bias"] = draw(1)
    for i in range(N):
        at = f"model.layers.{i}."
        for name in ("input_layernorm", "input_layernorm_2", "post_attention_layernorm", "post_attention_layernorm_2"):
            weights[f"{at}{name}.weight"] = norm()
        for name in "qkvo":
            weights[f"{at}self_attn.{name}_proj.weight"] = draw(D, D)
        weights[f"{at}mlp.gate_proj.weight"] = draw(F, D)
        weights[f"{at}mlp.up_proj.weight"] = draw(F, D)
        weights[f"{at}mlp.down_proj.weight"] = draw(D, F)
    return weights


def write(folder: Path, weights: dict[str, Tensor], config: dict = OURO, *, sharded: bool = False) -> Path:
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "config.json").write_text(json.dumps(config))
    if not sharded:
        save_file(weights, folder / "model.safetensors", metadata={"format": "pt"})
        return folder
    names = sorted(weights)
    parts = {"model-00001-of-00002.safetensors": names[::2], "model-00002-of-00002.safetensors": names[1::2]}
    for file, keys in parts.items():
        save_file({key: weights[key] for key in keys}, folder / file)
    index = {"weight_map": {key: file for file, keys in parts.items() for key in keys}}
    (folder / "model.safetensors.index.json").write_text(json.dumps(index))
    return folder


def plain_ouro(w: dict[str, Tensor], ids: list[int]) -> tuple[list[Tensor], Tensor]:
    """Logits (L, V) after every loop and the exit distribution (L, T), one sequence, loops over heads and positions."""
    L, E = len(ids), D // H
    # Frequencies are rounded to fp32, as every implementation keeps its rotary tables.
    angle = torch.arange(L).float()[:, None] * 1e6 ** -(torch.arange(0, E, 2).float() / E)
    cos, sin = angle.cos().double(), angle.sin().double()

    def rms(x: Tensor, name: str) -> Tensor:
        return x / (x.pow(2).mean(-1, keepdim=True) + 1e-6).sqrt() * w[name + ".weight"]

    def turn(x: Tensor) -> Tensor:
        a, b = x[:, : E // 2], x[:, E // 2 :]
        return torch.cat([a * cos - b * sin, b * cos + a * sin], -1)

    def attention(x: Tensor, at: str) -> Tensor:
        q, k, v = (x @ w[f"{at}self_attn.{p}_proj.weight"].T for p in "qkv")
        out = torch.zeros(L, D, dtype=torch.float64)
        for head in range(H):
            s = slice(head * E, (head + 1) * E)
            qh, kh = turn(q[:, s]), turn(k[:, s])
            for i in range(L):
                weight = (kh[: i + 1] @ qh[i] / E**0.5).softmax(0)
                out[i, s] = weight @ v[: i + 1, s]
        return out @ w[f"{at}self_attn.o_proj.weight"].T

    def mlp(x: Tensor, at: str) -> Tensor:
        gate, up = (x @ w[f"{at}mlp.{p}_proj.weight"].T for p in ("gate", "up"))
        return (silu(gate) * up) @ w[f"{at}mlp.down_proj.weight"].T

    x, logits, lambdas = w["model.embed_tokens.weight"][ids], [], []
    for _ in range(T):
        for i in range(N):
            at = f"model.layers.{i}."
            x = x + rms(attention(rms(x, at + "input_layernorm"), at), at + "input_layernorm_2")
            x = x + rms(mlp(rms(x, at + "post_attention_layernorm"), at), at + "post_attention_layernorm_2")
        x = rms(x, "model.norm")
        logits.append(x @ w["lm_head.weight"].T)
        lambdas.append((x @ w["model.early_exit_gate.weight"].T + w["model.early_exit_gate.bias"]).sigmoid()[:, 0])
    probabilities, rest = [], torch.ones(L, dtype=torch.float64)
    for loop in range(T):
        probabilities.append(rest if loop == T - 1 else rest * lambdas[loop])
        rest = rest * (1 - lambdas[loop])
    return logits, torch.stack(probabilities, -1)


@pytest.mark.parametrize("sharded", [False, True])
def test_logits_of_every_loop_and_the_exit_gate_equal_a_plain_ouro(tmp_path: Path, sharded: bool):
    weights = ouro_weights()
    net = import_ouro(write(tmp_path, weights, sharded=sharded))
    ids = tokens(2, 9)
    out = net(ids, per_loop=True)
    for row in range(2):
        logits, probabilities = plain_ouro(weights, ids[row].tolist())
        for loop in range(T):
            torch.testing.assert_close(net.logits(out.loops[loop][row]), logits[loop], rtol=1e-11, atol=1e-12)
        torch.testing.assert_close(net.logits(out.hidden[row]), logits[-1], rtol=1e-11, atol=1e-12)
        torch.testing.assert_close(out.weights[row], probabilities, rtol=1e-11, atol=1e-13)


@pytest.mark.parametrize("threshold", [0.3, 0.7, 0.95])
def test_exit_step_is_the_first_loop_whose_cdf_reaches_the_threshold(tmp_path: Path, threshold: float):
    """Before any token has exited the two agree exactly, so the first exits of a sequence are compared."""
    weights = ouro_weights()
    net = import_ouro(write(tmp_path, weights, {**OURO, "early_exit_threshold": threshold}))
    ids = tokens(1, 1)
    logits, probabilities = plain_ouro(weights, ids[0].tolist())
    step = int((probabilities[0].cumsum(0) >= threshold - 1e-12).nonzero()[0])
    out = net(ids)
    assert out.loops_used.item() == step + 1
    torch.testing.assert_close(net.logits(out.hidden[0]), logits[step], rtol=1e-11, atol=1e-12)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_round_trip_gives_the_same_file(tmp_path: Path, dtype: torch.dtype):
    source = write(tmp_path / "in", ouro_weights(dtype))
    net = import_ouro(source)
    assert net.embed.weight.dtype == dtype
    export_ouro(net, tmp_path / "out", config=OURO)
    before, after = ((tmp_path / d / "model.safetensors").read_bytes() for d in ("in", "out"))
    assert hashlib.sha256(before).digest() == hashlib.sha256(after).digest()
    written = json.loads((tmp_path / "out" / "config.json").read_text())
    assert {key: written[key] for key in OURO} == OURO


def test_sharded_round_trip_gives_the_same_tensors_under_the_same_keys(tmp_path: Path):
    weights = ouro_weights(torch.bfloat16)
    net = import_ouro(write(tmp_path / "in", weights, sharded=True))
    export_ouro(net, tmp_path / "out", max_shard_bytes=2000)
    files = sorted((tmp_path / "out").glob("*.safetensors"))
    assert len(files) > 3
    assert len({path.stat().st_mode for path in (tmp_path / "out").iterdir()}) == 1, "whoever reads one file reads all"
    found = {}
    for file in files:
        with safe_open(file, framework="pt") as tensors:
            found |= {key: tensors.get_tensor(key) for key in tensors.keys()}  # noqa: SIM118
    assert found.keys() == weights.keys()
    assert all(torch.equal(found[key], weights[key]) and found[key].dtype == torch.bfloat16 for key in weights)
    assert torch.equal(import_ouro(tmp_path / "out")(tokens(1, 4)).hidden, net(tokens(1, 4)).hidden)


def test_the_real_ouro_has_its_published_size():
    full = {
        **OURO, "hidden_size": 2048, "num_hidden_layers": 24, "num_attention_heads": 16, "num_key_value_heads": 16,
        "head_dim": 128, "intermediate_size": 5632, "vocab_size": 49152, "max_position_embeddings": 65536,
        "layer_types": ["full_attention"] * 24,
    }  # fmt: skip
    config = config_from_ouro(full)
    assert accounting.parameters(config).total == 1_434_652_673
    assert (config.rope_theta, config.max_seq_len, config.halting.threshold) == (1e6, 65536, 1.0)


def test_newer_configs_keep_theta_in_rope_parameters():
    moved = {k: v for k, v in OURO.items() if k != "rope_theta"}
    assert config_from_ouro({**moved, "rope_parameters": {"rope_type": "default", "rope_theta": 5e5}}).rope_theta == 5e5
    beside = {**OURO, "rope_theta": 5e5, "rope_parameters": {"rope_type": "default"}}
    assert config_from_ouro(beside).rope_theta == 5e5


def test_a_changed_theta_is_exported_wherever_the_original_config_keeps_it(tmp_path):
    original = {**OURO, "rope_parameters": {"rope_type": "default", "rope_theta": 1e6}}
    longer = config_from_ouro(original).model_copy(update={"rope_theta": 5e6})
    export_ouro(build(longer), tmp_path, config=original)
    assert import_ouro(tmp_path).config.rope_theta == 5e6


@pytest.mark.parametrize(
    ("change", "named"),
    [
        ({"use_sliding_window": True}, "use_sliding_window"),
        ({"rope_scaling": {"type": "yarn"}}, "rope_scaling"),
        ({"layer_types": ["sliding_attention"] * N}, "layer_types"),
        ({"hidden_act": "gelu"}, "hidden_act"),
        ({"model_type": "llama"}, "of a model of type 'llama', not 'ouro'"),
    ],
)
def test_what_cannot_be_computed_is_refused(change: dict, named: str):
    with pytest.raises(ConfigError, match=named):
        config_from_ouro({**OURO, **change})


def test_damaged_checkpoints_name_the_damage(tmp_path: Path):
    with pytest.raises(ConfigError, match="config.json"):
        import_ouro(tmp_path)
    (tmp_path / "config.json").write_text('{"vocab_size": ')
    with pytest.raises(ConfigError, match=r"config.json is not JSON .*; download it again"):
        import_ouro(tmp_path)
    (tmp_path / "config.json").write_text('{"vocab_size": 30, "hidden_size": 16, "n_head": 2}')
    with pytest.raises(ConfigError, match="has no intermediate_size, num_hidden_layers, num_attention_heads"):
        import_ouro(tmp_path)
    weights = ouro_weights()
    gone = weights.pop("model.layers.1.mlp.up_proj.weight")
    with pytest.raises(ConfigError, match=r"missing.*layers\.1\.mlp\.up_proj"):
        import_ouro(write(tmp_path / "missing", weights))
    with pytest.raises(ConfigError, match="extra"):
        import_ouro(write(tmp_path / "extra", {**weights, "extra": gone}))
    with pytest.raises(ConfigError, match=r"up_proj.weight has shape \(16, 24\).*\(24, 16\)"):
        import_ouro(write(tmp_path / "shape", {**weights, "model.layers.1.mlp.up_proj.weight": gone.T.contiguous()}))
    folder = write(tmp_path / "shard", ouro_weights(), sharded=True)
    (folder / "model-00002-of-00002.safetensors").unlink()
    with pytest.raises(ConfigError, match="model-00002-of-00002"):
        import_ouro(folder)


def test_a_model_ouro_cannot_express_is_not_exported(tmp_path: Path):
    with pytest.raises(ConfigError, match=r"uniform layout.*norm_each_loop.*exit gate"):
        export_ouro(model(), tmp_path / "out")
    assert not (tmp_path / "out").exists()
