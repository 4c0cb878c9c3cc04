"""The plain path, and what a plan of memory sees; fla's kernels are in interpreted_kernels.py and test_cuda.py."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F

from lt2.ops import outline
from lt2.ops.cross_entropy import cross_entropy_

IGNORE = -100


def block(dtype: torch.dtype, n_tokens: int = 9, vocab: int = 31) -> tuple[torch.Tensor, torch.Tensor]:
    generator = torch.Generator().manual_seed(0)
    targets = torch.randint(vocab, (n_tokens,), generator=generator)
    targets[::4] = IGNORE
    return 3 * torch.randn(n_tokens, vocab, generator=generator, dtype=torch.float64).to(dtype), targets


@pytest.mark.parametrize("z_loss", [0.0, 0.1])
@pytest.mark.parametrize(("dtype", "bound"), [(torch.float64, 1e-13), (torch.float32, 2e-6), (torch.bfloat16, 4e-3)])
def test_equals_torch(dtype, bound, z_loss):
    logits, targets = block(dtype)
    exact = logits.double().clone().requires_grad_()
    ce = F.cross_entropy(exact, targets, ignore_index=IGNORE, reduction="none")
    loss = ce + z_loss * exact.logsumexp(1).square() * (targets != IGNORE)
    (grad,) = torch.autograd.grad(loss.sum(), exact)
    ours = cross_entropy_(logits, targets, ignore_index=IGNORE, z_loss=z_loss, gradient=True)
    assert [x.dtype for x in ours] == [torch.promote_types(dtype, torch.float32)] * 2 + [dtype]
    for got, expected in zip(ours, (loss, ce, grad)):
        torch.testing.assert_close(got.double(), expected.detach(), rtol=bound, atol=bound)
    assert not ours[2][0].any()


def test_no_gradient_unless_asked_for():
    logits, targets = block(torch.float32)
    with_it = cross_entropy_(logits.clone(), targets, ignore_index=IGNORE, z_loss=0.1, gradient=True)
    without = cross_entropy_(logits, targets, ignore_index=IGNORE, z_loss=0.1, gradient=False)
    assert without[2] is None
    assert torch.equal(without[0], with_it[0])
    assert torch.equal(without[1], with_it[1])


def test_a_plan_for_cuda_gives_the_gradient_the_logits_memory():
    logits, targets = block(torch.bfloat16)
    with outline.planning("cuda"):
        loss, ce, grad = cross_entropy_(logits, targets, ignore_index=IGNORE, z_loss=0.0, gradient=True)
    assert grad is logits
    assert loss.shape == ce.shape == targets.shape
    assert loss.dtype == torch.float32
