"""Token-weighted perplexity on held-out packed sequences."""

from __future__ import annotations

import math
from collections.abc import Iterator
from functools import partial
from typing import Any

import numpy as np
import torch
from torch import Tensor

from lt2.config import ConfigError, RandomLayout
from lt2.model import LoopedLM
from lt2.train.loop import Batch
from lt2.train.loss import IGNORE, next_token_objective, next_token_targets
from lt2.voting import mean_probability, voted_logprobs
from lt2_platform.data.stream import PackedDataset
from lt2_platform.data.tokenizers.tokenize import Tokenizer, load_recorded
from lt2_platform.evaluate.config import HeldOut, PerplexityConfig
from lt2_platform.evaluate.spans import grouped, mean_of_spans
from lt2_platform.evaluate.tasks import TaskContext
from lt2_platform.progress import Progress, silent


def perplexity_rows(config: PerplexityConfig, model: LoopedLM, context: TaskContext) -> list[dict[str, Any]]:
    """The task "perplexity"."""
    if context.dataset is None:
        raise ConfigError("task perplexity needs packed data with a validation split; name it as the evaluation's data")
    check_tokens(context.dataset, context.tokenizer)
    found = perplexity(
        model,
        context.dataset,
        batch_size=config.batch_size,
        max_sequences=config.max_sequences,
        document_mask=config.document_mask,
        held_out=config.held_out,
        vote=True,
        progress=context.progress,
    )
    more = {"n": found["tokens"], **said_of(model, context.dataset)}
    spread = {key: found[key] for key in ("stderr", "groups") if key in found}
    return [
        {
            "metric": "loss",
            "value": found["loss"],
            "unit": "nats/token",
            "note": "held-out documents",
            **spread,
            **more,
        },
        {"metric": "perplexity", "value": found["perplexity"], "unit": "", "note": "", **more},
    ]


def said_of(model: LoopedLM, dataset: PackedDataset) -> dict[str, Any]:
    """What rows say of how and on what they were measured: the `votes` of a random layout, and the `data`."""
    layout = model.config.layout
    votes = {"votes": layout.votes} if isinstance(layout, RandomLayout) else {}
    fingerprint = dataset.manifest.get("fingerprint")  # so a run's settings say that of its own data
    return votes | ({"data": fingerprint[:12]} if fingerprint else {})


@torch.no_grad()
def perplexity(
    model: LoopedLM,
    dataset: PackedDataset,
    *,
    batch_size: int = 8,
    max_sequences: int | None = None,
    document_mask: bool = False,
    held_out: HeldOut = "all",
    vote: bool = False,
    progress: Progress = silent,
) -> dict[str, Any]:
    """exp of the mean negative log-likelihood (nats) over every predicted token of the split, pads excluded.

    held_out: the part of the split, see `held_out_rows`; max_sequences counts from its beginning.
    vote: a model of random layout is scored by the mean probability of its draws, else by its first draw.
    progress: takes what to show after each batch.

    Returns {loss, perplexity, tokens, sequences, groups, maybe stderr}: the standard error of the loss is over batches,
    and `groups` is what `spans.difference` takes.

    Raises:
        ConfigError: the split is empty, its tokens do not fit the model's vocabulary, or none of them counts.
    """
    part = held_out_rows(dataset, held_out)[:max_sequences]
    if dataset.vocab_size > model.config.vocab_size:
        raise ConfigError(
            f"{dataset.uri} has {dataset.vocab_size} kinds of token, the model {model.config.vocab_size}; "
            "evaluate it on data prepared with its own tokenizer"
        )
    was_training = model.training
    model.eval()
    objective = next_token_objective(document_mask=document_mask, auxiliary=False)
    if vote and isinstance(model.config.layout, RandomLayout):
        objective = partial(voted_loss, document_mask=document_mask)
    device = model.embed.weight.device
    nats, tokens = [], []  # of each batch
    batches = math.ceil(len(part) / batch_size)
    for done, rows in enumerate(chunks(part, batch_size), 1):
        loss_sum, n_tokens, _ = objective(model, Batch.from_numpy(dataset.batch(rows), device))
        nats.append(float(loss_sum))
        tokens.append(int(n_tokens))
        progress({"message": "perplexity", "batch": done, "batches": batches})
    model.train(was_training)
    check_counted(count := sum(tokens), dataset, part)
    mean = sum(nats) / count
    exponential = math.inf if mean > 709 else math.exp(mean)  # of a model that diverged, no float holds more
    sums = np.array(nats), np.array(tokens)
    found = {"loss": mean, "perplexity": exponential, "tokens": count, "sequences": len(part), "groups": grouped(*sums)}
    return found | {"stderr": error} if (error := mean_of_spans(*sums).get("stderr")) else found


def voted_loss(model: LoopedLM, batch: Batch, *, document_mask: bool) -> tuple[Tensor, Tensor, dict[str, Tensor]]:
    """`next_token_objective` of the draws' mean probability."""
    doc_ids = batch.doc_ids if document_mask else None
    logprobs = mean_probability(voted_logprobs(model, batch.tokens, doc_ids=doc_ids))  # (B, L)
    counted = next_token_targets(batch, document_mask=document_mask) != IGNORE
    return -logprobs[counted].double().sum(), counted.sum(), {}


def held_out_rows(dataset: PackedDataset, part: HeldOut) -> range:
    """The rows of a split that are "all", or of its halves: "selection", on which layers are chosen, and "report".

    A split packed in rows of another length has the same documents in the same order, so its halves are the same text
    but for the one document at their border.

    Raises:
        ConfigError: there are none.
    """
    n = dataset.n_sequences
    found = {"all": range(n), "selection": range(n // 2), "report": range(n // 2, n)}[part]
    if part != "all" and n == 1:
        raise ConfigError(f"{dataset.uri}: one {dataset.split} sequence has no halves; raise validation_fraction")
    if not found:
        raise ConfigError(
            f"{dataset.uri}: no {dataset.split} sequences; prepare two or more different documents with a "
            "validation_fraction above 0"
        )
    return found


def check_tokens(dataset: PackedDataset, tokenizer: Tokenizer) -> None:
    """Raise ConfigError unless `dataset` is of the model's tokenizer: another's ids may well be in its vocabulary, and
    mean something else.
    """
    record = dataset.manifest["tokenizer"]
    if record["sha256"] == tokenizer.sha256:
        return
    theirs = load_recorded(record, dataset.storage)
    if theirs.vocabulary != tokenizer.vocabulary:
        raise ConfigError(
            f"{dataset.uri} was prepared with tokenizer {record['name']!r}, the model was trained with "
            f"{tokenizer.name!r} of another vocabulary; evaluate it on data prepared with its own tokenizer"
        )


def check_counted(tokens: int, dataset: PackedDataset, rows: range) -> None:
    """Raise ConfigError where no token of `rows` counts in the loss: of prompts alone, or documents of one token."""
    if not tokens:
        raise ConfigError(
            f"{dataset.uri}: no token of the {len(rows)} {dataset.split} sequences asked for counts in the loss; ask "
            "for more (train.eval_sequences, a task's max_sequences), or prepare longer rows"
        )


def chunks(rows: range, size: int) -> Iterator[np.ndarray]:
    for start in range(0, len(rows), size):
        yield np.array(rows[start : start + size])
