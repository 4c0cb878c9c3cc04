"""The oracles against closed forms that need no recurrence."""

from __future__ import annotations

import torch

from lt2.ops.reference import recurrent_gated_delta_rule, recurrent_gated_linear_attention, softmax_attention


def _random(*shape: int) -> torch.Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(sum(shape)), dtype=torch.float64)


def test_linear_attention_is_a_masked_matmul():
    q, k, v = _random(1, 9, 1, 4), _random(1, 9, 1, 4) * 2, _random(1, 9, 1, 3)
    g = -_random(1, 9, 1).abs()
    total = g[0, :, 0].cumsum(0)
    decay = (total[:, None] - total[None, :]).exp().tril()
    expected = 0.5 * ((q[0, :, 0] @ k[0, :, 0].T) * decay) @ v[0, :, 0]
    o, state = recurrent_gated_linear_attention(q, k, v, g)
    torch.testing.assert_close(o[0, :, 0], expected, rtol=1e-12, atol=1e-12)
    last = (k[0, :, 0] * (total[-1] - total).exp()[:, None]).T @ v[0, :, 0]
    torch.testing.assert_close(state[0, 0], last, rtol=1e-12, atol=1e-12)


def test_delta_rule_writes_an_associative_memory():
    keys = torch.eye(4, dtype=torch.float64)[[0, 1, 0, 2]].view(1, 4, 1, 4)
    v = _random(1, 4, 1, 3)
    beta = torch.ones(1, 4, 1, dtype=torch.float64)
    o, state = recurrent_gated_delta_rule(keys, keys, v, None, beta, scale=1.0)
    torch.testing.assert_close(o, v)  # each key reads back what was just written under it
    expected = torch.stack([v[0, 2, 0], v[0, 1, 0], v[0, 3, 0], torch.zeros(3, dtype=torch.float64)])
    torch.testing.assert_close(state[0, 0], expected)  # the third token replaced the first, the rest stayed


def test_delta_rule_decays_before_it_corrects():
    k = _random(1, 2, 1, 3)
    k = k / k.norm(dim=-1, keepdim=True)
    v, start = _random(1, 1, 1, 2), _random(1, 1, 3, 2)
    g, beta = -_random(1, 1, 1, 3).abs(), torch.full((1, 1, 1), 0.7, dtype=torch.float64)
    _, state = recurrent_gated_delta_rule(k[:, :1], k[:, :1], v, g, beta, initial_state=start)
    key = k[0, 0, 0]
    householder = torch.eye(3, dtype=torch.float64) - 0.7 * torch.outer(key, key)
    expected = householder @ torch.diag(g[0, 0, 0].exp()) @ start[0, 0] + 0.7 * torch.outer(key, v[0, 0, 0])
    torch.testing.assert_close(state[0, 0], expected, rtol=1e-12, atol=1e-12)


def test_softmax_attention_sees_window_document_and_group():
    q, k = torch.zeros(1, 6, 4, 2, dtype=torch.float64), _random(1, 6, 2, 2)
    v = torch.arange(12, dtype=torch.float64).view(1, 6, 2, 1)  # zero queries: outputs are means of visible values
    doc_ids = torch.tensor([[0, 0, 0, 1, 1, 1]])
    o = softmax_attention(q, k, v, window=2, doc_ids=doc_ids)
    first_head = torch.tensor([0.0, 1.0, 3.0, 6.0, 7.0, 9.0], dtype=torch.float64)
    torch.testing.assert_close(o[0, :, 0, 0], first_head)
    torch.testing.assert_close(o[0, :, 1], o[0, :, 0])
    torch.testing.assert_close(o[0, :, 2, 0], first_head + 1)
