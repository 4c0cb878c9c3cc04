"""Stage 1: every new mixer learns to give what the teacher's attention gives (paper, Sec. Distilling).

Teacher-forced: the states are the teacher's in every loop, so all (loop, layer) are regressions of their own and no
gradient passes between them. Teacher and student are one model (a kept layout with `both`): frozen parts run once.

Shapes: B sequences, L positions, D width, T loops, N layers.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from lt2.config import ConfigError, KeptLayout, MixerConfig
from lt2.model import Block
from lt2.sequence import SequenceInfo
from lt2.train.loss import Objective

if TYPE_CHECKING:
    from lt2.train.batch import Batch
    from lt2.train.config import TrainConfig
    from lt2.train.objectives import AlignConfig


@dataclass
class Forced:
    """What `LoopedLM.forward(force=…)` calls in a mixer's place, at every (loop, layer) in order.

    losses: of each call, detached; a recomputation of activations in backward appends more.
    """

    attention: MixerConfig
    loss: str
    losses: list[Tensor | None] = field(default_factory=list)

    def __call__(
        self, block: Block, spec: MixerConfig, seq: SequenceInfo, x: Tensor
    ) -> tuple[Tensor, Tensor | None]:  # x, the block's normed input, and the teacher's update: (B, L, D)
        with torch.no_grad():
            target = block.mixer_post_norm(block.mixers[self.attention.weights](x, self.attention, seq, None)[0])
        if spec.weights == self.attention.weights:
            self.losses.append(None)
            return target, None
        y, aux = block.mixers[spec.weights](x.detach(), spec, seq, None)
        loss = update_loss(target, block.mixer_post_norm(y), self.loss)
        self.losses.append(loss.detach())
        return target, loss if aux is None else loss + aux.mean()


def update_loss(target: Tensor, found: Tensor, kind: str) -> Tensor:
    """Mean over tokens of mean((t - s)²) ("mse") or ‖t - s‖₂/√D ("l2"), for updates (B, L, D); at least fp32."""
    wide = torch.promote_types(target.dtype, torch.float32)
    difference = target.to(wide) - found.to(wide)
    if kind == "mse":
        return difference.square().mean()
    return torch.linalg.vector_norm(difference, dim=-1).mean() * difference.shape[-1] ** -0.5


def align_objective(*, loss: str = "mse", document_mask: bool = False) -> Objective:
    """Mean of `update_loss` over the (loop, layer) with a new mixer, times the number of positions; a mixer's auxiliary
    loss is added to its own.

    Metrics: `align_loop_<t>` and `align_layer_<n>`, means of `update_loss` over the other of the two.

    Raises:
        ConfigError: a model without a kept layout that holds both, or whose every layer keeps its attention.
    """

    def objective(model: Any, batch: Batch) -> tuple[Tensor, Tensor, dict[str, Tensor]]:
        layout = model.config.layout
        if not isinstance(layout, KeptLayout) or not layout.both:
            raise ConfigError("objective 'align' needs a model whose layout is 'kept' with both: true")
        n_layers, n_loops = model.config.n_layers, model.config.n_loops
        aligned = [layer for layer in range(n_layers) if layer not in layout.kept]
        if not aligned:
            raise ConfigError("objective 'align': every layer keeps its attention, so there is nothing to align")
        doc_ids = batch.input_doc_ids(document_mask)
        forced = Forced(layout.attention, loss)
        output = model(batch.tokens[:, :-1], doc_ids=doc_ids, step=batch.step, force=forced)
        # The model averages auxiliary losses over loops and adds them over layers.
        mean = output.aux[layout.mixer.type] / len(aligned)
        n_tokens = torch.full((), batch.tokens[:, 1:].numel(), dtype=torch.int64, device=mean.device)
        losses = torch.stack([value for value in forced.losses if value is not None]).view(n_loops, -1)  # (T, aligned)
        metrics = {f"align_loop_{t}": value * n_tokens for t, value in enumerate(losses.mean(1))}
        metrics |= {f"align_layer_{n}": value * n_tokens for n, value in zip(aligned, losses.mean(0))}
        return mean * n_tokens, n_tokens, metrics

    return objective


def build_align(config: AlignConfig, train: TrainConfig) -> Objective:
    return align_objective(loss=config.loss, document_mask=train.document_mask)
