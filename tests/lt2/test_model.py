"""The looped model itself: depth, head, counts, initialisation, layouts."""

from __future__ import annotations

import math
from math import prod
from typing import Any

import pytest
import torch
from torch.utils.flop_counter import FlopCounterMode

from lt2.analysis import accounting
from lt2.config import ConfigError
from lt2.generate import generate
from lt2.mixer_configs.delta import delta_rule_flops
from lt2.mixer_configs.linear import linear_attention_flops
from lt2.mixers.recurrent import init_decay, log_decay
from lt2.model import LoopedLM, build
from lt2.ops.recurrence import chunking
from lt2.ops.recurrence.gated_delta import gated_delta_rule
from lt2.ops.recurrence.gated_linear import gated_linear_attention
from tests.lt2.mixers.samples import samples
from tests.lt2.tiny import FULL, HYBRID, config, model, tokens


def test_loops_reapply_the_same_blocks_and_add_their_input_scaled_by_rho():
    net, x = model(n_loops=3), tokens(2, 9)
    seq = net.sequence_info(x, None, None, None)
    h = net.embed(x)
    for loop in range(3):
        h_in = h
        for block, spec in zip(net.blocks, net.schedule[loop]):
            h = block(h, spec, seq)[0]
        h = h + net.rho[loop] * h_in
    assert torch.equal(net(x).hidden, net.norm(h))


def test_more_loops_than_trained_repeat_the_last_rho():
    net, x = model(n_loops=2), tokens(2, 9)
    longer = model(n_loops=4)
    longer.load_state_dict(net.state_dict() | {"rho": net.rho[[0, 1, 1, 1]]})
    assert torch.equal(net(x, n_loops=4).hidden, longer(x).hidden)
    cache = net.init_cache(2, 9, n_loops=4)
    assert len(cache.layers) == 4
    parts = [net(piece, cache=cache, n_loops=4).hidden for piece in x.split([4, 1, 1, 3], dim=1)]
    torch.testing.assert_close(torch.cat(parts, 1), longer(x).hidden, rtol=1e-11, atol=1e-11)


@pytest.mark.parametrize("n_loops", [0, -1])
def test_a_depth_below_one_is_refused_not_replaced(n_loops: int):
    net = model()
    with pytest.raises(ConfigError, match=f"n_loops is {n_loops}; it must be at least 1"):
        net(tokens(1, 3), n_loops=n_loops)
    with pytest.raises(ConfigError, match=f"n_loops is {n_loops}; it must be at least 1"):
        generate(net, [[1]], max_new_tokens=2, n_loops=n_loops)


@pytest.mark.parametrize(("prompts", "kind"), [(torch.tensor([[1, 2]]), "Tensor"), ([1, 2], "int"), ("text", "str")])
def test_prompts_that_are_no_lists_of_ids_are_told(prompts, kind: str):
    with pytest.raises(ConfigError, match=rf"prompt 0 is a {kind}; give each as a list of token ids"):
        generate(model(HYBRID), prompts, max_new_tokens=1)


@pytest.mark.parametrize("settings", [{"temperature": 1e-300}, {"temperature": 0.8, "top_p": 1e-300}])
def test_the_smallest_temperatures_and_shares_leave_the_likeliest_token(settings: dict):
    net = model()
    assert generate(net, [[1], [2]], max_new_tokens=3, **settings) == generate(net, [[1], [2]], max_new_tokens=3)


@pytest.mark.parametrize("seed", [10**20, -(2**63) - 1, 2**64 - 1])
def test_a_seed_beyond_64_bits_is_refused(seed: int):
    with pytest.raises(ConfigError, match=f"seed is {seed}; with those of all rows"):
        generate(model(), [[1], [2]], max_new_tokens=2, temperature=1.0, seed=seed)


def test_a_temperature_that_is_no_number_is_refused():
    with pytest.raises(ConfigError, match="temperature is nan"):
        generate(model(), [[1]], max_new_tokens=2, temperature=float("nan"))


def test_per_loop_outputs_are_those_of_each_depth():
    net, x = model(n_loops=3), tokens(2, 9)
    output = net(x, per_loop=True)
    assert len(output.loops) == 3
    assert torch.equal(output.loops[-1], output.hidden)
    for depth in (1, 2):
        assert torch.equal(output.loops[depth - 1], net(x, n_loops=depth).hidden)
    assert net(x).loops is None


@pytest.mark.parametrize("tie", [False, True])
def test_the_head_is_the_embedding_only_when_tied(tie: bool):
    net = model(tie_embeddings=tie)
    hidden = net(tokens(1, 5)).hidden
    weight = net.embed.weight if tie else net.head.weight
    assert net.head_weight is weight
    assert torch.equal(net.logits(hidden), hidden @ weight.T)
    assert (net.head is None) == tie


@pytest.mark.parametrize("tie", [False, True])
@pytest.mark.parametrize("layout", [FULL, HYBRID])
def test_parameters_are_counted_exactly(layout: dict, tie: bool):
    net = model(layout, tie_embeddings=tie)
    counted = accounting.parameters(net.config)
    stack = sum(p.numel() for p in net.blocks.parameters())
    assert counted.total == sum(p.numel() for p in net.parameters())
    assert (counted.stack, counted.unrolled) == (stack, counted.total + 2 * stack)
    assert counted.embedding == 23 * 16 * (1 if tie else 2)


