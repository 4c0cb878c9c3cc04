"""Our own Triton decode kernels on CPU tensors, run by test_decode_kernels.py in a process of its own."""

from __future__ import annotations

import os

os.environ["TRITON_INTERPRET"] = "1"

import pytest
import torch

from lt2.config import ModelConfig
from lt2.decode import merge_projections
from lt2.mixers.delta import GatedDeltaNet
from lt2.model import build
from lt2.ops.kernels.attention_decode import split_attention_decode
from lt2.ops.kernels.recurrent_step import recurrent_step
from lt2.ops.recurrence.gated_delta import gated_delta_rule_step
from lt2.ops.recurrence.gated_linear import gated_linear_attention_step


# Grouped queries, odd head sizes, lengths from 1 to the whole cache, and caches of one block and of several splits.
@pytest.mark.parametrize(("B", "M", "G", "R", "E"), [(2, 200, 3, 1, 32), (3, 130, 2, 4, 16), (2, 70, 1, 2, 24)])
def test_split_attention_reads_only_the_filled_part_of_each_row(B, M, G, R, E):
    torch.manual_seed(M)
    q, k, v = torch.randn(B, 1, G * R, E), torch.randn(B, M, G, E), torch.randn(B, M, G, E)
    lengths = torch.tensor([1, M, M // 2][:B])
    for row, length in enumerate(lengths.tolist()):
        k[row, length:], v[row, length:] = float("nan"), float("nan")
    out = split_attention_decode(q, k, v, lengths, E**-0.5)
    for row, length in enumerate(lengths.tolist()):
        keys, values = (x[row, :length].double().repeat_interleave(R, dim=1) for x in (k, v))
        scores = torch.einsum("hd,nhd->hn", q[row, 0].double(), keys) * E**-0.5
        expected = torch.einsum("hn,nhd->hd", scores.softmax(-1), values)
        torch.testing.assert_close(out[row, 0].double(), expected, rtol=0, atol=2e-6)


@pytest.mark.parametrize("delta", [False, True])
@pytest.mark.parametrize("decay", ["none", "head", "channel"])
@pytest.mark.parametrize(("K", "V"), [(16, 16), (24, 40)])
def test_recurrent_step_updates_its_state_in_place(K, V, decay, delta):
    torch.manual_seed(0)
    B, H = 2, 3
    q, k = torch.randn(2, B, H, K)
    k = torch.nn.functional.normalize(k, dim=-1)
    v, state = torch.randn(B, H, V), torch.randn(B, H, K, V)
    g = {"none": None, "head": -torch.rand(B, H), "channel": -torch.rand(B, H, K)}[decay]
    beta = torch.rand(B, H) if delta else None
    if beta is None:
        expected, new = gated_linear_attention_step(q, k, v, g, state, scale=0.3, backend="torch")
    else:
        expected, new = gated_delta_rule_step(q, k, v, g, beta, state, scale=0.3, backend="torch")
    out = recurrent_step(q, k, v, g, beta, state, 0.3)
    torch.testing.assert_close(out, expected, rtol=0, atol=2e-6)
    torch.testing.assert_close(state, new, rtol=0, atol=2e-6)


@pytest.mark.parametrize("merged", [False, True])
@pytest.mark.parametrize(
    ("mixer", "dtype", "bound"),
    [
        ({}, torch.float32, 1e-6),
        ({"use_gate": False, "allow_neg_eigval": True, "conv_size": 3, "head_dim": 24}, torch.float32, 1e-6),
        ({"head_dim": 20, "expand_v": 2}, torch.float32, 1e-6),
        ({}, torch.bfloat16, 1.5e-2),
    ],
    ids=["gated", "other sizes, no gate", "wide values", "bf16"],
)
@torch.no_grad()
def test_fused_gated_delta_steps_equal_the_whole_pass_in_fp64(mixer, dtype, bound, merged, monkeypatch):
    layout = {"type": "uniform", "mixer": {"type": "gdn", **mixer}}
    config = ModelConfig(vocab_size=32, dim=48, n_layers=1, n_loops=1, num_heads=3, max_seq_len=32, layout=layout)  # type: ignore[arg-type]
    model = build(config, seed=3).eval()
    norm = model.blocks[0].mixers["gdn"].o_norm.weight  # type: ignore[union-attr]
    norm.copy_(torch.linspace(0.5, 1.5, len(norm)))
    model = model.to(dtype)
    expected = build(config).double()
    expected.load_state_dict(model.state_dict())
    calls = []
    decoded = GatedDeltaNet.decoded
    monkeypatch.setattr(GatedDeltaNet, "decoded", lambda *args: calls.append(1) or decoded(*args))
    if merged:
        merge_projections(model)
    ids = torch.randint(32, (3, 9), generator=torch.Generator().manual_seed(1))
    cache = model.init_cache(3, 9)
    hidden = torch.cat([model(ids[:, t : t + 1], cache=cache).hidden for t in range(9)], dim=1)
    whole = expected(ids).hidden
    assert len(calls) == 9
    assert (hidden.double() - whole).norm() / whole.norm() < bound
