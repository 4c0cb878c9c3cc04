"""The unrolled diagnostics against whole matrices computed here."""

from __future__ import annotations

import math

import pytest
import torch
from torch import Tensor

from lt2.analysis.diagnostics import Recorder, first_token_mass, unrolled
from lt2.config import ConfigError
from lt2.model import LoopedLM
from lt2.sequence import rotate
from tests.lt2.tiny import FULL, HYBRID, model, tokens


def attention_matrix(net: LoopedLM, layer: int, h: Tensor, window: int | None) -> Tensor:
    """(B, H, L, L) softmax weights of one layer on state h."""
    block, (B, L, _) = net.blocks[layer], h.shape
    attention, y = block.mixers["softmax"], block.mixer_norm(h)
    H, G, E = attention.heads
    rope = net.sequence_info(torch.zeros(B, L, dtype=torch.int64), None, None, None).rope[E]
    q = rotate(attention.q_proj(y).view(B, L, H, E), *rope)
    k = rotate(attention.k_proj(y).view(B, L, G, E), *rope).repeat_interleave(H // G, 2)
    scores = torch.einsum("bihe,bjhe->bhij", q, k) / math.sqrt(E)
    visible = torch.ones(L, L, dtype=torch.bool).tril()
    if window is not None:
        visible &= ~torch.ones(L, L, dtype=torch.bool).tril(-window)
    return scores.masked_fill(~visible, float("-inf")).softmax(-1)


@pytest.mark.parametrize("window", [None, 4])
@pytest.mark.parametrize("n_kv", [1, 2])
@pytest.mark.parametrize("query_chunk", [3, 256])
def test_every_reading_equals_its_definition(window: int | None, n_kv: int, query_chunk: int):
    mixer = {"type": "full"} if window is None else {"type": "window", "window": window}
    net = model({"type": "uniform", "mixer": {**mixer, "num_kv_heads": n_kv}})
    x = tokens(2, 11)
    recorder = Recorder(query_chunk)
    net(x, record=recorder)

    seq, h, at = net.sequence_info(x, None, None, None), net.embed(x), 0
    for loop in range(3):
        h_in = h
        for layer, block in enumerate(net.blocks):
            mass = attention_matrix(net, layer, h, window)[:, :, 1:, 0].mean().item()
            h, _ = block(h, net.schedule[loop][layer], seq)
            reading = recorder.readings[at]
            assert (reading.loop, reading.layer, reading.mixer) == (loop, layer, mixer["type"])
            assert reading.first_token_mass == pytest.approx(mass, rel=1e-12)
            assert reading.max_abs == pytest.approx(h.abs().max().item(), rel=1e-13)
            assert reading.rms == pytest.approx(h.square().mean(-1).sqrt().mean().item(), rel=1e-12)
            at += 1
        h = h + net.rho[loop] * h_in
    assert at == len(recorder.readings) == 6


def test_recurrent_layers_have_no_attention_mass():
    readings = unrolled(model(HYBRID), tokens(1, 6))
    assert [r.first_token_mass is None for r in readings] == [r.mixer == "gdn" for r in readings]
    assert {r.mixer for r in readings} == {"gdn", "full"}
    assert set(readings[0].as_dict()) == {"loop", "layer", "mixer", "first_token_mass", "max_abs", "rms"}


def test_recording_changes_nothing_and_follows_the_requested_depth():
    net, x = model(FULL), tokens(2, 7)
    recorder = Recorder()
    assert torch.equal(net(x, record=recorder, n_loops=5).hidden, net(x, n_loops=5).hidden)
    assert len(recorder.readings) == 10


def test_a_sink_is_seen():
    """Queries that point at the first key, and only at it, put all their mass there."""
    q = torch.zeros(1, 50, 2, 8)
    q[..., 0] = 100.0
    k = torch.zeros(1, 50, 2, 8)
    k[:, 0, :, 0] = 10.0
    assert first_token_mass(q, k) == pytest.approx(1.0, abs=1e-6)
    assert first_token_mass(torch.zeros_like(q), k) == pytest.approx(sum(1 / i for i in range(2, 51)) / 49, rel=1e-6)


def test_memory_is_a_chunk_of_queries_not_the_whole_matrix():
    """Largest intermediate tensor of 2,000 queries in chunks of 50."""
    sizes = []

    class Watch(torch.utils._python_dispatch.TorchDispatchMode):
        def __torch_dispatch__(self, func, types, args=(), kwargs=None):
            out = func(*args, **(kwargs or {}))
            sizes.extend(t.numel() for t in torch.utils._pytree.tree_leaves(out) if isinstance(t, Tensor))
            return out

    q = torch.randn(1, 2000, 2, 4)
    with Watch():
        first_token_mass(q, q, query_chunk=50)
    assert max(sizes) <= 2 * 50 * 2000


def test_one_token_is_refused():
    with pytest.raises(ConfigError, match="at least 2 tokens"):
        unrolled(model(FULL), tokens(1, 1))
