"""Token-weighted perplexity on held-out packed sequences, and the unigram entropy a model must beat."""

from __future__ import annotations

import math
from collections.abc import Iterator
from typing import Any

import numpy as np
import torch

from lt2.config import ConfigError
from lt2.loss import next_token_objective
from lt2.model import LoopedLM
from lt2.training import Batch
from lt2_platform.data.stream import PackedDataset
from lt2_platform.evaluate.config import PerplexityConfig
from lt2_platform.evaluate.tasks import TaskContext


def perplexity_rows(config: PerplexityConfig, model: LoopedLM, context: TaskContext) -> list[dict[str, Any]]:
    """The task "perplexity"."""
    if context.dataset is None:
        raise ConfigError("task perplexity needs packed data with a validation split; name it as the evaluation's data")
    found = perplexity(
        model,
        context.dataset,
        batch_size=config.batch_size,
        max_sequences=config.max_sequences,
        document_mask=config.document_mask,
    )
    return [
        {
            "metric": "loss",
            "value": found["loss"],
            "n": found["tokens"],
            "unit": "nats/token",
            "note": "held-out documents",
        },
        {"metric": "perplexity", "value": found["perplexity"], "n": found["tokens"], "unit": "", "note": ""},
    ]


@torch.no_grad()
def perplexity(
    model: LoopedLM,
    dataset: PackedDataset,
    *,
    batch_size: int = 8,
    max_sequences: int | None = None,
    document_mask: bool = False,
) -> dict[str, Any]:
    """exp of the mean negative log-likelihood (nats) over every predicted token of the split, pads excluded.

    Raises:
        ConfigError: the split is empty, or its tokens do not fit the model's vocabulary.
    """
    n_sequences = min(dataset.n_sequences, max_sequences or dataset.n_sequences)
    if n_sequences == 0:
        raise ConfigError(f"{dataset.uri}: no validation sequences; prepare with a larger validation_fraction")
    if dataset.vocab_size > model.config.vocab_size:
        raise ConfigError(
            f"{dataset.uri} has {dataset.vocab_size} kinds of token, the model {model.config.vocab_size}; "
            "evaluate it on data prepared with its own tokenizer"
        )
    was_training = model.training
    model.eval()
    objective = next_token_objective(document_mask=document_mask, auxiliary=False)
    device = model.embed.weight.device
    total, count = 0.0, 0
    for rows in chunks(n_sequences, batch_size):
        loss_sum, n_tokens, _ = objective(model, Batch.from_numpy(dataset.batch(rows), device))
        total += float(loss_sum)
        count += int(n_tokens)
    model.train(was_training)
    mean = total / count
    return {"loss": mean, "perplexity": math.exp(mean), "tokens": count, "sequences": n_sequences}


def unigram_entropy(dataset: PackedDataset, *, max_sequences: int = 4096) -> float:
    """Entropy (nats) of the first max_sequences rows' token distribution: the loss of a model with no context."""
    counts = np.zeros(dataset.vocab_size, dtype=np.int64)
    for rows in chunks(min(dataset.n_sequences, max_sequences), 256):
        counts += np.bincount(dataset.batch(rows)["tokens"].reshape(-1), minlength=len(counts))
    p = counts[counts > 0] / counts.sum()
    return float(-(p * np.log(p)).sum())


def chunks(n: int, size: int) -> Iterator[np.ndarray]:
    for start in range(0, n, size):
        yield np.arange(start, min(start + size, n))
