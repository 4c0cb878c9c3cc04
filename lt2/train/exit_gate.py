"""Training Ouro's exit gate: every loop's loss counts by the probability of exiting there (Zhu et al. 2025, stage I).

Shapes: B sequences, L positions, N = B·L tokens, D width, T loops.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from lt2.config import ConfigError, ExitGate
from lt2.train.loss import IGNORE, Objective, chunked_cross_entropy, next_token_targets, per_token

if TYPE_CHECKING:
    from lt2.train.batch import Batch
    from lt2.train.config import TrainConfig
    from lt2.train.objectives import ExitGateConfig


def exit_gate_objective(
    *, entropy_weight: float = 0.05, document_mask: bool = False, chunk_rows: int | None = None
) -> Objective:
    """sum_t p_t CE_t - entropy_weight · H(p) per token, plus the model's auxiliary losses.

    Without the entropy term the gate collapses onto one loop. Metrics: `ce` of the last loop, `expected_ce`,
    `exit_entropy` and `mean_loops`, the expected depth. Holds chunk_rows rows of logits at a time (None: as
    `chunked_cross_entropy` does).

    Raises:
        ConfigError: the model has no exit gate.
    """

    def objective(model: Any, batch: Batch) -> tuple[Tensor, Tensor, dict[str, Tensor]]:
        if not isinstance(model.config.halting, ExitGate):
            raise ConfigError("exit_gate_objective needs a model with halting.type 'exit_gate'")
        doc_ids = batch.input_doc_ids(document_mask)
        output = model(batch.tokens[:, :-1], doc_ids=doc_ids, step=batch.step, per_loop=True)
        rows = next_token_targets(batch, document_mask=document_mask)
        targets, n_loops = rows.flatten(), len(output.loops)
        p = output.weights.flatten(0, 1)  # (N, T)
        # All loops in one call: the head's gradient is then summed in fp32, and held once.
        states = torch.cat([h.flatten(0, 1) for h in output.loops])  # (T·N, D)
        result = chunked_cross_entropy(
            states, model.head_weight, targets.repeat(n_loops), token_weights=p.T.flatten(), chunk_rows=chunk_rows
        )
        learned = (targets != IGNORE).to(p.dtype)
        exit_entropy = (entropy(p) * learned).sum()
        aux = per_token(output.aux, rows)
        depth = (p * torch.arange(1, n_loops + 1, device=p.device)).sum(-1)
        metrics = {
            "ce": result.ce_tokens.view(n_loops, -1)[-1].sum(),
            "expected_ce": result.loss,
            "exit_entropy": exit_entropy,
            "mean_loops": (depth * learned).sum(),
            **aux,
        }
        return (
            result.loss - entropy_weight * exit_entropy + sum(aux.values()),
            (targets != IGNORE).sum(),
            {name: value.detach() for name, value in metrics.items()},
        )

    return objective


def entropy(p: Tensor) -> Tensor:
    """Entropy in nats over the last dimension; a zero probability adds nothing, and has a zero gradient."""
    return torch.special.entr(p.clamp(min=torch.finfo(p.dtype).tiny)).sum(-1)


def build_exit_gate(config: ExitGateConfig, train: TrainConfig) -> Objective:
    config.refuse_z_loss(train)
    return exit_gate_objective(entropy_weight=config.entropy_weight, document_mask=train.document_mask)