def test_loops_cost_flops_but_no_parameters():
    shallow, deep = config(n_loops=1), config(n_loops=4)
    extra = accounting.parameters(deep).total - accounting.parameters(shallow).total
    assert extra == 3 * 16  # rho
    head = 2.0 * 23 * 16
    per_loop = accounting.forward_flops(shallow, 32) - head
    assert accounting.forward_flops(deep, 32) == pytest.approx(4 * per_loop + head, rel=1e-12)


@pytest.mark.parametrize("rule", [gated_delta_rule, gated_linear_attention])
def test_the_flops_of_a_recurrence_are_those_of_the_products_that_run(rule, monkeypatch: pytest.MonkeyPatch):
    B, L, H, K, V = 2, 256, 3, 24, 40
    monkeypatch.setattr(chunking, "CHUNK", 64)  # that of the CUDA kernels, by which FLOPs are counted
    q, k, v, g, beta = (torch.rand(B, L, H, *width) for width in ((K,), (K,), (V,), (), ()))
    # The counter does not know this one; shapes are (N, I, J), (N, I, M) and (N, M, J).
    in_place: Any = {torch.ops.aten.baddbmm_: lambda out, a, b, **_: 2 * prod(a) * b[2]}
    with FlopCounterMode(display=False, custom_mapping=in_place) as counter:
        rule(q, k, v, -g, *([beta] if rule is gated_delta_rule else []))
    by_shapes = delta_rule_flops if rule is gated_delta_rule else linear_attention_flops
    assert counter.get_total_flops() == B * L * by_shapes(H, K, V)


@pytest.mark.parametrize("n_loops", [None, 1, 5])
def test_cache_bytes_are_those_of_the_cache(n_loops: int | None):
    net = model(HYBRID, n_loops=3)
    cache = net.init_cache(2, 11, n_loops=n_loops)
    held = sum(t.nbytes for loop in cache.layers for layer in loop for t in layer.values())
    assert accounting.cache_bytes(net.config, 11, batch=2, dtype=torch.float64, n_loops=n_loops) == held


@pytest.mark.parametrize("layout", [FULL, {"type": "uniform", "mixer": {"type": "full", "num_kv_heads": 1}}])
def test_flops_of_projections_ffn_and_head_are_those_torch_counts(layout: dict):
    net, length = model(layout), 8
    with FlopCounterMode(display=False) as counter:
        net.logits(net(tokens(1, length)).hidden)
    counted = counter.get_flop_counts()["Global"]
    projections = sum(n for op, n in counted.items() if op in (torch.ops.aten.mm, torch.ops.aten.addmm))
    config = net.config
    mixing = config.n_loops * config.n_layers * config.layout.mixer.sequence_flops(config.dims, length)
    assert projections == length * (accounting.forward_flops(config, length) - mixing)


def test_initial_weights_depend_on_the_seed_alone(monkeypatch: pytest.MonkeyPatch):
    seeded: list[int] = []
    monkeypatch.setattr(torch.cuda, "manual_seed_all", seeded.append)
    first, torch_state = build(config(), seed=3), torch.random.get_rng_state()
    again, other = build(config(), seed=3), build(config(), seed=4)
    assert torch.equal(torch.random.get_rng_state(), torch_state)
    assert not seeded, "a card's random state is the caller's too"
    assert all(torch.equal(a, b) for a, b in zip(first.parameters(), again.parameters()))
    assert not torch.equal(first.embed.weight, other.embed.weight)
    assert not first.rho.any()


def test_initial_weights_are_truncated_normal_with_fan_in_scale():
    net = build(config(FULL, vocab_size=4000, dim=64, num_heads=4), seed=0)
    for weight, fan_in in ((net.embed.weight, 64), (net.blocks[0].ffn.down_proj.weight, 24)):
        scaled = weight.detach() * fan_in**0.5
        assert float(scaled.abs().max()) <= 3 + 1e-6
        # A normal cut at 3 sigma has a standard deviation of 0.9866.
        assert float(scaled.std()) == pytest.approx(0.9866, abs=4 * (2 * weight.numel()) ** -0.5)


@pytest.mark.parametrize(
    "mixer",
    [
        {"type": "full"},
        {"type": "window", "window": 3},
        {"type": "mla", "kv_rank": 8, "rope_head_dim": 4, "v_head_dim": 3},
        {"type": "dsa", "top_k": 3, "index_dim": 8, "index_rope_dim": 4},
    ],
    ids=lambda mixer: mixer["type"],
)
def test_the_output_gate_of_attention_is_as_wide_as_asked_and_starts_half_open(mixer: dict):
    for gate in ("elementwise", "headwise"):
        for block in build(config({"type": "uniform", "mixer": {**mixer, "gate": gate}})).blocks:
            (attention,) = block.mixers.values()
            width = attention.o_proj.in_features if gate == "elementwise" else 2
            assert torch.equal(attention.gate_proj.weight, torch.zeros(width, 16))


