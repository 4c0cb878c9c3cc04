from __future__ import annotations

import pytest
import torch
from pydantic import ValidationError

from lt2.config import Dims
from lt2.mixer_configs import DSAConfig
from lt2.mixers import dsa
from lt2.ops import reference
from lt2.ops.sparse import bags, indexer
from lt2.sequence import rotate
from tests.lt2.mixers import sparse_models
from tests.lt2.ops import sparse_oracles as oracle

DIMS = Dims(dim=16, num_heads=4)
SMALL = {"type": "dsa", "top_k": 6, "num_kv_heads": 2, "index_heads": 2, "index_dim": 8, "index_rope_dim": 4}
L = 24


def late(mixer: dict) -> dict:
    """Past its warm-up, whatever the step."""
    return {**mixer, "warmup_steps": 0}


def as_softmax(net: torch.nn.Module) -> dict[str, torch.Tensor]:
    """The parameters of a DSA model under the names that full attention gives them, the indexer left out."""
    state = net.state_dict().items()
    return {name.replace(".dsa.", ".softmax."): value for name, value in state if ".indexer." not in name}


def dense_dsa(mixer, spec, seq, x, first):
    """The mixer through dense L×L masks: (y, KL over the selected keys), indexer and attention both differentiable."""
    B = len(x)
    q, k, v = mixer.q_proj(x).view(B, L, 4, 4), mixer.k_proj(x).view(B, L, 2, 4), mixer.v_proj(x).view(B, L, 2, 4)
    if spec.qk_norm:
        q, k = (t / (t.square().mean(-1, keepdim=True) + DIMS.norm_eps).sqrt() for t in (q, k))
        q, k = q * mixer.q_norm.weight, k * mixer.k_norm.weight
    if spec.rope:
        q, k = rotate(q, *seq.rope[4]), rotate(k, *seq.rope[4])
    index_q, index_k, index_w = mixer.indexer(x, seq)
    visible = torch.zeros(B, L, L, dtype=torch.bool)
    divergence = 0.0
    scores = {}
    for b in range(B):
        for t in range(L):
            start = int(first[b, t])
            prefix = oracle.index_score(index_q[b, t], index_k[b, start : t + 1], index_w[b, t])
            order = sorted(range(len(prefix)), key=lambda s: (prefix[s].item(), s), reverse=True)  # ties to the latest
            best = torch.tensor(sorted(order[: spec.top_k]))
            visible[b, t, start + best] = True
            scores[b, t] = prefix[best]
    grouped = q.view(B, L, 2, 2, 4).permute(0, 2, 1, 3, 4).flatten(0, 1)
    tables = (a.transpose(1, 2).flatten(0, 1) for a in (k, v))
    o, weights = oracle.masked_attention(grouped, *tables, visible.repeat_interleave(2, dim=0), 0.5)
    p = weights.view(B, 2, L, 2, L).mean(dim=(1, 3)).detach()
    for (b, t), score in scores.items():
        target = p[b, t][visible[b, t]]
        divergence = divergence + (target * (target.log() - score.log_softmax(dim=0))).sum()
    o = o.view(B, 2, L, 2, 4).permute(0, 2, 1, 3, 4).reshape(B, L, 4, 4)
    return o, divergence / (B * L)


@pytest.mark.parametrize(("gate", "top_k"), [(None, 6), ("elementwise", 6), ("headwise", 6), (None, L)])
@pytest.mark.parametrize("documents", [False, True])
def test_mixer_attends_to_the_indexers_choice(documents, gate, top_k):
    """Or, as in its warm-up, to every key."""
    fields = {"gate": gate, "qk_norm": gate is not None, "rope": gate != "headwise"}
    mixer, spec = sparse_models.lone_mixer({**late(SMALL), **fields, "top_k": top_k}, DIMS)
    x = torch.randn(2, L, 16, dtype=torch.float64, generator=torch.Generator().manual_seed(0))
    doc_ids = torch.tensor([[0] * 9 + [1] * 15, [0] * 24]) if documents else None
    first = torch.tensor([[0] * 9 + [9] * 15, [0] * 24]) if documents else torch.zeros(2, L)
    seq = sparse_models.sequence(spec, DIMS, L, doc_ids)
    y, aux = mixer(x, spec, seq, None)
    aux = aux.mean()
    o, divergence = dense_dsa(mixer, spec, seq, x, first)
    if gate is not None:
        o = o * mixer.gate_proj(x).sigmoid().view(2, L, 4, -1)
    expected = mixer.o_proj(o.flatten(2))
    torch.testing.assert_close(y, expected, rtol=1e-10, atol=1e-12)
    torch.testing.assert_close(aux, divergence, rtol=1e-10, atol=1e-12)
    assert mixer.eval()(x, spec, seq, None)[1] is None

    parameters = list(mixer.parameters())
    direction = torch.randn(y.shape, dtype=torch.float64, generator=torch.Generator().manual_seed(3))
    got, want = (
        torch.autograd.grad((a * direction).sum() + b, parameters) for a, b in ((y, aux), (expected, divergence))
    )
    torch.testing.assert_close(got, want, rtol=1e-9, atol=1e-11)


