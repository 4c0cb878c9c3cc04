"""Loop-level schedules on shared weights, and the switches of the loop: sandwich norms, norm per loop, output gate."""

from __future__ import annotations

import pytest
import torch
from pydantic import ValidationError
from torch import nn

from lt2.analysis import accounting
from lt2.model import build
from lt2.ops.attention import attention_decode
from lt2.ops.reference import softmax_attention
from lt2.sequence import rotate
from tests.lt2.tiny import FULL, HYBRID, config, model, tokens

COARSE_TO_FINE = {
    "type": "loops",
    "mixers": [{"type": "full"}, *({"type": "window", "window": w} for w in (8, 4, 2))],
}
FINE_TO_COARSE = {"type": "loops", "mixers": COARSE_TO_FINE["mixers"][::-1]}


@pytest.mark.parametrize("layout", [COARSE_TO_FINE, FINE_TO_COARSE])
def test_schedule_runs_each_loop_with_its_own_mask_on_one_set_of_weights(layout: dict):
    net = model(layout, n_loops=4)
    assert sum(p.numel() for p in net.parameters()) == sum(p.numel() for p in model(FULL, n_loops=4).parameters())
    x = tokens(2, 13)
    seq = net.sequence_info(x, None, None, None)
    h = net.embed(x)
    for loop, spec in enumerate(layout["mixers"]):
        h_in = h
        for block in net.blocks:
            attention, y = block.mixers["softmax"], block.mixer_norm(h)
            q, k, v = (p(y).view(2, 13, 2, 8) for p in (attention.q_proj, attention.k_proj, attention.v_proj))
            q, k = rotate(q, *seq.rope[8]), rotate(k, *seq.rope[8])
            h = h + attention.o_proj(softmax_attention(q, k, v, window=spec.get("window")).reshape(2, 13, 16))
            h = h + block.ffn(block.ffn_norm(h))
        h = h + net.rho[loop] * h_in
    torch.testing.assert_close(net(x).hidden, net.norm(h), rtol=1e-10, atol=1e-11)


@pytest.mark.parametrize("layout", [COARSE_TO_FINE, FINE_TO_COARSE])
def test_schedule_decodes_with_one_window_sized_cache_per_loop(layout: dict, monkeypatch):
    def checked(q, k, v, lengths):
        assert lengths.max() <= k.shape[1], "a kernel would read beyond the cache"
        return attention_decode(q, k, v, lengths)

    monkeypatch.setattr("lt2.mixers.attention.attention_decode", checked)
    net = model(layout, n_loops=4)
    x = tokens(2, 16)
    whole = net(x).hidden
    cache = net.init_cache(2, 16)
    slots = [layer[0]["k"].shape[1] for layer in cache.layers]
    assert slots == [16 if m["type"] == "full" else m["window"] for m in layout["mixers"]]
    fp64_bytes = accounting.cache_bytes(net.config, 16, batch=2, dtype=torch.float64)
    assert cache.nbytes == fp64_bytes
    parts = [net(x[:, :5], cache=cache).hidden, *(net(x[:, i : i + 1], cache=cache).hidden for i in range(5, 16))]
    torch.testing.assert_close(torch.cat(parts, 1), whole, rtol=1e-10, atol=1e-11)


def test_schedule_trains_every_weight():
    net = build(config(COARSE_TO_FINE, n_loops=4)).double()
    net(tokens(2, 12)).hidden.sin().sum().backward()
    assert all(
        p.grad is not None and p.grad.abs().sum() > 0 for name, p in net.named_parameters() if name != "head.weight"
    )


@pytest.mark.parametrize(
    ("mixers", "rule"),
    [
        (COARSE_TO_FINE["mixers"][:3], "one per loop"),
        ([{"type": "full"}, {"type": "full", "num_kv_heads": 1}] * 2, "differ only in"),
        ([{"type": "full"}, {"type": "window", "window": 0}] * 2, "at least 1"),
    ],
)
def test_bad_schedules_fail_at_validation(mixers: list, rule: str):
    with pytest.raises(ValidationError, match=rule):
        config({"type": "loops", "mixers": mixers}, n_loops=4)


