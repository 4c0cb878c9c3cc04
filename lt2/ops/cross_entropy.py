"""Cross entropy of a block of logits, with its gradient in the logits' own memory.

In plain PyTorch, or on CUDA by fla's kernels: they read half-precision logits once for the loss and once for the
gradient, where PyTorch passes a dozen times over an fp32 copy.

Shapes: N tokens, V vocabulary.
"""

from __future__ import annotations

import torch
from torch import Tensor

from lt2.ops import dispatch
from lt2.ops.kernels import fla as fla_kernels


def cross_entropy_(
    logits: Tensor, targets: Tensor, *, ignore_index: int, z_loss: float, gradient: bool
) -> tuple[Tensor, Tensor, Tensor | None]:
    """Loss and gradient from logits (N, V), which are overwritten, and targets (N,) int64; `ignore_index` gives zeros.

    Returns the loss (N,) including z_loss·logsumexp² (PaLM §5), the plain cross entropy (N,), both fp32 (fp64 for
    fp64), and the gradient (N, V) of the loss's sum in the logits' dtype, None unless asked for.
    """
    chosen = dispatch.backend_for("cross_entropy", logits)
    if chosen == "outline":  # a plan of memory: the gradient takes the logits' place
        rows = logits.new_zeros(len(logits), dtype=torch.float32)
        return rows, rows, logits if gradient else None
    if chosen == "fla":
        return fla_kernels.cross_entropy_(logits, targets, ignore_index, z_loss, gradient)
    return _plain(logits, targets, ignore_index, z_loss, gradient)


def _plain(
    logits: Tensor, targets: Tensor, ignore_index: int, z_loss: float, gradient: bool
) -> tuple[Tensor, Tensor, Tensor | None]:
    dtype = logits.dtype
    logits = logits.to(torch.promote_types(dtype, torch.float32))
    ignored = (targets == ignore_index).unsqueeze(1)
    target = targets.unsqueeze(1).masked_fill(ignored, 0)  # (N, 1)
    lse = torch.logsumexp(logits, dim=1, keepdim=True)
    ce = (lse - logits.gather(1, target)).masked_fill(ignored, 0)
    loss = ce + z_loss * lse.square().masked_fill(ignored, 0) if z_loss else ce
    if not gradient:
        return loss.squeeze(1), ce.squeeze(1), None
    # d loss / d logits = softmax·(1 + 2·z·lse) - onehot
    grad = logits.sub_(lse).exp_()
    if z_loss:
        grad.mul_(1 + 2 * z_loss * lse)
    grad.scatter_add_(1, target, torch.full_like(lse, -1.0))
    return loss.squeeze(1), ce.squeeze(1), grad.masked_fill_(ignored, 0).to(dtype)