@pytest.mark.parametrize("turned", [0, 4, 8])
def test_the_indexer_rotates_some_channels_and_scales_its_heads(turned):
    mixer, spec = sparse_models.lone_mixer({**SMALL, "index_rope_dim": turned}, DIMS)
    x = torch.randn(2, L, 16, dtype=torch.float64, generator=torch.Generator().manual_seed(0))
    seq, indexer = sparse_models.sequence(spec, DIMS, L), mixer.indexer
    q, k, w = indexer(x, seq)
    key = x @ indexer.k_proj.weight.T
    key = (key - key.mean(-1, keepdim=True)) / (key.var(-1, unbiased=False, keepdim=True) + indexer.k_norm.eps).sqrt()
    key = key * indexer.k_norm.weight + indexer.k_norm.bias
    angle = torch.arange(L)[:, None] * DIMS.rope_theta ** -(torch.arange(0, turned, 2) / max(1, turned))

    def rotated(t):  # (2, L, n, 8)
        first, second = t[..., : turned // 2], t[..., turned // 2 : turned]
        z = torch.complex(first, second) * torch.polar(torch.ones_like(angle), angle)[:, None]
        return torch.cat([z.real, z.imag, t[..., turned:]], -1)

    torch.testing.assert_close(q, rotated((x @ indexer.q_proj.weight.T).view(2, L, 2, 8)), rtol=0, atol=1e-5)
    torch.testing.assert_close(k, rotated(key[:, :, None]).squeeze(2), rtol=0, atol=1e-5)
    torch.testing.assert_close(w, x @ indexer.w_proj.weight.T / 4)


def test_every_key_selected_is_full_attention():
    """On the same weights, with the short cut taken (top_k L) and not; a token with more keys than top_k differs."""
    full = sparse_models.model({"type": "full", "num_kv_heads": 2}).eval()
    ids = sparse_models.tokens(2, L)
    for top_k in (L, L - 1, L - 2):
        sparse = sparse_models.model({**SMALL, "top_k": top_k}).eval()
        full.load_state_dict(as_softmax(sparse))
        got, want = sparse(ids).hidden, full(ids).hidden
        torch.testing.assert_close(got[:, :top_k], want[:, :top_k], rtol=1e-10, atol=1e-12)
        assert (top_k == L) == torch.allclose(got, want, rtol=1e-6, atol=1e-9)


def test_language_loss_and_indexer_loss_touch_disjoint_parameters():
    net = sparse_models.model(SMALL)
    ids = sparse_models.tokens(2, L)
    for step in (0, 10**6):
        output = net(ids, step=step)
        names, parameters = zip(*net.named_parameters())
        from_aux = torch.autograd.grad(output.aux["dsa"].sum(), parameters, retain_graph=True, allow_unused=True)
        from_loss = torch.autograd.grad(output.hidden.square().sum(), parameters, allow_unused=True)
        for name, aux, loss in zip(names, from_aux, from_loss):
            assert (aux is not None and bool(aux.any())) == (".indexer." in name), name
            assert (loss is not None and bool(loss.any())) == (".indexer." not in name and name != "head.weight"), name


def test_warm_up_is_dense_and_then_sparse():
    net = sparse_models.model({**SMALL, "warmup_steps": 3})
    full = sparse_models.model({"type": "full", "num_kv_heads": 2})
    full.load_state_dict(as_softmax(net))
    ids = sparse_models.tokens(2, L)
    dense = full(ids).hidden
    for step in (0, 2):
        torch.testing.assert_close(net(ids, step=step).hidden, dense, rtol=1e-10, atol=1e-12)
    sparse = net(ids, step=3).hidden
    assert not torch.allclose(sparse, dense, rtol=1e-3)
    assert torch.equal(net(ids).hidden, sparse)  # no step: evaluation is sparse
    assert (net(ids, step=2).aux["dsa"] != net(ids, step=3).aux["dsa"]).all()
    assert net.training
    assert net(ids, cache=net.init_cache(2, L)).aux == {}, "what is decoded teaches nothing"


def test_loss_is_summed_over_layers_and_averaged_over_loops(monkeypatch):
    seen = []
    attend = dsa.attend

    def recording(*args, **kwargs):
        o, aux = attend(*args, **kwargs)
        seen.append(aux)
        return o, aux

    monkeypatch.setattr(dsa, "attend", recording)
    net = sparse_models.model(SMALL)
    total = net(sparse_models.tokens(2, L)).aux["dsa"]
    assert len(seen) == 6
    torch.testing.assert_close(total, sum(seen) / 3)
    net.eval()
    assert net(sparse_models.tokens(2, L)).aux == {}


def test_training_the_indexer_brings_its_choice_to_attention():
    """On fixed inputs the KL falls, and the selected keys hold more of the attention than before."""
    mixer, spec = sparse_models.lone_mixer(SMALL, DIMS)
    x = torch.randn(2, L, 16, dtype=torch.float64, generator=torch.Generator().manual_seed(0))
    seq = sparse_models.sequence(spec, DIMS, L)
    seq.step = 0
    q, k = mixer.q_proj(x).view(2, L, 4, 4), mixer.k_proj(x).view(2, L, 2, 4)
    q, k = rotate(q, *seq.rope[4]), rotate(k, *seq.rope[4])
    identity = torch.eye(L, dtype=torch.float64).expand(2, L, L)[:, :, None].expand(-1, -1, 2, -1)
    padded = [torch.nn.functional.pad(a, (0, L - 4)) for a in (q, k)]
    attention = reference.softmax_attention(*padded, identity, scale=0.5).mean(dim=2)  # (B, L, M)

    def mass() -> float:
        index = torch.arange(L).expand(2, L)
        keys, found = dsa.select_keys(*mixer.indexer(x, seq), torch.zeros_like(index), index, top_k=6)
        return (attention.gather(2, keys) * found).sum(dim=-1).mean().item()

    before = mass()
    optimizer = torch.optim.Adam(mixer.indexer.parameters(), lr=5e-2)
    losses = []
    for _ in range(30):
        _, aux = mixer(x, spec, seq, None)
        aux = aux.mean()
        optimizer.zero_grad()
        aux.backward()
        optimizer.step()
        losses.append(aux.item())
    assert losses[-1] < 0.5 * losses[0]
    assert mass() > before + 0.05


def test_training_memory_grows_linearly(monkeypatch):
    monkeypatch.setitem(bags.GATHERED, "cpu", 1 << 12)
    monkeypatch.setitem(bags.INVERTED, "cpu", 1 << 12)
    monkeypatch.setattr(indexer, "CPU_PIECE", 1 << 13)
    for mixer in (late(SMALL), {**SMALL, "top_k": 1024}):  # sparse, and the dense KL of the warm-up
        small, medium, large = (sparse_models.peak_bytes(mixer, DIMS, length) for length in (128, 256, 512))
        assert large - medium < 2.5 * (medium - small)  # 2 is linear, 4 quadratic
        assert large <= 2.1 * medium


def test_the_memory_test_would_notice_dense_scores(monkeypatch):
    monkeypatch.setattr(dsa, "causal_attention", lambda q, k, v, doc_ids: reference.softmax_attention(q, k, v))
    mixer = {**SMALL, "top_k": 1024}
    small, medium, large = (sparse_models.peak_bytes(mixer, DIMS, length) for length in (128, 256, 512))
    assert large - medium > 3 * (medium - small)


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"top_k": 64}, "top_k 64 is not below max_seq_len 64, so nothing would be left out"),
        ({"top_k": 0}, "top_k is 0; each query reads at least 1 key"),
        ({"top_k": 8, "num_heads": 3}, "num_heads 3 does not divide dim 16; set head_dim"),
        ({"top_k": 8, "num_kv_heads": 3}, "num_kv_heads 3 does not divide num_heads 4"),
        ({"top_k": 8, "index_heads": 0}, "index_heads 0 and index_dim 64 must be at least 1"),
        ({"top_k": 8, "index_rope_dim": 66}, "index_rope_dim 66 must be even and between 0 and index_dim 64"),
        ({"top_k": 8, "index_rope_dim": 3}, "index_rope_dim 3 must be even"),
        ({"top_k": 8, "warmup_steps": -1}, "warmup_steps is -1; use 0 for none"),
    ],
)
def test_bad_configs_name_the_rule_and_the_values(fields, message):
    with pytest.raises(ValueError, match=message):
        DSAConfig(**fields).check(Dims(dim=16, num_heads=4, max_seq_len=64))
    with pytest.raises(ValidationError, match=message):
        sparse_models.model({"type": "dsa", **fields}, max_seq_len=64)


def test_sequence_flops_count_the_keys_scored_and_read():
    spec = DSAConfig(top_k=5, num_heads=2, head_dim=3, index_heads=4, index_dim=7, index_rope_dim=0)
    length = 20
    scored = sum(2 * 4 * (7 + 1) * (t + 1) for t in range(length))
    read = sum(4 * 2 * 3 * min(t + 1, 5) for t in range(length))
    assert spec.sequence_flops(DIMS, length) == pytest.approx((scored + read) / length)