def test_sandwich_norms_follow_both_sublayers():
    net = model(sandwich_norm=True, n_loops=1, loop_residual=False)
    x = tokens(2, 6)
    seq, h = net.sequence_info(x, None, None, None), net.embed(x)
    for block, spec in zip(net.blocks, net.schedule[0]):
        y, _ = block.mixers[spec.weights](block.mixer_norm(h), spec, seq, None)
        h = h + nn.functional.rms_norm(y, (16,), block.mixer_post_norm.weight, 1e-6)
        h = h + nn.functional.rms_norm(block.ffn(block.ffn_norm(h)), (16,), block.ffn_post_norm.weight, 1e-6)
    assert torch.equal(net(x).hidden, net.norm(h))


def test_norm_each_loop_feeds_the_normed_state_on_and_ends_with_one_norm():
    net = model(norm_each_loop=True)
    x = tokens(2, 6)
    out = net(x, per_loop=True)
    seq, h = net.sequence_info(x, None, None, None), net.embed(x)
    for loop in range(3):
        h_in = h
        for block, spec in zip(net.blocks, net.schedule[loop]):
            h, _ = block(h, spec, seq)
        h = net.norm(h + net.rho[loop] * h_in)
        assert torch.equal(out.loops[loop], h)
    assert torch.equal(out.hidden, h)


@pytest.mark.parametrize("n_loops", [1, 2, 3, 5])
@pytest.mark.parametrize("norm_each_loop", [False, True])
def test_per_loop_states_are_those_of_shallower_runs(n_loops: int, norm_each_loop: bool):
    net = model(norm_each_loop=norm_each_loop)
    x = tokens(1, 6)
    deep = net(x, n_loops=5, per_loop=True).loops
    assert torch.equal(net(x, n_loops=n_loops).hidden, deep[n_loops - 1])


@pytest.mark.parametrize("gate", ["elementwise", "headwise"])
@pytest.mark.parametrize("mixer", [{"type": "full"}, {"type": "window", "window": 3}])
def test_output_gate_scales_attention_before_the_output_projection(gate: str, mixer: dict):
    layout = {"type": "uniform", "mixer": {**mixer, "gate": gate}}
    fresh = build(config(layout)).blocks[0].mixers["softmax"]
    assert fresh.gate_proj.weight.shape[0] == (16 if gate == "elementwise" else 2)
    assert not fresh.gate_proj.weight.any(), "every gate starts at one half"

    net = model(layout)
    attention, x = net.blocks[0].mixers["softmax"], tokens(2, 7)
    seq, y = net.sequence_info(x, None, None, None), net.embed(x)
    spec = net.schedule[0][0]
    gated, _ = attention(y, spec, seq, None)
    gates = torch.sigmoid(attention.gate_proj(y)).view(2, 7, 2, -1)
    attention.gate_proj, projection = None, attention.o_proj
    attention.o_proj = nn.Identity()
    o, _ = attention(y, spec, seq, None)
    expected = projection((o.view(2, 7, 2, 8) * gates).reshape(2, 7, 16))
    torch.testing.assert_close(gated, expected, rtol=1e-12, atol=1e-13)


def test_queries_and_keys_are_normed_by_their_own_weights():
    net = model({"type": "uniform", "mixer": {"type": "full", "qk_norm": True}})
    attention, x = net.blocks[0].mixers["softmax"], tokens(2, 7)
    nn.init.constant_(attention.q_norm.weight, 2.0)
    nn.init.constant_(attention.k_norm.weight, 3.0)
    sizes = [
        t.square().mean(-1) for t in attention.queries_and_keys(net.embed(x), net.sequence_info(x, None, None, None))
    ]
    for size, weight in zip(sizes, (2.0, 3.0)):
        torch.testing.assert_close(size, torch.full_like(size, weight**2), rtol=1e-3, atol=0)


def test_gate_on_a_recurrent_mixer_is_refused_by_name():
    with pytest.raises(ValidationError, match="gate"):
        config({**HYBRID, "mixer": {"type": "gdn", "gate": "elementwise"}})


def test_rho_is_zero_at_first_and_then_weighs_each_loops_input():
    fresh = build(config()).double()
    bare = build(config(loop_residual=False)).double()
    x = tokens(1, 5)
    assert torch.equal(fresh(x).hidden, bare(x).hidden)
    with torch.no_grad():
        fresh.rho[0] = 0.7
    seq, h = fresh.sequence_info(x, None, None, None), fresh.embed(x)
    for block, spec in zip(fresh.blocks, fresh.schedule[0]):
        h, _ = block(h, spec, seq)
    assert torch.equal(fresh(x, n_loops=1).hidden, fresh.norm(h + 0.7 * fresh.embed(x)))
