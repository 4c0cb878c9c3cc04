import weakref

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from torch.utils._python_dispatch import TorchDispatchMode

from lt2.train.loop import Batch
from lt2.train.loss import IGNORE, chunked_cross_entropy, cross_entropy_, next_token_targets, rows_per_chunk

N, D, V = 37, 8, 23


def inputs(dtype=torch.float64, n=N, d=D, v=V):
    g = torch.Generator().manual_seed(0)
    hidden = torch.randn(n, d, generator=g, dtype=dtype, requires_grad=True)
    weight = torch.randn(v, d, generator=g, dtype=dtype, requires_grad=True)
    targets = torch.randint(0, v, (n,), generator=g)
    targets[::5] = IGNORE
    return hidden, weight, targets


def reference(hidden, weight, targets, z_loss):
    logits = hidden @ weight.T
    keep = targets != IGNORE
    ce = F.cross_entropy(logits, targets, ignore_index=IGNORE, reduction="sum")
    return ce + z_loss * logits.logsumexp(1).square()[keep].sum(), keep.sum(), ce


@pytest.mark.parametrize("chunk_rows", [1, 7, N, None])
@pytest.mark.parametrize("z_loss", [0.0, 0.1])
def test_equals_torch_in_fp64_with_gradients(chunk_rows, z_loss):
    hidden, weight, targets = inputs()
    result = chunked_cross_entropy(hidden, weight, targets, z_loss=z_loss, chunk_rows=chunk_rows)
    grads = torch.autograd.grad(0.37 * result.loss, [hidden, weight])
    loss, count, ce = reference(hidden, weight, targets, z_loss)
    expected = torch.autograd.grad(0.37 * loss, [hidden, weight])
    torch.testing.assert_close(result.loss, loss, rtol=1e-13, atol=1e-12)
    torch.testing.assert_close(result.ce, ce, rtol=1e-13, atol=1e-12)
    assert result.n_tokens == count
    assert not result.ce.requires_grad
    for ours, theirs in zip(grads, expected):
        torch.testing.assert_close(ours, theirs, rtol=1e-12, atol=1e-12)


def test_what_is_frozen_leaves_the_others_gradient():
    hidden, weight, targets = inputs()
    shares = torch.rand(N, generator=torch.Generator().manual_seed(1), dtype=torch.float64, requires_grad=True)
    learned = [hidden, weight, shares]
    whole = torch.autograd.grad(chunked_cross_entropy(hidden, weight, targets, token_weights=shares).loss, learned)
    for place, expected in enumerate(whole):
        one = [tensor.detach().requires_grad_(place == index) for index, tensor in enumerate(learned)]
        chunked_cross_entropy(*one[:2], targets, token_weights=one[2]).loss.backward()
        assert torch.equal(one[place].grad, expected)


def test_token_weights_multiply_each_loss_and_learn_from_it():
    hidden, weight, targets = inputs()
    shares = torch.rand(N, generator=torch.Generator().manual_seed(1), dtype=torch.float64, requires_grad=True)
    result = chunked_cross_entropy(hidden, weight, targets, z_loss=0.1, token_weights=shares, chunk_rows=7)
    logits = hidden @ weight.T
    each = F.cross_entropy(logits, targets, ignore_index=IGNORE, reduction="none")
    loss = (shares * (each + 0.1 * logits.logsumexp(1).square() * (targets != IGNORE))).sum()
    torch.testing.assert_close(result.loss, loss, rtol=1e-13, atol=1e-12)
    torch.testing.assert_close(result.ce_tokens, each.detach(), rtol=1e-13, atol=1e-12)
    torch.testing.assert_close(result.ce, each.detach().sum(), rtol=1e-13, atol=1e-12)
    learned = [hidden, weight, shares]
    for ours, theirs in zip(
        torch.autograd.grad(0.37 * result.loss, learned), torch.autograd.grad(0.37 * loss, learned)
    ):
        torch.testing.assert_close(ours, theirs, rtol=1e-12, atol=1e-12)


def test_every_target_ignored_gives_zero_loss_and_zero_gradients():
    hidden, weight, targets = inputs()
    result = chunked_cross_entropy(hidden, weight, torch.full_like(targets, IGNORE), z_loss=0.1)
    result.loss.backward()
    assert result.loss == 0
    assert result.n_tokens == 0
    assert not hidden.grad.any()
    assert not weight.grad.any()


def test_bf16_autocast_keeps_logits_statistics_in_fp32():
    hidden, weight, targets = inputs(torch.float32)
    with torch.autocast("cpu", torch.bfloat16):
        result = chunked_cross_entropy(hidden, weight, targets, chunk_rows=9)
    result.loss.backward()
    rounded = [t.detach().bfloat16().double().requires_grad_() for t in (hidden, weight)]
    loss, _, _ = reference(*rounded, targets, 0.0)
    loss.backward()
    assert result.loss.dtype == torch.float32
    assert result.loss != chunked_cross_entropy(hidden, weight, targets, chunk_rows=9).loss
    assert hidden.grad.dtype == weight.grad.dtype == torch.float32
    torch.testing.assert_close(result.loss.double(), loss, rtol=2e-3, atol=0)
    torch.testing.assert_close(weight.grad.double(), rounded[1].grad, rtol=2e-2, atol=4e-2)


