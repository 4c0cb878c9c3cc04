"""Cross entropy over large vocabularies, and the next-token objective.

Shapes: N tokens, D model width, V vocabulary, B sequences, L positions.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import TYPE_CHECKING, Any, NamedTuple

import torch
from torch import Tensor, nn

from lt2.config import LOOP_METRICS
from lt2.extension import ConfigError
from lt2.ops.cross_entropy import cross_entropy_

if TYPE_CHECKING:
    from lt2.train.batch import Batch
    from lt2.train.config import TrainConfig
    from lt2.train.objectives import NextTokenConfig

IGNORE = -100
# Elements of one chunk of logits. A GPU needs about a thousand rows at V = 128k to keep its matmuls busy (512 MiB in
# fp32); a CPU is fastest when the chunk stays near its caches.
_CHUNK_ELEMENTS = {"cuda": 2**27, "cpu": 2**21}

Objective = Callable[[nn.Module, "Batch"], tuple[Tensor, Tensor, dict[str, Tensor]]]
"""(model, batch) -> (loss sum over tokens, number of tokens, metrics).

Metrics are sums over tokens too: the loop adds them over micro-batches and ranks and reports the mean per token. None
has a name of `lt2.config.LOOP_METRICS`.
"""


def rows_per_chunk(device_type: str, vocab_size: int) -> int:
    """How many tokens' logits are made at a time."""
    return max(1, _CHUNK_ELEMENTS.get(device_type, 2**27) // vocab_size)


def matmul_dtype(hidden: Tensor) -> torch.dtype:
    """Autocast's dtype when autocast is on, else hidden's own."""
    device = hidden.device.type
    return torch.get_autocast_dtype(device) if torch.is_autocast_enabled(device) else hidden.dtype


class CrossEntropy(NamedTuple):
    """Sums over the counted tokens: `loss` is differentiable and holds the z-loss and any weights, `ce` is the plain
    cross entropy, `ce_tokens` the same of each token, (N,)."""

    loss: Tensor
    n_tokens: Tensor
    ce: Tensor
    ce_tokens: Tensor


def chunked_cross_entropy(
    hidden: Tensor,
    weight: Tensor,
    targets: Tensor,
    *,
    ignore_index: int = IGNORE,
    z_loss: float = 0.0,
    token_weights: Tensor | None = None,
    chunk_rows: int | None = None,
) -> CrossEntropy:
    """Cross entropy of softmax(hidden @ weight.T) without ever holding the (N, V) logits.

    hidden (N, D), weight (V, D), targets (N,) int64; rows whose target is `ignore_index` count for nothing.
    z_loss adds z_loss·logsumexp² per token (PaLM §5). token_weights (N,), in at least fp32, multiply each token's loss
    and get gradients too. Logits are reduced in fp32 (fp64 for fp64 inputs); matmuls run in
    autocast's dtype when autocast is on, else in hidden's. Gradients are computed during the forward pass, chunk by
    chunk, so one (chunk, V) block is alive at a time and no logits are recomputed; backward can run only once.
    """
    if hidden.shape[0] != targets.shape[0] or hidden.shape[1] != weight.shape[1]:
        raise ValueError(
            f"hidden {tuple(hidden.shape)}, weight {tuple(weight.shape)} and targets {tuple(targets.shape)} do not "
            "match; expected (N, D), (V, D) and (N,)"
        )
    rows = chunk_rows or rows_per_chunk(hidden.device.type, weight.shape[0])
    loss, ce = _ChunkedCrossEntropy.apply(
        hidden, weight, targets, token_weights, ignore_index, z_loss, rows, torch.is_grad_enabled()
    )
    return CrossEntropy(loss, (targets != ignore_index).sum(), ce.sum(), ce)


class _ChunkedCrossEntropy(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any,
        hidden: Tensor,
        weight: Tensor,
        targets: Tensor,
        token_weights: Tensor | None,
        ignore_index: int,
        z_loss: float,
        rows: int,
        grad_enabled: bool,
    ) -> tuple[Tensor, Tensor]:
        device = hidden.device.type
        compute = matmul_dtype(hidden)
        wide = torch.promote_types(compute, torch.float32)
        need_hidden = grad_enabled and ctx.needs_input_grad[0]
        need_weight = grad_enabled and ctx.needs_input_grad[1]
        grad_hidden = torch.empty_like(hidden) if need_hidden else None
        grad_weight = torch.zeros(weight.shape, dtype=wide, device=weight.device) if need_weight else None
        total = torch.zeros((), dtype=wide, device=hidden.device)
        ce, losses = (torch.empty(hidden.shape[0], dtype=wide, device=hidden.device) for _ in range(2))

        with torch.autocast(device, enabled=False):
            w_VD = weight.to(compute)
            for start in range(0, hidden.shape[0], rows):
                h_CD = hidden[start : start + rows].to(compute)
                loss_C, ce_C, grad_CV = cross_entropy_(
                    h_CD @ w_VD.T, targets[start : start + rows],
                    ignore_index=ignore_index, z_loss=z_loss, gradient=need_hidden or need_weight,
                )  # fmt: skip
                ce[start : start + rows], losses[start : start + rows] = ce_C, loss_C
                if token_weights is not None:
                    share_C = token_weights[start : start + rows]
                    loss_C = loss_C * share_C
                    grad_CV = None if grad_CV is None else grad_CV.mul_(share_C[:, None])
                total += loss_C.sum()
                if grad_CV is None:
                    continue
                if grad_hidden is not None:
                    grad_hidden[start : start + rows] = grad_CV @ w_VD
                if grad_weight is not None and compute == wide:
                    grad_weight.addmm_(grad_CV.T, h_CD)
                elif grad_weight is not None:
                    grad_weight += grad_CV.T @ h_CD
                del grad_CV  # the next chunk's logits must not be allocated while this one's memory is referenced
        ctx.grads = (grad_hidden, grad_weight, losses if grad_enabled and ctx.needs_input_grad[3] else None)
        ctx.weight_dtype = weight.dtype
        ctx.mark_non_differentiable(ce)
        return total, ce

    @staticmethod
    def backward(ctx: Any, *grad_outputs: Tensor) -> tuple[Tensor | None, ...]:
        if ctx.grads is None:
            raise RuntimeError("chunked_cross_entropy: backward ran twice; its gradients are scaled in place")
        (grad_hidden, grad_weight, grad_shares), ctx.grads = ctx.grads, None
        if grad_hidden is not None:
            grad_hidden.mul_(grad_outputs[0])
        if grad_shares is not None:
            grad_shares.mul_(grad_outputs[0])
        if grad_weight is not None:
            grad_weight = grad_weight.mul_(grad_outputs[0]).to(ctx.weight_dtype)
        return grad_hidden, grad_weight, None, grad_shares, None, None, None, None


def next_token_targets(batch: Batch, *, document_mask: bool) -> Tensor:
    """What each of the L input positions must predict: (B, L) int64, `IGNORE` where nothing is learned.

    Ignored are targets outside `batch.loss_mask`, padding (document id -1) and, only under `document_mask`, the first
    token of a document: with the mask its prefix is invisible, so there is nothing to predict it from. Without
    the mask the previous document is visible context and every token counts, as in the paper's packed training.
    """
    targets = batch.tokens[:, 1:]
    if batch.loss_mask is not None:
        targets = targets.masked_fill(~batch.loss_mask[:, 1:].bool(), IGNORE)
    if batch.doc_ids is not None:
        targets = targets.masked_fill(batch.doc_ids[:, 1:] < 0, IGNORE)
        if document_mask:
            targets = targets.masked_fill(batch.doc_ids[:, 1:] != batch.doc_ids[:, :-1], IGNORE)
    return targets


def next_token_objective(
    *,
    document_mask: bool = False,
    z_loss: float = 0.0,
    auxiliary: bool = True,
    loops_at: Callable[[int], int | None] = lambda step: None,
) -> Objective:
    """Pretraining's objective: cross entropy of the last loop only, plus the model's auxiliary losses.

    Every entry of the model's `aux` is a loss already weighted by the model's config (indexer KL, ponder cost); it is
    added per counted token of its row, so that a loss of each row (B,) is the same whatever the micro-batches. With
    `document_mask` the document ids go to the model and nothing crosses a document boundary; without `auxiliary`
    (evaluation) aux is left out. loops_at(batch.step): the loops of that training step, None: the model's n_loops.
    Metrics: `ce` (without z-loss and aux), each aux, and `mean_loops` where tokens or steps differ in their loops.
    """

    def objective(model: Any, batch: Batch) -> tuple[Tensor, Tensor, dict[str, Tensor]]:
        doc_ids = batch.input_doc_ids(document_mask)
        n_loops = None if batch.step is None else loops_at(batch.step)
        depth = {} if n_loops is None else {"n_loops": n_loops}  # a network of one's own need not know of depths
        output = model(batch.tokens[:, :-1], doc_ids=doc_ids, step=batch.step, **depth)
        targets = next_token_targets(batch, document_mask=document_mask)
        result = chunked_cross_entropy(output.hidden.flatten(0, 1), model.head_weight, targets.flatten(), z_loss=z_loss)
        aux = per_token(output.aux, targets) if auxiliary else {}
        loss = result.loss + sum(aux.values())
        metrics = {"ce": result.ce, **{name: value.detach() for name, value in aux.items()}}
        if output.loops_used is not None:
            metrics["mean_loops"] = (output.loops_used * (targets != IGNORE)).sum()
        elif n_loops is not None:
            metrics["mean_loops"] = n_loops * result.n_tokens
        return loss, result.n_tokens, metrics

    return objective


def per_token(aux: dict[str, Tensor], targets: Tensor) -> dict[str, Tensor]:
    """Auxiliary losses, of each row (B,) or one of all, times the tokens that targets (B, L) count; scalars."""
    counted = (targets != IGNORE).sum(1)
    return {name: (value * counted).sum() for name, value in aux.items()}


def build_next_token(config: NextTokenConfig, train: TrainConfig) -> Objective:
    return next_token_objective(
        document_mask=train.document_mask, z_loss=train.z_loss, loops_at=partial(config.loops_at, train.seed)
    )


def checked(name: str, objective: Any) -> Objective:
    """A user's objective, whose every result is compared with what `Objective` says; then it raises ConfigError."""
    wanted = f"objective {name!r} must return (loss, number of tokens, metrics by name), tensors of one number each"
    if not callable(objective):
        raise ConfigError(f"the function of objective {name!r} must return the objective, not {objective!r}")
    always: set[str] | None = None

    def run(model: nn.Module, batch: Batch) -> tuple[Tensor, Tensor, dict[str, Tensor]]:
        nonlocal always
        returned = objective(model, batch)
        if not isinstance(returned, tuple) or len(returned) != 3 or not isinstance(returned[2], dict):
            raise ConfigError(f"{wanted}; it returned {_kind(returned)}")
        loss, n_tokens, metrics = returned
        for key in sorted(LOOP_METRICS & metrics.keys()):
            raise ConfigError(f"objective {name!r} has a metric {key!r}, which the loop uses itself; rename it")
        always = set(metrics) if always is None else always
        for key in sorted(always ^ metrics.keys()):  # ranks add them up by place, micro-batches by name
            raise ConfigError(
                f"objective {name!r} gave its metric {key!r} with some batches only; give it with all, as 0 if need be"
            )
        for key, value in {"the loss": loss, "the number of tokens": n_tokens, **metrics}.items():
            if not isinstance(value, Tensor) or value.shape != ():
                raise ConfigError(f"{wanted}; {key} is {_kind(value)}")
        if torch.is_grad_enabled() and not loss.requires_grad:
            raise ConfigError(f"{wanted}; the loss has no gradient (was it detached?)")
        return loss, n_tokens, metrics

    return run


def _kind(value: Any) -> str:
    if isinstance(value, tuple):
        return f"({', '.join(map(_kind, value))})"
    return f"a tensor of {tuple(value.shape)}" if isinstance(value, Tensor) else f"a {type(value).__name__}"
