"""Our own Triton decode kernels on CPU tensors, run by test_decode_kernels.py in a process of its own."""

from __future__ import annotations

import os

os.environ["TRITON_INTERPRET"] = "1"

import pytest
import torch

from lt2.ops.decode_kernel import split_attention_decode
from lt2.ops.gated_delta import gated_delta_rule_step
from lt2.ops.gated_linear import gated_linear_attention_step
from lt2.ops.step_kernel import recurrent_step


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
