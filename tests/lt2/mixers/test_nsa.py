from __future__ import annotations

import pytest
import torch
from pydantic import ValidationError

from lt2.config import Dims
from lt2.mixer_configs import NSAConfig
from lt2.mixers import nsa
from lt2.ops.sparse import bags, compressed
from lt2.sequence import rotate
from tests.lt2.mixers import sparse_models
from tests.lt2.ops import sparse_oracles as oracle

DIMS = Dims(dim=16, num_heads=4)
SMALL = {"type": "nsa", "backend": "torch", "num_kv_heads": 2, "block_size": 4, "num_blocks": 4, "window": 5}


@pytest.mark.parametrize("documents", [False, True])
@pytest.mark.parametrize("rope", [True, False])
def test_mixer_is_three_gated_branches(rope, documents):
    mixer, spec = sparse_models.lone_mixer({**SMALL, "rope": rope}, DIMS)
    x = torch.randn(2, 27, 16, dtype=torch.float64, generator=torch.Generator().manual_seed(0))
    doc_ids = torch.tensor([[0] * 8 + [1] * 19, [0] * 27]) if documents else None
    seq = sparse_models.sequence(spec, DIMS, 27, doc_ids)
    y, aux = mixer(x, spec, seq, None)

    q, k, v = mixer.q_proj(x).view(2, 27, 4, 4), mixer.k_proj(x).view(2, 27, 2, 4), mixer.v_proj(x).view(2, 27, 2, 4)
    if rope:
        q, k = rotate(q, *seq.rope[4]), rotate(k, *seq.rope[4])
    gates = mixer.branch_proj(x).sigmoid().view(2, 27, 4, 3)
    sizes = {"block_size": 4, "num_blocks": 4, "window": 5, "doc_ids": doc_ids}
    expected = mixer.o_proj(oracle.nsa(q, k, v, gates, **sizes).flatten(2))
    torch.testing.assert_close(y, expected, rtol=1e-10, atol=1e-12)
    assert aux is None
    parameters = list(mixer.parameters())
    direction = torch.randn(y.shape, dtype=torch.float64, generator=torch.Generator().manual_seed(3))
    got, want = (torch.autograd.grad((o * direction).sum(), parameters, retain_graph=True) for o in (y, expected))
    torch.testing.assert_close(got, want, rtol=1e-9, atol=1e-11)


def test_a_distant_token_is_seen_through_compression_and_dropped_blocks_are_not():
    """Gates open one branch at a time: the window forgets, the selection reads whole blocks, compression sees all."""
    mixer, spec = sparse_models.lone_mixer({**SMALL, "rope": False}, DIMS)
    seq = sparse_models.sequence(spec, DIMS, 40)
    x = torch.randn(1, 40, 16, dtype=torch.float64, generator=torch.Generator().manual_seed(0), requires_grad=True)
    reach = {}
    for branch, name in enumerate(("compressed", "selected", "window")):
        gates = torch.full((4, 3), -1e3, dtype=torch.float64)
        gates[:, branch] = 1e3
        handle = mixer.branch_proj.register_forward_hook(
            lambda module, args, output, gates=gates: gates.flatten().expand(output.shape)
        )
        y, _ = mixer(x, spec, seq, None)
        handle.remove()
        (grad,) = torch.autograd.grad(y[0, -2].sum(), x)
        reach[name] = set(grad[0].abs().sum(dim=-1).nonzero().flatten().tolist())
    assert reach["window"] == {34, 35, 36, 37, 38}
    assert reach["compressed"] == {*range(36), 38}  # the own block is not fully past; 38 is the query
    # First, previous and own block up to the query, and one more block per KV head by score.
    assert {*range(4), *range(32, 39)} < reach["selected"]
    assert len(reach["selected"]) in (15, 19)


