"""KL divergence to a teacher's top-k tokens over large vocabularies, head included, in chunks.

Shapes: N tokens, D model width, V vocabulary, K compared tokens, T loops, C tokens of one chunk.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor

from lt2.train.loss import matmul_dtype, rows_per_chunk


class TopK(NamedTuple):
    """The teacher's largest logits of each token, (C, K) in at least fp32 and known up to a constant per token, and
    which tokens they belong to, (C, K) int64; ids None: all V logits in order.
    """

    logits: Tensor
    ids: Tensor | None


Teacher = Callable[[int, int, int], TopK]
"""(loop, start, stop) -> the teacher's top-k of tokens start to stop after that loop."""


class LoopKL(NamedTuple):
    """Sums over the counted tokens: `loss`, differentiable, weighted over loops, and `kl` (T,), unweighted."""

    loss: Tensor
    kl: Tensor


@torch.no_grad()
def top_k(hidden: Tensor, weight: Tensor, k: int | None) -> TopK:
    """The k largest of hidden @ weight.T, for hidden (C, D) and weight (V, D); all of them where k is None.

    The matmul runs in autocast's dtype when autocast is on, else in hidden's.
    """
    compute = matmul_dtype(hidden)
    with torch.autocast(hidden.device.type, enabled=False):
        logits = hidden.to(compute) @ weight.to(compute).T
    wide = torch.promote_types(compute, torch.float32)
    if k is None or k >= weight.shape[0]:
        return TopK(logits.to(wide), None)
    values, ids = logits.topk(k, dim=-1)
    return TopK(values.to(wide), ids)


def chunked_topk_kl(
    loops: Sequence[Tensor],
    weight: Tensor,
    teacher: Teacher,
    *,
    loop_weights: Sequence[float],
    counted: Tensor,
    temperature: float = 1.0,
    chunk_rows: int | None = None,
) -> LoopKL:
    """sum_t w_t · KL(softmax_topk(z_teacher/temperature) ‖ softmax_topk(z_student/temperature)), paper Eq. kd-loss.

    Args:
        loops: the student's normed states (N, D) after each loop that `loop_weights` (T,) weighs.
        weight: the student's head (V, D).
        teacher: asked for one chunk of one loop at a time; both sides are renormalised over the ids it gives.
        counted: (N,) bool; other tokens count for nothing.

    One chunk's logits are alive at a time, whatever N, V and T: gradients are computed in the forward pass, chunk by
    chunk, as in lt2.train.loss.chunked_cross_entropy, and backward can run only once. Statistics are in fp32 (fp64 for
    fp64).
    """
    rows = chunk_rows or rows_per_chunk(weight.device.type, weight.shape[0])
    call = _Call(teacher, tuple(loop_weights), counted, temperature, rows, torch.is_grad_enabled())
    return LoopKL(*_ChunkedKL.apply(call, weight, *loops))


class _Call(NamedTuple):
    teacher: Teacher
    loop_weights: tuple[float, ...]
    counted: Tensor
    temperature: float
    rows: int
    grad_enabled: bool


class _ChunkedKL(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, call: _Call, weight: Tensor, *loops: Tensor) -> tuple[Tensor, Tensor]:
        compute = matmul_dtype(loops[0])
        wide = torch.promote_types(compute, torch.float32)
        need_weight = call.grad_enabled and ctx.needs_input_grad[1]
        need_hidden = call.grad_enabled and any(ctx.needs_input_grad[2:])
        grad_weight = torch.zeros(weight.shape, dtype=wide, device=weight.device) if need_weight else None
        grads = [torch.empty_like(hidden) if need_hidden else None for hidden in loops]
        kl = torch.zeros(len(loops), dtype=wide, device=weight.device)
        w_VD = weight.to(compute)
        for loop, (hidden, share) in enumerate(zip(loops, call.loop_weights, strict=True)):
            for start in range(0, hidden.shape[0], call.rows):
                stop = min(start + call.rows, hidden.shape[0])
                teacher = call.teacher(loop, start, stop)
                with torch.autocast(weight.device.type, enabled=False):
                    h_CD = hidden[start:stop].to(compute)
                    logits_CV = h_CD @ w_VD.T
                    s_CK = logits_CV if teacher.ids is None else logits_CV.gather(1, teacher.ids)
                    log_p = torch.log_softmax(teacher.logits / call.temperature, dim=1)
                    log_q = torch.log_softmax(s_CK.to(wide) / call.temperature, dim=1)
                    keep_C1 = call.counted[start:stop, None]
                    p = log_p.exp()
                    kl[loop] += (p * (log_p - log_q)).masked_fill_(~keep_C1, 0).sum()
                    if not (need_hidden or need_weight):
                        continue
                    # d KL / d student logit = (q - p) / temperature, and 0 outside the top-k.
                    grad_CK = (log_q.exp_() - p).mul_(share / call.temperature).masked_fill_(~keep_C1, 0).to(compute)
                    if teacher.ids is None:
                        grad_CV = grad_CK
                    else:
                        grad_CV = logits_CV.zero_().scatter_(1, teacher.ids, grad_CK)
                    if (grad := grads[loop]) is not None:
                        grad[start:stop] = grad_CV @ w_VD
                    if grad_weight is not None and compute == wide:
                        grad_weight.addmm_(grad_CV.T, h_CD)
                    elif grad_weight is not None:
                        grad_weight += grad_CV.T @ h_CD
                    # The next chunk's logits must not be allocated while this one's are still referenced.
                    del teacher, logits_CV, s_CK, log_p, log_q, p, grad_CK, grad_CV
        ctx.grads = (grad_weight, grads)
        ctx.weight_dtype = weight.dtype
        ctx.mark_non_differentiable(kl)
        return torch.stack([share * value for share, value in zip(call.loop_weights, kl)]).sum(), kl

    @staticmethod
    def backward(ctx: Any, *grad_outputs: Tensor) -> tuple[Tensor | None, ...]:
        if ctx.grads is None:
            raise RuntimeError("chunked_topk_kl: backward ran twice; its gradients are scaled in place")
        (grad_weight, grads), ctx.grads = ctx.grads, None
        for grad in grads:
            if grad is not None:
                grad.mul_(grad_outputs[0])
        if grad_weight is not None:
            grad_weight = grad_weight.mul_(grad_outputs[0]).to(ctx.weight_dtype)
        return None, grad_weight, *grads
