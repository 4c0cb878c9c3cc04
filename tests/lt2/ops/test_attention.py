from __future__ import annotations

import inspect
from functools import partial

import pytest
import torch

from lt2.ops import dispatch
from lt2.ops.attention import attention_decode, causal_attention
from lt2.ops.reference import softmax_attention
from lt2.ops.windowed import windowed_attention

# Row 0: a one-token document first, one in the middle, padding (-1) at the end; row 1: documents that end elsewhere.
DOC_LENGTHS = [[1, 30, 1, 33, 5], [64, 6]]


def _qkv(length: int, heads: int = 4, kv_heads: int = 2, dim: int = 8, batch: int = 2, dtype=torch.float64):
    generator = torch.Generator().manual_seed(length + heads)

    def random(count):
        return torch.randn(batch, length, count, dim, generator=generator, dtype=dtype)

    return random(heads), random(kv_heads), random(kv_heads)


def _doc_ids() -> torch.Tensor:
    rows = [torch.repeat_interleave(torch.arange(len(n)), torch.tensor(n)) for n in DOC_LENGTHS]
    ids = torch.stack(rows)
    ids[0, -5:] = -1
    return ids


def _check(call, expected_call, inputs):
    """Outputs and input gradients agree in fp64."""
    results = []
    for function in (call, expected_call):
        leaves = [x.detach().clone().requires_grad_() for x in inputs]
        o = function(*leaves)
        weights = torch.linspace(-1, 1, o.numel(), dtype=o.dtype).view(o.shape)
        (o * weights).sum().backward()
        results.append([o, *(x.grad for x in leaves)])
    for actual, expected in zip(*results):
        torch.testing.assert_close(actual, expected, rtol=1e-11, atol=1e-12)


@pytest.mark.parametrize("kv_heads", [1, 2, 4])
@pytest.mark.parametrize("packed", [False, True])
def test_causal_attention_equals_the_oracle(kv_heads, packed):
    doc_ids = _doc_ids() if packed else None
    _check(
        lambda q, k, v: causal_attention(q, k, v, doc_ids=doc_ids),
        lambda q, k, v: softmax_attention(q, k, v, doc_ids=doc_ids),
        _qkv(70, kv_heads=kv_heads),
    )


def test_one_document_is_the_plain_case():
    q, k, v = _qkv(70)
    doc_ids = torch.full((2, 70), 3)
    assert torch.equal(causal_attention(q, k, v, doc_ids=doc_ids), causal_attention(q, k, v))


@pytest.mark.parametrize("window", [1, 2, 15, 16, 17, 33, 69, 70, 200])
@pytest.mark.parametrize("packed", [False, True])
def test_windowed_attention_equals_the_oracle(window, packed):
    doc_ids = _doc_ids() if packed else None
    _check(
        lambda q, k, v: windowed_attention(q, k, v, window=window, doc_ids=doc_ids, scale=0.7),
        lambda q, k, v: softmax_attention(q, k, v, window=window, doc_ids=doc_ids, scale=0.7),
        _qkv(70),
    )


def test_window_must_hold_the_token_itself():
    with pytest.raises(ValueError, match="window must be >= 1"):
        windowed_attention(*_qkv(8), window=0)


