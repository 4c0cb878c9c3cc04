from __future__ import annotations

import pytest
import torch
from pydantic import ValidationError
from torch.nn import functional as F

from lt2.config import Dims
from lt2.mixer_configs import MLAConfig
from tests.lt2.mixers import sparse_models

DIMS = Dims(dim=16, num_heads=2)
SMALL = {"type": "mla", "kv_rank": 6, "rope_head_dim": 4}
L = 13


def rotated(x: torch.Tensor, position: int) -> torch.Tensor:
    """Rotary positions of one vector as 2×2 rotations of (i, i + d/2)."""
    half = len(x) // 2
    out = torch.empty_like(x)
    for i in range(half):
        angle = position * 10_000.0 ** -torch.tensor(2 * i / len(x))  # fp32, as the model's tables
        out[i] = x[i] * angle.cos() - x[i + half] * angle.sin()
        out[i + half] = x[i + half] * angle.cos() + x[i] * angle.sin()
    return out


def latent_attention(mixer, spec, x, starts):
    """Head by head and token by token from the parameters; starts[t] is the first token of t's document."""
    H, E, V = spec.heads(DIMS)
    C, P = spec.kv_rank, spec.rope_head_dim
    low = x if spec.q_rank is None else F.rms_norm(mixer.q_down(x), (spec.q_rank,), mixer.q_norm.weight, 1e-6)
    q = mixer.q_proj(low).view(L, H, E + P)
    down = mixer.kv_down(x)
    latent = F.rms_norm(down[:, :C], (C,), mixer.kv_norm.weight, 1e-6)
    kv = mixer.kv_up(latent).view(L, H, E + V)
    rows = []
    for t in range(L):
        heads = []
        for h in range(H):
            query = torch.cat([q[t, h, :E], rotated(q[t, h, E:], t - starts[t])])
            seen = range(starts[t], t + 1)
            keys = torch.stack([torch.cat([kv[s, h, :E], rotated(down[s, C:], s - starts[t])]) for s in seen])
            weights = (keys @ query / (E + P) ** 0.5).softmax(dim=0)
            heads.append(weights @ kv[list(seen), h, E:])
        o = torch.stack(heads)
        if spec.gate is not None:
            o = o * mixer.gate_proj(x[t]).sigmoid().view(H, -1)
        rows.append(o.flatten())
    return mixer.o_proj(torch.stack(rows))


@pytest.mark.parametrize(
    "fields",
    [
        {},
        {"q_rank": 5, "gate": "elementwise"},
        {"head_dim": 3, "v_head_dim": 9, "gate": "headwise"},
        {"num_heads": 4, "v_head_dim": 2},
    ],
)
@pytest.mark.parametrize("documents", [False, True])
def test_mixer_is_latent_attention(fields, documents):
    mixer, spec = sparse_models.lone_mixer({**SMALL, **fields}, DIMS)
    x = torch.randn(2, L, 16, dtype=torch.float64, generator=torch.Generator().manual_seed(0))
    doc_ids = torch.tensor([[0] * 5 + [1] * 8, [0] * 13]) if documents else None
    starts = [[0] * 5 + [5] * 8, [0] * 13] if documents else [[0] * 13] * 2
    y, aux = mixer(x, spec, sparse_models.sequence(spec, DIMS, L, doc_ids), None)
    expected = torch.stack([latent_attention(mixer, spec, x[b], starts[b]) for b in range(2)])
    torch.testing.assert_close(y, expected, rtol=1e-10, atol=1e-12)
    assert aux is None
    parameters = list(mixer.parameters())
    direction = torch.randn(y.shape, dtype=torch.float64, generator=torch.Generator().manual_seed(3))
    got, want = (torch.autograd.grad((o * direction).sum(), parameters) for o in (y, expected))
    torch.testing.assert_close(got, want, rtol=1e-9, atol=1e-11)


@pytest.mark.parametrize("fields", [{}, {"q_rank": 5, "v_head_dim": 3, "gate": "headwise"}])
def test_absorbed_decoding_reads_only_latents(fields):
    net = sparse_models.model({**SMALL, **fields}).eval()
    ids = sparse_models.tokens(2, L)
    cache = net.init_cache(2, L)
    assert {name: tensor.shape for name, tensor in cache.layers[0][0].items()} == {"latent": (2, L, 6 + 4)}
    pieces = [net(ids[:, start:end], cache=cache).hidden for start, end in [(0, 4), (4, 5), (5, 9), (9, 10), (10, 13)]]
    torch.testing.assert_close(torch.cat(pieces, dim=1), net(ids).hidden, rtol=1e-10, atol=1e-12)


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"num_heads": 3}, "num_heads 3 does not divide dim 16; set head_dim"),
        ({"kv_rank": 0}, "kv_rank 0 and q_rank None must be at least 1"),
        ({"q_rank": 0}, "kv_rank 512 and q_rank 0 must be at least 1"),
        ({"rope_head_dim": 5}, "rope_head_dim is 5; rotary positions need an even number"),
    ],
)
def test_bad_configs_name_the_rule_and_the_values(fields, message):
    with pytest.raises(ValueError, match=message):
        MLAConfig(**fields).check(DIMS)
    with pytest.raises(ValidationError, match=message):
        sparse_models.model({"type": "mla", **fields})


def test_published_defaults():
    spec = MLAConfig()
    assert (spec.kv_rank, spec.rope_head_dim) == (512, 64)
    dims = Dims(dim=2048, num_heads=16)
    assert spec.heads(dims) == (16, 128, 128)
    assert spec.cache_spec(dims, 100) == {"latent": ((100, 576), "compute")}
