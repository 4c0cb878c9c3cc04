from __future__ import annotations

import pytest
import torch

from lt2.ops import reference
from lt2.ops.sparse import (
    bags,
    compressed,
    dense_kl,
    gathered,
    index_scores,
    indexer,
    nsa_attention,
    select_keys,
    selected_attention,
    selected_kl,
)
from lt2.ops.sparse.ranking import top_positions
from tests.lt2.ops import sparse_oracles as oracle

EXACT = {"rtol": 1e-10, "atol": 1e-12}


def random(*shape: int, seed: int = 0) -> torch.Tensor:
    generator = torch.Generator().manual_seed(seed + 97 * len(shape) + sum(shape))
    return torch.randn(shape, generator=generator, dtype=torch.float64)


def gradients(call, *inputs: torch.Tensor) -> tuple[torch.Tensor, ...]:
    """(output, gradient of each input) for fixed random weights on the output."""
    leaves = [x.detach().clone().requires_grad_() for x in inputs]
    o = call(*leaves)
    (o * random(*o.shape, seed=5)).sum().backward()
    return o.detach(), *(x.grad for x in leaves)


@pytest.fixture(params=["one piece", "many pieces"])
def pieces(request, monkeypatch):
    """The same results whatever the piece sizes."""
    if request.param == "many pieces":
        monkeypatch.setitem(bags.GATHERED, "cpu", 40)
        monkeypatch.setitem(bags.INVERTED, "cpu", 50)
        monkeypatch.setattr(compressed, "CPU_PIECE", 60)
        monkeypatch.setattr(indexer, "CPU_PIECE", 300)