def test_cached_blocks_are_the_means_of_the_cached_tokens():
    net = sparse_models.model(SMALL).eval()
    ids = sparse_models.tokens(2, 21)
    cache = net.init_cache(2, 21)
    for start, end in [(0, 6), (6, 7), (7, 15), (15, 21)]:
        net(ids[:, start:end], cache=cache)
    for layer in (layer for loop in cache.layers for layer in loop):
        for name in ("k", "v"):
            means = layer[name].view(2, 2, 6, 4, 4)[:, :, :5].mean(dim=3)
            torch.testing.assert_close(layer[f"{name}_pooled"][:, :, :5], means)
            assert means.all()


def test_training_memory_grows_linearly(monkeypatch):
    monkeypatch.setitem(bags.GATHERED, "cpu", 1 << 12)
    monkeypatch.setitem(bags.INVERTED, "cpu", 1 << 12)
    monkeypatch.setattr(compressed, "CPU_PIECE", 1 << 12)
    small, medium, large = (sparse_models.peak_bytes(SMALL, DIMS, length) for length in (128, 256, 512))
    assert large - medium < 2.5 * (medium - small)  # 2 is linear, 4 quadratic
    assert large <= 2.1 * medium


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({}, "4 query heads over 1 KV heads is a group of 4, but fla's kernel needs a power of two >= 16"),
        ({"num_heads": 48, "num_kv_heads": 2, "head_dim": 4}, "48 query heads over 2 KV heads is a group of 24"),
        ({"num_heads": 16, "num_blocks": 6, "head_dim": 4}, "num_blocks is 6, but fla's kernel needs a power of two"),
        ({"num_heads": 16, "block_size": 16, "head_dim": 4}, "block_size 16 with num_blocks 16: .* two >= 32"),
        ({"num_heads": 3, "backend": "torch"}, "num_heads 3 does not divide dim 16; set head_dim"),
        ({"num_kv_heads": 3, "backend": "torch"}, "num_kv_heads 3 does not divide num_heads 4"),
        ({"window": 0, "backend": "torch"}, "window is 0; it counts the token itself"),
        ({"num_blocks": 3, "backend": "torch"}, "num_blocks is 3; the first, previous and current block"),
        ({"block_size": 0, "backend": "torch"}, "block_size is 0; it must be at least 1"),
        ({"head_dim": 5, "backend": "torch"}, "rotary positions need an even head_dim, got 5"),
    ],
)
def test_bad_configs_name_the_rule_and_the_values(fields, message):
    with pytest.raises(ValueError, match=message):
        NSAConfig(**fields).check(DIMS)
    with pytest.raises(ValidationError, match=message):
        sparse_models.model({"type": "nsa", **fields})


@pytest.mark.parametrize(("backend", "asked"), [("torch", "torch"), ("fla", "auto")])
def test_the_torch_backend_is_asked_for_where_the_config_names_it(backend, asked, monkeypatch):
    heard = []

    def attention(q, *_, backend, **__):
        heard.append(backend)
        return q

    monkeypatch.setattr(nsa, "nsa_attention", attention)
    mixer, spec = sparse_models.lone_mixer({"type": "nsa", "num_heads": 16, "head_dim": 2, "backend": backend}, DIMS)
    mixer(torch.zeros(1, 3, 16, dtype=torch.float64), spec, sparse_models.sequence(spec, DIMS, 3), None)
    assert heard == [asked]


def test_the_group_rule_holds_at_the_paper_sizes():
    NSAConfig().check(Dims(dim=1024, num_heads=16))
    NSAConfig().check(Dims(dim=2048, num_heads=32))
    assert NSAConfig().heads(Dims(dim=2048, num_heads=32)) == (32, 2, 64)


def test_sequence_flops_count_the_keys_read():
    spec = NSAConfig(num_heads=1, num_kv_heads=1, head_dim=1, block_size=2, num_blocks=4, window=3, backend="torch")
    length = 20
    read = sum(
        (t + 1) / 2 + min(t + 1, 8) + min(t + 1, 3)  # pooled blocks up to half a block, selected tokens, window
        for t in range(length)
    )
    assert spec.sequence_flops(DIMS, length) == pytest.approx(4 * read / length)
