"""Stages 2 and 3: the student's logits after every loop against the teacher's (paper, Sec. Distilling, Eq. kd-loss).

Shapes: B sequences, L positions, D width, V vocabulary, K compared tokens, T loops.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from lt2.config import ConfigError
from lt2.distill.kl import Teacher, TopK, chunked_topk_kl, top_k
from lt2.layout import loops_text
from lt2.train.loss import IGNORE, Objective, next_token_targets, per_token

if TYPE_CHECKING:
    from lt2.model import LoopedLM
    from lt2.train.batch import Batch
    from lt2.train.config import TrainConfig
    from lt2.train.objectives import DistillConfig


def loop_weights(config: DistillConfig, n_loops: int, step: int, steps: int) -> tuple[float, ...]:
    """What each loop's KL weighs at optimizer step `step` (from 0) of `steps`; they sum to 1.

    "scheduled", with u = step/steps: from the final loop alone to all loops alike, linearly until u = ramp, and the
    final loop alone again from u = until.
    """
    u = step / steps
    share = {"scheduled": min(1.0, u / config.ramp) if config.ramp else 1.0, "uniform": 1.0, "final": 0.0}
    r = share[config.supervision]
    if config.supervision == "scheduled" and u >= config.until:
        r = 0.0
    return (*[r / n_loops] * (n_loops - 1), (1 - r) + r / n_loops)


def distill_objective(config: DistillConfig, train: TrainConfig, teacher: LoopedLM | None) -> Objective:
    """The loop-weighted KL of the learned positions (those `next_token_targets` does not ignore), plus the mixers'
    auxiliary losses.

    Loops of weight 0 are left out of the computation. Metrics: `kl`, of the final loop, `kl_loop_<t>` of each loop
    that counts, and each auxiliary loss. Without a teacher the batch must bring its top-k.

    Raises:
        ConfigError: teacher and student of different loops, k above the vocabulary, or a top-k with fewer tokens or
            loops than asked for.
    """
    if teacher is not None:
        teacher.requires_grad_(False)

    def objective(model: Any, batch: Batch) -> tuple[Tensor, Tensor, dict[str, Tensor]]:
        n_loops = model.config.n_loops
        if config.k is not None and config.k > model.config.vocab_size:
            raise ConfigError(f"objective.k {config.k} exceeds the vocabulary of {model.config.vocab_size}; lower it")
        weights = loop_weights(config, n_loops, train.steps if batch.step is None else batch.step, train.steps)
        used = [loop for loop, weight in enumerate(weights) if weight > 0]
        doc_ids = batch.input_doc_ids(train.document_mask)
        given = given_top_k(batch, config, used, n_loops) if teacher is None else None
        if given is None:
            assert teacher is not None
            given = asked_top_k(teacher, batch, config.k, used, n_loops, doc_ids)
        output = model(batch.tokens[:, :-1], doc_ids=doc_ids, step=batch.step, per_loop=True)
        targets = next_token_targets(batch, document_mask=train.document_mask)
        counted = (targets != IGNORE).flatten()
        found = chunked_topk_kl(
            [output.loops[loop].flatten(0, 1) for loop in used],
            model.head_weight,
            given,
            loop_weights=[weights[loop] for loop in used],
            counted=counted,
            temperature=config.temperature,
        )
        aux = per_token(output.aux, targets)
        metrics = {name: value.detach() for name, value in aux.items()}
        if len(used) > 1:
            metrics |= {f"kl_loop_{loop}": value for loop, value in zip(used, found.kl)}
        return found.loss + sum(aux.values()), counted.sum(), {"kl": found.kl[-1], **metrics}

    return objective


@torch.no_grad()
def asked_top_k(
    teacher: LoopedLM, batch: Batch, k: int | None, used: list[int], n_loops: int, doc_ids: Tensor | None
) -> Teacher:
    """Run the teacher on a batch; its top-k after each used loop is then computed when a chunk needs it."""
    if teacher.config.n_loops != n_loops:
        depth = loops_text(teacher.config.n_loops)
        raise ConfigError(f"the teacher runs {depth} and the student {n_loops}; make them equal")
    teacher.eval()
    output = teacher(batch.tokens[:, :-1], doc_ids=doc_ids, per_loop=True)
    assert output.loops is not None
    states = [output.loops[loop].flatten(0, 1) for loop in used]
    return lambda loop, start, stop: top_k(states[loop][start:stop], teacher.head_weight, k)


def given_top_k(batch: Batch, config: DistillConfig, used: list[int], n_loops: int) -> Teacher:
    """The top-k that came with a batch, from a cache: (B, L, T, K), or (B, L, 1, K) of the final loop alone."""
    logits, ids = batch.topk_logits, batch.topk_ids
    if logits is None or ids is None:
        raise ConfigError("objective 'distill' has neither a teacher nor the teacher's top-k; give one of them")
    stored = logits.shape[2]
    if config.k is None or config.k > logits.shape[3]:
        raise ConfigError(f"objective.k {config.k} exceeds the {logits.shape[3]} tokens of the teacher's stored top-k")
    if stored != n_loops and used != [n_loops - 1]:
        raise ConfigError(
            f"the teacher's stored top-k has {stored} of {n_loops} loops; store all, or set supervision to 'final'"
        )
    places = [loop - n_loops + stored for loop in used]
    values, tokens = ([t[:, :, place, : config.k].flatten(0, 1) for place in places] for t in (logits, ids))
    return lambda loop, start, stop: TopK(values[loop][start:stop].float(), tokens[loop][start:stop].long())


def build_distill(config: DistillConfig, train: TrainConfig, teacher: LoopedLM | None) -> Objective:
    return distill_objective(config, train, teacher)