def selection(B: int, L: int, P: int, K: int, S: int) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Distinct random blocks with random counts, the last slots empty, and the mask (B, L, P·S) they stand for."""
    generator = torch.Generator().manual_seed(3)
    blocks = torch.stack([torch.randperm(P, generator=generator)[:K] for _ in range(B * L)]).view(B, L, K)
    counts = torch.randint(0, S + 1, (B, L, K), generator=generator)
    counts[..., 0] = counts[..., 0].clamp(min=1)
    counts[..., -1] = 0
    mask = torch.zeros(B, L, P, S, dtype=torch.bool)
    token = torch.arange(S)
    for b in range(B):
        for t in range(L):
            for block, count in zip(blocks[b, t].tolist(), counts[b, t].tolist()):
                mask[b, t, block] |= token < count
    return blocks, counts, mask.flatten(2)


@pytest.mark.usefixtures("pieces")
@pytest.mark.parametrize(("S", "heads", "group"), [(1, 1, 1), (1, 3, 2), (4, 1, 3), (4, 2, 1)])
def test_selected_attention_is_masked_attention(S, heads, group):
    B, L, P, K = 2, 7, 9, 5
    blocks, counts, mask = selection(B, L, P, K, S)
    N = B * heads
    q, k, v = random(N, L, group, 6), random(N, P, S, 6), random(N, P, S, 3)
    visible = mask.repeat_interleave(heads, dim=0)

    def ours(q, k, v):
        return selected_attention(q, k, v, blocks, counts)[0]

    def dense(q, k, v):
        return oracle.masked_attention(q, k.flatten(1, 2), v.flatten(1, 2), visible, 6**-0.5)[0]

    torch.testing.assert_close(gradients(ours, q, k, v), gradients(dense, q, k, v), **EXACT)

    weights = selected_attention(q, k, v, blocks, counts, return_weights=True)[1]
    expected = oracle.masked_attention(q, k.flatten(1, 2), v.flatten(1, 2), visible, 6**-0.5)[1].sum(dim=2)
    expected = expected.view(B, heads, L, P * S).sum(dim=1)
    torch.testing.assert_close(weights, expected.gather(2, bags.block_tokens(blocks, S)), **EXACT)
    assert not weights.requires_grad


def test_selecting_every_key_is_full_attention():
    B, L, H, G, E = 2, 11, 4, 2, 6
    q, k, v = random(B, L, H, E), random(B, L, G, E), random(B, L, G, E)
    keys = torch.arange(L).expand(B, L, L)
    counts = (keys <= torch.arange(L)[:, None]).long()

    def ours(q, k, v):
        grouped = q.view(B, L, G, 2, E).permute(0, 2, 1, 3, 4).reshape(B * G, L, 2, E)
        tables = (x.transpose(1, 2).reshape(B * G, L, 1, E) for x in (k, v))
        o, _ = selected_attention(grouped, *tables, keys, counts)
        return o.view(B, G, L, 2, E).permute(0, 2, 1, 3, 4).reshape(B, L, H, E)

    torch.testing.assert_close(gradients(ours, q, k, v), gradients(reference.softmax_attention, q, k, v), **EXACT)


def test_selected_attention_in_half_precision_follows_fp64():
    B, L, P, K, S = 2, 7, 9, 5, 4
    blocks, counts, _ = selection(B, L, P, K, S)
    q, k, v = random(B, L, 2, 16), random(B, P, S, 16), random(B, P, S, 16)
    expected = gradients(lambda *x: selected_attention(*x, blocks, counts)[0], q, k, v)
    half = [x.bfloat16().requires_grad_() for x in (q, k, v)]
    o, _ = selected_attention(*half, blocks, counts)
    (o.double() * random(*o.shape, seed=5)).sum().backward()
    assert o.dtype == half[1].grad.dtype == torch.bfloat16
    for got, want in zip((o, *(x.grad for x in half)), expected):
        assert (got.double() - want).norm() / want.norm() < 1e-2


def test_selected_attention_refuses_rows_that_do_not_share():
    q = random(3, 1, 1, 2)
    with pytest.raises(ValueError, match="3 rows of q cannot share the selections of 2"):
        selected_attention(q, q, q, torch.zeros(2, 1, 1).long(), torch.ones(2, 1, 1).long())
    with pytest.raises(ValueError, match="no fp64"):
        gathered.gather_backend(random(1), "triton")


def test_top_positions_is_a_total_order():
    scores = torch.tensor([[0.0, -0.0, 3.0, -1.0, 0.0, -2.0, 5.0]])
    candidates = torch.tensor([[True, True, True, True, True, True, False]])
    for k, expected in [(1, {2}), (2, {2, 4}), (3, {1, 2, 4}), (4, {0, 1, 2, 4}), (5, {0, 1, 2, 3, 4})]:
        positions, found = top_positions(scores, candidates, k)
        assert set(positions[found].tolist()) == expected
    positions, found = top_positions(scores, candidates, 9)
    assert positions.shape == (1, 7)
    assert found.sum() == 6
    assert positions[~found].tolist() == [0]
    for score in (-1.0, 0.0, 1.0):  # one ulp apart, and equal ones of a long row
        close = torch.tensor([score, score]).nextafter(torch.tensor([score, -9.0]))
        assert top_positions(close, torch.tensor(True), 1)[0].tolist() == [0]
        assert top_positions(torch.full((70_000,), score), torch.tensor(True), 1)[0].tolist() == [69_999]


@pytest.mark.usefixtures("pieces")
def test_select_keys_takes_the_best_of_each_prefix():
    B, L, J, D, top = 2, 13, 3, 4, 4
    q, k, w = random(B, L, J, D), random(B, L, D), random(B, L, J)
    last = torch.arange(L).expand(B, L)
    first = torch.tensor([[0] * 6 + [6] * 7, [0] * 13])
    keys, found = select_keys(q, k, w, first, last, top_k=top)
    for b in range(B):
        for t in range(L):
            scores = oracle.index_score(q[b, t], k[b, first[b, t] : t + 1], w[b, t]).tolist()
            order = sorted(range(len(scores)), key=lambda s: (round(scores[s], 12), s), reverse=True)
            expected = {s + int(first[b, t]) for s in order[:top]}
            assert set(keys[b, t][found[b, t]].tolist()) == expected


def kl_oracle(q, k, w, target, visible):
    """Mean KL over queries, (B,); target, visible (B, L, M)."""
    means = []
    for b in range(q.shape[0]):
        total = 0.0
        for t in range(q.shape[1]):
            seen = visible[b, t]
            r = oracle.index_score(q[b, t], k[b], w[b, t])[seen].softmax(dim=0)
            p = target[b, t][seen]
            total = total + (p * (p.log() - r.log())).sum()
        means.append(total / q.shape[1])
    return torch.stack(means)


@pytest.mark.usefixtures("pieces")
def test_dense_kl_is_the_divergence_from_attention():
    B, L, J, D, H, G, E = 2, 8, 3, 4, 4, 2, 6
    q, k, w = random(B, L, J, D), random(B, L, D), random(B, L, J)
    q_attention, k_attention = random(B, L, H, E), random(B, L, G, E)
    first = torch.tensor([[0] * 3 + [3] * 5, [0] * 8])
    index = torch.arange(L)
    visible = (index >= first[..., None]) & (index <= index[:, None])
    grouped = q_attention.view(B, L, G, H // G, E).permute(0, 2, 1, 3, 4).flatten(0, 1)
    keys = k_attention.transpose(1, 2).flatten(0, 1)
    _, weights = oracle.masked_attention(grouped, keys, keys, visible.repeat_interleave(G, dim=0), E**-0.5)
    target = weights.view(B, G, L, H // G, L).mean(dim=(1, 3))

    def ours(q, k, w):
        return dense_kl(q, k, w, q_attention, k_attention, first, scale=E**-0.5)

    def dense(q, k, w):
        return kl_oracle(q, k, w, target, visible)

    torch.testing.assert_close(gradients(ours, q, k, w), gradients(dense, q, k, w), **EXACT)


@pytest.mark.usefixtures("pieces")
def test_selected_kl_is_over_the_selected_keys():
    B, L, J, D, K = 2, 8, 3, 4, 3
    q, k, w = random(B, L, J, D), random(B, L, D), random(B, L, J)
    last = torch.arange(L).expand(B, L)
    keys, found = select_keys(q, k, w, torch.zeros_like(last), last, top_k=K)
    weights = torch.rand(B, L, K, generator=torch.Generator().manual_seed(0), dtype=torch.float64) * found
    visible = torch.zeros(B, L, L + 1, dtype=torch.bool).scatter(2, keys.masked_fill(~found, L), True)[..., :L]
    target = torch.zeros(B, L, L, dtype=torch.float64).scatter_add(2, keys, weights)
    target = target / target.sum(dim=-1, keepdim=True)

    def ours(q, k, w):
        return selected_kl(q, k, w, keys, found, weights)

    def dense(q, k, w):
        return kl_oracle(q, k, w, target, visible)

    torch.testing.assert_close(gradients(ours, q, k, w), gradients(dense, q, k, w), **EXACT)


def test_index_scores_sum_rectified_heads():
    q, k, w = random(2, 5, 3, 4), random(2, 6, 4), random(2, 5, 3)
    expected = torch.stack(
        [torch.stack([oracle.index_score(q[b, t], k[b], w[b, t]) for t in range(5)]) for b in range(2)]
    )
    torch.testing.assert_close(index_scores(q, k, w), expected, **EXACT)
    narrow = q.float(), k.float(), w.float()
    with torch.autocast("cpu", torch.bfloat16):
        torch.testing.assert_close(index_scores(*narrow).double(), expected, rtol=1e-5, atol=1e-5)


DOCUMENTS = torch.tensor([[0] * 9 + [1] * 1 + [2] * 16, [0] * 26])


@pytest.mark.usefixtures("pieces")
@pytest.mark.parametrize("doc_ids", [None, DOCUMENTS], ids=["rows", "documents"])
@pytest.mark.parametrize(("H", "G", "block_size", "window"), [(4, 2, 3, 5), (2, 2, 4, 1), (3, 1, 2, 40)])
def test_nsa_is_its_three_branches(H, G, block_size, window, doc_ids):
    B, L, E = 2, 26, 4
    q, k, v = random(B, L, H, E), random(B, L, G, E, seed=1), random(B, L, G, E, seed=2)
    gates = random(B, L, H, 3).sigmoid()
    sizes = {"block_size": block_size, "num_blocks": 4, "window": window, "doc_ids": doc_ids}
    got = gradients(lambda *x: nsa_attention(*x, **sizes), q, k, v, gates)
    torch.testing.assert_close(got, gradients(lambda *x: oracle.nsa(*x, **sizes), q, k, v, gates), **EXACT)


def test_nsa_in_half_precision_follows_fp64():
    B, L, H, E = 2, 26, 2, 16
    inputs = [random(B, L, n, E, seed=seed).bfloat16() for seed, n in enumerate((H, 1, 1))]
    inputs.append(random(B, L, H, 3).sigmoid().bfloat16())
    # Every block is read, so that rounded scores choose no others.
    call = lambda *x: nsa_attention(*x, block_size=4, num_blocks=8, window=5)  # noqa: E731
    half = [x.clone().requires_grad_() for x in inputs]
    o = call(*half)
    (o.double() * random(*o.shape, seed=5)).sum().backward()
    for got, want in zip((o, *(x.grad for x in half)), gradients(call, *(x.double() for x in inputs)), strict=True):
        assert got.dtype == torch.bfloat16
        assert (got.double() - want).norm() / want.norm() < 2e-2