@pytest.mark.parametrize(("kind", "least"), [("gdn", 1e-4), ("kda", 1.0), ("mamba2", 1.0)])
def test_decays_start_in_the_range_of_mamba2s(kind: str, least: float):
    mixer = {"type": kind, "head_dim": 2}
    net = build(config({"type": "uniform", "mixer": mixer}, dim=128, num_heads=64, n_layers=1), seed=0)
    (layer,) = net.blocks[0].mixers.values()
    A, dt = layer.A_log.detach().exp(), torch.nn.functional.softplus(layer.dt_bias.detach())
    for found, low, high in ((A, least, 16.0), (dt.log(), math.log(1e-3), math.log(1e-1))):
        assert low - 1e-3 <= float(found.min()) < low + (high - low) / 16
        assert high - (high - low) / 8 < float(found.max()) <= high + 1e-3


def test_a_decay_is_no_coarser_in_half_precision():
    a, A_log, dt_bias = (t.bfloat16() for t in torch.randn(3, 50, generator=torch.Generator().manual_seed(0)))
    found = log_decay(a, A_log, dt_bias)
    torch.testing.assert_close(found, log_decay(a.double(), A_log, dt_bias).float(), rtol=1e-5, atol=0)


def test_short_convolutions_start_even_within_the_root_of_their_size():
    mixer = {"type": "mamba2", "head_dim": 16, "conv_size": 9}
    conv = build(config({"type": "uniform", "mixer": mixer}, dim=64)).blocks[0].mixers["mamba2"].conv
    for found in (conv.weight.detach(), conv.bias.detach()):
        assert -1 / 3 <= float(found.min()) < -0.3
        assert 0.3 < float(found.max()) <= 1 / 3


def test_biases_are_where_fla_has_them_or_where_they_are_asked_for():
    biases: dict[str, set[str]] = {
        "mamba2": {"conv.bias", "dt_bias"},
        "gdn": {"dt_bias"},
        "kda": {"dt_bias", "gate_proj.1.bias"},
        "gla": {"decay_proj.1.bias"},
        "dsa": {"indexer.k_norm.bias"},
    }
    for sample in samples().values():
        with torch.device("meta"):
            net = LoopedLM(sample.config)
        prefix = f"blocks.0.mixers.{sample.mixer.weights}."
        found = {name for name in net.state_dict() if name.endswith("bias") and not name.startswith("blocks.1.")}
        asked = {f"{projection}_proj.bias" for projection in getattr(sample.mixer, "bias", None) or ""}
        assert found == {prefix + name for name in biases.get(sample.mixer.type, set()) | asked}


def test_a_time_step_starts_as_it_was_drawn():
    A, bias = torch.empty(9), torch.empty(99)
    torch.manual_seed(0)
    init_decay(A, bias, least=1.0)
    torch.manual_seed(0)
    torch.testing.assert_close(A.exp(), torch.empty(9).uniform_(1, 16))
    drawn = torch.empty(99).uniform_(math.log(1e-3), math.log(1e-1)).exp()
    torch.testing.assert_close(torch.nn.functional.softplus(bias), drawn, rtol=1e-5, atol=0)


def test_global_depth_init_shrinks_only_the_projections_into_the_residual_stream():
    plain, scaled = build(config(), seed=1), build(config(global_depth_init=True), seed=1)
    for (name, a), b in zip(plain.named_parameters(), scaled.parameters()):
        shrunk = name.endswith(("o_proj.weight", "down_proj.weight"))
        torch.testing.assert_close(b, a * (2 * (plain.config.n_layers + 1)) ** -0.5 if shrunk else a, msg=name)


def test_hybrid_layers_hold_only_the_mixer_they_run():
    net = model(HYBRID)
    assert [list(block.mixers) for block in net.blocks] == [["gdn"], ["softmax"]]


def test_a_full_cache_says_so():
    net = model()
    cache = net.init_cache(1, 4)
    net(tokens(1, 3), cache=cache)
    with pytest.raises(ValueError, match=r"cache of 4 tokens is too short for 3 \+ 2"):
        net(tokens(1, 2), cache=cache)
    with pytest.raises(ValueError, match="packed documents"):
        net(tokens(1, 1), cache=cache, doc_ids=torch.zeros(1, 1))


@pytest.mark.parametrize("n_loops", [2, 5])
def test_a_cache_of_another_depth_is_refused_before_anything_is_written(n_loops: int):
    net, x = model(n_loops=3), tokens(1, 6)
    cache = net.init_cache(1, 6)
    net(x[:, :4], cache=cache)
    told = rf"cache has 3 loops and this pass runs {n_loops}; .*init_cache\(..., n_loops={n_loops}\)"
    with pytest.raises(ValueError, match=told):
        net(x[:, 4:], cache=cache, n_loops=n_loops)
    torch.testing.assert_close(net(x[:, 4:], cache=cache).hidden, net(x).hidden[:, 4:], rtol=1e-11, atol=1e-11)
