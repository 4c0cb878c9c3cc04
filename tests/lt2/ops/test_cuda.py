"""The CUDA paths on a real device: compiled fla kernels, flash, variable-length and cuDNN attention."""

from __future__ import annotations

import pytest
import torch

from lt2.ops import attention_decode, causal_attention, windowed_attention
from lt2.ops.cross_entropy import cross_entropy_
from lt2.ops.reference import softmax_attention

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device"),
]

# fp32 matmuls of Triton kernels use TF32 tensor cores: 10 bits of mantissa.
BOUNDS = {torch.float32: 5e-3, torch.bfloat16: 2e-2}
STARTS = [(0, 0), (0, 13), (0, 128), (1, 300), (1, 301)]


def _on_cuda(case, dtype):
    single = case.map(lambda x: x.float().cuda())
    reset = None if case.reset is None else case.reset.cuda()
    return single.with_(q=single.q.to(dtype), k=single.k.to(dtype), v=single.v.to(dtype), reset=reset)


@pytest.mark.parametrize("dtype", BOUNDS, ids=["fp32", "bf16"])
@pytest.mark.parametrize("packed", [False, True], ids=["rows", "packed"])
@pytest.mark.parametrize("decay", [None, "scalar", "channel"])
@pytest.mark.parametrize("op", ["linear", "delta"])
def test_recurrences(recurrence, assert_same, op, decay, packed, dtype):
    case = recurrence(op, decay, 333, starts=STARTS if packed else (), heads=4, key_dim=64, value_dim=128)
    case = _on_cuda(case, dtype)
    ours, grads = case.gradients(lambda c: c.run())
    # On CUDA an fp64 call runs our PyTorch path, itself checked against the oracle.
    expected, expected_grads = case.map(torch.Tensor.double).gradients(lambda c: c.run())
    assert_same(ours, expected, BOUNDS[dtype])
    assert_same(grads, expected_grads, BOUNDS[dtype])


@pytest.mark.parametrize("dtype", BOUNDS, ids=["fp32", "bf16"])
@pytest.mark.parametrize("decay", [None, "scalar", "channel"])
@pytest.mark.parametrize("op", ["linear", "delta"])
def test_steps(recurrence, assert_same, op, decay, dtype):
    case = _on_cuda(recurrence(op, decay, 4, heads=4, key_dim=64, value_dim=128), dtype)
    expected_o, expected_state = case.map(torch.Tensor.double).oracle()
    state, outputs = case.initial_state, []
    for t in range(4):
        o, state = case.step(t, state)
        outputs.append(o)
    ours = {"o": torch.stack(outputs, dim=1), "state": state}
    assert_same(ours, {"o": expected_o, "state": expected_state}, BOUNDS[dtype])


@pytest.mark.parametrize("dtype", BOUNDS, ids=["fp32", "bf16"])
@pytest.mark.parametrize("vocab", [1000, 128_256])
def test_cross_entropy(assert_same, dtype, vocab):
    logits = 3 * torch.randn(300, vocab, device="cuda").to(dtype)
    targets = torch.randint(vocab, (300,), device="cuda")
    targets[::5] = -100
    options = {"ignore_index": -100, "z_loss": 0.1, "gradient": True}
    names = ("loss", "ce", "grad")
    expected = dict(zip(names, cross_entropy_(logits.double(), targets, **options)))
    assert_same(dict(zip(names, cross_entropy_(logits, targets, **options))), expected, BOUNDS[dtype])


def _qkv(dtype):
    generator = torch.Generator().manual_seed(0)
    q, k, v = (torch.randn(2, 300, heads, 64, generator=generator) for heads in (8, 2, 2))
    return [x.to("cuda", dtype) for x in (q, k, v)]


def _outputs_and_gradients(call, inputs):
    leaves = [x.detach().clone().requires_grad_() for x in inputs]
    o = call(*leaves)
    (o * torch.linspace(-1, 1, o.numel(), device=o.device).view(o.shape)).sum().backward()
    return {"o": o, **{name: x.grad for name, x in zip("qkv", leaves)}}


@pytest.mark.parametrize("dtype", BOUNDS, ids=["fp32", "bf16"])
@pytest.mark.parametrize("window", [None, 1, 50, 256, 300])
@pytest.mark.parametrize("packed", [False, True], ids=["rows", "packed"])
def test_attention(assert_same, window, packed, dtype):
    doc_ids = torch.arange(300, device="cuda").expand(2, -1) // torch.tensor([[70], [299]], device="cuda")
    doc_ids = doc_ids if packed else None
    inputs = _qkv(dtype)

    def ours(q, k, v):
        if window is None:
            return causal_attention(q, k, v, doc_ids=doc_ids)
        return windowed_attention(q, k, v, window=window, doc_ids=doc_ids)

    actual = _outputs_and_gradients(ours, inputs)
    expected = _outputs_and_gradients(
        lambda q, k, v: softmax_attention(q, k, v, window=window, doc_ids=doc_ids), [x.double() for x in inputs]
    )
    if window == 1:  # a single weight of 1: q and k have no gradient at all
        for name in "qk":
            assert actual.pop(name).abs().max() < 1e-2
            expected.pop(name)
    assert_same(actual, expected, BOUNDS[dtype])


@pytest.mark.parametrize("dtype", BOUNDS, ids=["fp32", "bf16"])
def test_decode(assert_same, dtype):
    q, k, v = _qkv(dtype)
    lengths = torch.tensor([300, 77], device="cuda")
    k[1, 77:], v[1, 77:] = 1e4, 1e4
    query = torch.stack([q[0, 299], q[1, 76]])[:, None]
    with torch.no_grad():
        o = attention_decode(query, k, v, lengths)
    for row, length in enumerate(lengths.tolist()):
        expected = softmax_attention(*(x[row : row + 1, :length].double() for x in (q, k, v)))[:, -1:]
        assert_same({"o": o[row : row + 1]}, {"o": expected}, BOUNDS[dtype])
