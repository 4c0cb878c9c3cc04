"""The CUDA paths of sparse attention on CPU: our Triton gather and fla's NSA kernels.

Run by test_sparse_kernels.py in a process of its own.
"""

from __future__ import annotations

import fla_interpreter  # first: it must come before anything that imports triton
import pytest
import torch

fla_interpreter.install()

from lt2.ops.sparse import gathered, nsa_attention, selected_attention  # noqa: E402

BOUNDS = {torch.float32: 3e-6, torch.bfloat16: 1e-2}


def random(*shape: int, seed: int = 0) -> torch.Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed + sum(shape)), dtype=torch.float64)


def gradients(call, dtype, *inputs):
    """(output, gradient of each input) for fixed random weights on the output."""
    leaves = [x.detach().clone().to(dtype).requires_grad_() for x in inputs]
    o = call(*leaves)
    (o.double() * random(*o.shape, seed=5)).sum().backward()
    assert o.dtype == dtype
    return o.detach(), *(x.grad for x in leaves)


def assert_close(got, want, bound):
    errors = [((a.double() - b).norm() / b.norm()).item() for a, b in zip(got, want)]
    assert max(errors) <= bound, errors


@pytest.mark.parametrize("dtype", BOUNDS, ids=["fp32", "bf16"])
@pytest.mark.parametrize(("S", "heads", "R", "E", "V", "K"), [(1, 2, 3, 12, 20, 70), (4, 1, 16, 16, 16, 5)])
def test_selected_attention_kernel(S, heads, R, E, V, K, dtype):
    B, L, P = 2, 3, 80
    generator = torch.Generator().manual_seed(3)
    blocks = torch.stack([torch.randperm(P, generator=generator)[:K] for _ in range(B * L)]).view(B, L, K)
    counts = torch.randint(0, S + 1, (B, L, K), generator=generator)
    counts[..., 0] = 1
    q, k, v = random(B * heads, L, R, E), random(B * heads, P, S, E), random(B * heads, P, S, V)

    def call(backend):
        return lambda *x: selected_attention(*x, blocks, counts, backend=backend)[0]

    q, k, v = (x.to(dtype).double() for x in (q, k, v))
    assert gathered.gather_backend(q.to(dtype)) == "triton"
    want = gradients(call("torch"), torch.float64, q, k, v)
    assert_close(gradients(call("triton"), dtype, q, k, v), want, BOUNDS[dtype])
    got, want = (
        selected_attention(*(x.to(kind) for x in (q, k, v)), blocks, counts, return_weights=True, backend=backend)[1]
        for kind, backend in ((dtype, "triton"), (torch.float64, "torch"))
    )
    assert_close([got], [want], BOUNDS[dtype])


@pytest.mark.parametrize("doc_ids", [None, torch.tensor([[0] * 4 + [1] * 1 + [2] * 42])], ids=["rows", "documents"])
def test_fla_nsa(doc_ids, monkeypatch):
    import fla.ops.nsa

    called = []
    original = fla.ops.nsa.parallel_nsa
    monkeypatch.setattr(fla.ops.nsa, "parallel_nsa", lambda *a, **kw: called.append(1) or original(*a, **kw))
    L, E = 47, 16
    q, k, v, gates = random(1, L, 16, E), random(1, L, 1, E), random(1, L, 1, E, seed=1), random(1, L, 16, 3).sigmoid()
    sizes = {"block_size": 8, "num_blocks": 4, "window": 9, "doc_ids": doc_ids}
    inputs = [x.float().double() for x in (q, k, v, gates)]
    want = gradients(lambda *x: nsa_attention(*x, **sizes, backend="torch"), torch.float64, *inputs)
    got = gradients(lambda *x: nsa_attention(*x, **sizes, backend="fla"), torch.float32, *inputs)
    assert called
    assert_close(got, want, BOUNDS[torch.float32])


def test_fla_naive_nsa_agrees():
    """fla's own reference, for the branches it computes without flash-attn."""
    from fla.ops.nsa.naive import naive_nsa

    L, E = 70, 8
    q, k, v = random(2, L, 16, E).float(), random(2, L, 1, E).float(), random(2, L, 1, E, seed=1).float()
    gates = random(2, L, 16, 3).sigmoid().float()
    compressed, selected, _ = gates.unbind(-1)
    want = naive_nsa(q, k, v, compressed, selected, block_counts=4, block_size=8)
    gates[..., 2] = 0
    got = nsa_attention(q, k, v, gates, block_size=8, num_blocks=4, window=1, backend="torch")
    assert_close([got], [want.double()], BOUNDS[torch.float32])