class _LargestTensor(torch.utils._python_dispatch.TorchDispatchMode):
    """Record the largest tensor any operation produces, in elements."""

    largest = 0

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        out = func(*args, **(kwargs or {}))
        tensors = [x for x in (out if isinstance(out, tuple | list) else [out]) if isinstance(x, torch.Tensor)]
        self.largest = max([self.largest, *(x.untyped_storage().nbytes() // x.element_size() for x in tensors)])
        return out


@pytest.mark.parametrize("packed", [False, True])
def test_windowed_attention_is_linear_in_memory(packed):
    length, window = 4096, 32
    q, k, v = (x.requires_grad_() for x in _qkv(length, heads=1, kv_heads=1, dim=4, batch=1, dtype=torch.float32))
    doc_ids = (torch.arange(length)[None] // 1000) if packed else None
    with _LargestTensor() as seen:
        windowed_attention(q, k, v, window=window, doc_ids=doc_ids).sum().backward()
    assert q.numel() <= seen.largest <= 2 * length * window


def test_packed_causal_attention_builds_no_square_mask():
    length = 2048
    q, k, v = (x.requires_grad_() for x in _qkv(length, heads=1, kv_heads=1, dim=4, batch=1, dtype=torch.float32))
    doc_ids = torch.arange(length)[None] // 100
    with _LargestTensor() as seen:
        causal_attention(q, k, v, doc_ids=doc_ids).sum().backward()
    assert seen.largest <= 16 * length


def test_a_row_does_not_depend_on_its_batch():
    q, k, v = _qkv(70)
    doc_ids = _doc_ids()
    for call in (causal_attention, lambda *x, **y: windowed_attention(*x, window=9, **y)):
        together = call(q, k, v, doc_ids=doc_ids)
        for row in range(2):
            alone = call(*(x[row : row + 1] for x in (q, k, v)), doc_ids=doc_ids[row : row + 1])
            torch.testing.assert_close(alone, together[row : row + 1], rtol=1e-12, atol=1e-13)


@pytest.mark.parametrize("kv_heads", [1, 2, 4])
def test_decode_equals_the_last_row_of_the_oracle(kv_heads):
    q, k, v = _qkv(20, kv_heads=kv_heads)
    lengths = torch.tensor([20, 7])
    # Entries past a sequence's length are garbage left in the cache.
    k[1, 7:], v[1, 7:] = 1e6, 1e6
    query = torch.stack([q[0, 19], q[1, 6]])[:, None]
    o = attention_decode(query, k, v, lengths)
    for row, length in enumerate(lengths.tolist()):
        expected = softmax_attention(*(x[row : row + 1, :length] for x in (q, k, v)))[:, -1:]
        torch.testing.assert_close(o[row : row + 1], expected, rtol=1e-12, atol=1e-13)


def test_decode_allows_a_longer_cache():
    q, k, v = _qkv(20)
    o = attention_decode(q[:, :1], k, v, torch.tensor([3, 5]))
    trimmed = attention_decode(q[:, :1], k[:, :5], v[:, :5], torch.tensor([3, 5]))
    assert torch.equal(o, trimmed)


def _varlen_2_11(
    query, key, value, cu_seq_q, cu_seq_k, max_q, max_k, *, return_aux=None, scale=None, window_size=(-1, -1)
):
    """What torch 2.11's takes, computed piece by piece: as many key/value heads as query heads."""
    assert query.shape[1] == key.shape[1] == value.shape[1]
    assert window_size[1] == 0
    assert torch.equal(cu_seq_q, cu_seq_k)
    window = None if window_size[0] < 0 else window_size[0] + 1
    spans = [slice(start, end) for start, end in zip(cu_seq_q.tolist(), cu_seq_q.tolist()[1:])]
    pieces = [
        softmax_attention(*(x[None, span] for x in (query, key, value)), window=window, scale=scale) for span in spans
    ]
    return torch.cat(pieces, dim=1)[0]


def _varlen_2_13(*tensors, enable_gqa=False, seqused_k=None, **options):
    query, key, value, *rest = tensors
    assert enable_gqa == (query.shape[1] != key.shape[1])
    shared = query.shape[1] // key.shape[1]
    return _varlen_2_11(query, *(x.repeat_interleave(shared, dim=1) for x in (key, value)), *rest, **options)


@pytest.mark.parametrize("varlen", [_varlen_2_11, _varlen_2_13])
@pytest.mark.parametrize("kv_heads", [1, 2, 4])
@pytest.mark.parametrize("window", [None, 7])
def test_packed_attention_asks_each_torch_for_what_it_has(monkeypatch, varlen, kv_heads, window):
    import torch.nn.attention.varlen as module

    monkeypatch.setattr(module, "varlen_attn", varlen)
    monkeypatch.setattr(dispatch, "attention_backend", lambda op, tensor: "varlen")
    monkeypatch.setattr(dispatch, "_varlen_options", lambda: frozenset(inspect.signature(varlen).parameters))
    assert dispatch.varlen_shares_heads() == (varlen is _varlen_2_13)
    doc_ids = _doc_ids()
    attention = causal_attention if window is None else partial(windowed_attention, window=window)
    _check(
        lambda q, k, v: attention(q, k, v, doc_ids=doc_ids),
        lambda q, k, v: softmax_attention(q, k, v, doc_ids=doc_ids, window=window),
        _qkv(70, kv_heads=kv_heads),
    )


@pytest.mark.parametrize("options", [{"scale"}, {"scale", "window_size"}, {"scale", "window_size", "enable_gqa"}])
def test_documents_are_packed_wherever_torchs_kernel_has_windows(monkeypatch, options):
    monkeypatch.setattr(dispatch, "_varlen_options", lambda: frozenset(options))
    monkeypatch.setattr(dispatch, "_installed", lambda package: False)
    found = dispatch._attention_backend("causal_attention with documents", "cuda", torch.bfloat16)
    assert found == ("varlen" if "window_size" in options else "torch")