@pytest.mark.parametrize("enabled", [True, False])
def test_gradients_are_computed_only_where_something_learns(enabled, monkeypatch):
    asked = []

    def recorded(*args, gradient, **options):
        asked.append(gradient)
        return cross_entropy_(*args, gradient=gradient, **options)

    monkeypatch.setattr("lt2.train.loss.cross_entropy_", recorded)
    hidden, weight, targets = inputs()
    with torch.set_grad_enabled(enabled):
        result = chunked_cross_entropy(hidden, weight, targets)
        chunked_cross_entropy(hidden.detach(), weight.detach(), targets)
    assert asked == [enabled, False]
    assert result.loss.requires_grad == enabled
    torch.testing.assert_close(result.loss.detach(), reference(hidden, weight, targets, 0.0)[0].detach())


def test_the_largest_vocabulary_has_a_row_at_a_time():
    assert rows_per_chunk("cpu", 2**22) == 1


def test_second_backward_is_an_error_not_a_wrong_gradient():
    hidden, weight, targets = inputs()
    loss = chunked_cross_entropy(hidden, weight, targets).loss
    loss.backward(retain_graph=True)
    with pytest.raises(RuntimeError, match="backward ran twice"):
        loss.backward()


def test_shapes_that_do_not_match_are_named():
    hidden, weight, targets = inputs()
    with pytest.raises(ValueError, match=r"expected \(N, D\), \(V, D\) and \(N,\)"):
        chunked_cross_entropy(hidden, weight.T, targets)


class LiveBytes(TorchDispatchMode):
    """Peak bytes of the storages created inside the block."""

    def __init__(self):
        super().__init__()
        self.live = self.peak = 0
        self.seen = weakref.WeakSet()

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        out = func(*args, **(kwargs or {}))
        for tensor in torch.utils._pytree.tree_leaves(out):
            if isinstance(tensor, torch.Tensor) and tensor.untyped_storage() not in self.seen:
                storage = tensor.untyped_storage()
                self.seen.add(storage)
                self.live += storage.nbytes()
                self.peak = max(self.peak, self.live)
                weakref.finalize(storage, self._free, storage.nbytes())
        return out

    def _free(self, nbytes):
        self.live -= nbytes


def test_peak_memory_is_a_chunk_not_the_logits():
    n, d, v, rows = 512, 16, 1000, 32
    hidden, weight, targets = inputs(torch.float32, n, d, v)
    with LiveBytes() as tracked:
        chunked_cross_entropy(hidden, weight, targets, chunk_rows=rows).loss.backward()
    with LiveBytes() as naive:
        F.cross_entropy(hidden @ weight.T, targets, reduction="sum").backward()
    logits = n * v * 4
    gradients = (n * d + v * d) * 4
    assert naive.peak >= 2 * logits  # the tracker does see a full block of logits and its gradient
    assert tracked.peak <= 3 * rows * v * 4 + 2 * gradients
    assert tracked.peak < logits / 3


def batch(tokens, doc_ids=None, loss_mask=None):
    tokens = torch.tensor([tokens])
    return Batch(
        tokens=tokens,
        doc_ids=None if doc_ids is None else torch.tensor([doc_ids]),
        loss_mask=None if loss_mask is None else torch.tensor([loss_mask]),
        ids=torch.zeros(1, dtype=torch.int64),
    )


def test_a_batch_is_split_with_all_that_it_holds():
    names = ("tokens", "doc_ids", "loss_mask", "ids", "topk_logits", "topk_ids")
    arrays = {name: np.arange(5 * 2).reshape(5, 2) + place for place, name in enumerate(names)}
    whole = Batch.from_numpy(arrays)
    whole.step = 7
    parts = whole.split(2)
    assert [len(part.tokens) for part in parts] == [2, 2, 1]
    assert {part.step for part in parts} == {7}
    for name, array in arrays.items():
        assert torch.cat([getattr(part, name) for part in parts]).tolist() == array.tolist()
        assert getattr(Batch.from_numpy(arrays, "meta"), name).device.type == "meta"


def test_without_document_mask_only_padding_is_ignored():
    targets = next_token_targets(batch([1, 2, 3, 4, 0], [0, 0, 1, 1, -1]), document_mask=False)
    assert targets.tolist() == [[2, 3, 4, IGNORE]]


def test_document_mask_does_not_predict_the_first_token_of_a_document():
    targets = next_token_targets(batch([1, 2, 3, 4, 0], [0, 0, 1, 1, -1]), document_mask=True)
    assert targets.tolist() == [[2, IGNORE, 4, IGNORE]]


def test_loss_mask_belongs_to_the_predicted_token():
    targets = next_token_targets(batch([1, 2, 3], loss_mask=[1, 0, 1]), document_mask=False)
    assert targets.tolist() == [[IGNORE, 3]]
