"""Training Ouro's exit gate: every loop's loss counts by the probability of exiting there (Zhu et al. 2025, stage I).

Shapes: B sequences, L positions, N = B·L tokens, D width, V vocabulary, T loops.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor
from torch.nn import functional as F
from torch.utils.checkpoint import checkpoint

from lt2.config import ConfigError, ExitGate
from lt2.train.loss import IGNORE, Objective, next_token_targets, per_token

if TYPE_CHECKING:
    from lt2.train.config import TrainConfig
    from lt2.train.loop import Batch
    from lt2.train.objectives import ExitGateConfig


def exit_gate_objective(
    *, entropy_weight: float = 0.05, document_mask: bool = False, chunk_rows: int = 1024
) -> Objective:
    """sum_t p_t CE_t - entropy_weight · H(p) per token, plus the model's auxiliary losses.

    Without the entropy term the gate collapses onto one loop. Metrics: `ce` of the last loop, `expected_ce`,
    `exit_entropy` and `mean_loops`, the expected depth. Holds chunk_rows rows of logits at a time.

    Raises:
        ConfigError: the model has no exit gate.
    """

    def objective(model: Any, batch: Batch) -> tuple[Tensor, Tensor, dict[str, Tensor]]:
        if not isinstance(model.config.halting, ExitGate):
            raise ConfigError("exit_gate_objective needs a model with halting.type 'exit_gate'")
        doc_ids = batch.input_doc_ids(document_mask)
        output = model(batch.tokens[:, :-1], doc_ids=doc_ids, step=batch.step, per_loop=True)
        rows = next_token_targets(batch, document_mask=document_mask)
        targets = rows.flatten()
        losses = torch.stack(
            [token_losses(h.flatten(0, 1), model.head_weight, targets, chunk_rows) for h in output.loops], -1
        )  # (N, T), 0 where nothing is learned
        learned = (targets != IGNORE).to(losses.dtype)
        p = output.weights.flatten(0, 1).to(losses.dtype)
        total = expected_exit_loss(losses, p, entropy_weight=entropy_weight)
        n_tokens = (targets != IGNORE).sum()
        aux = per_token(output.aux, rows)
        depth = (p * torch.arange(1, p.shape[-1] + 1, device=p.device)).sum(-1)
        metrics = {
            "ce": losses[:, -1].sum(),
            "expected_ce": (p * losses).sum(),
            "exit_entropy": (entropy(p) * learned).sum(),
            "mean_loops": (depth * learned).sum(),
            **aux,
        }
        return (
            (total * learned).sum() + sum(aux.values()),
            n_tokens,
            {name: value.detach() for name, value in metrics.items()},
        )

    return objective


def expected_exit_loss(losses: Tensor, p: Tensor, *, entropy_weight: float) -> Tensor:
    """sum_t p_t loss_t - entropy_weight · H(p); losses and p, the gate's distribution, are (..., T). Returns (...)."""
    return (p * losses).sum(-1) - entropy_weight * entropy(p)


def entropy(p: Tensor) -> Tensor:
    """In nats over the last dimension; a zero probability adds nothing, and has a zero gradient."""
    return torch.special.entr(p.clamp(min=torch.finfo(p.dtype).tiny)).sum(-1)


def token_losses(hidden: Tensor, weight: Tensor, targets: Tensor, rows: int) -> Tensor:
    """Cross entropy of each token, (N,), of softmax(hidden @ weight.T); 0 where targets is IGNORE.

    Chunks of `rows` logits are recomputed in backward instead of kept.
    """

    def chunk(h: Tensor, t: Tensor) -> Tensor:
        logits = F.linear(h, weight.to(h.dtype))
        wide = logits.to(torch.promote_types(logits.dtype, torch.float32))
        return F.cross_entropy(wide, t, ignore_index=IGNORE, reduction="none")

    pieces = [
        checkpoint(chunk, hidden[start : start + rows], targets[start : start + rows], use_reentrant=False)
        for start in range(0, len(hidden), rows)
    ]
    return torch.cat(pieces)  # type: ignore[arg-type]


def build_exit_gate(config: ExitGateConfig, train: TrainConfig) -> Objective:
    if train.z_loss:
        raise ConfigError("objective 'exit_gate' has no z-loss; set train.z_loss to 0")
    return exit_gate_objective(entropy_weight=config.entropy_weight, document_mask=train.document_mask)
