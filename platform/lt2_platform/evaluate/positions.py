"""Loss by position in a document: how much a model still gains from what it read long ago.

A model that forgets levels off early; one that cannot go beyond the length it was trained at turns up there.

Shapes: S spans of L predicted tokens, B of them at a time.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from itertools import islice
from typing import Any

import numpy as np
import torch
from torch import Tensor

from lt2.config import ConfigError, RandomLayout
from lt2.model import LoopedLM
from lt2.train.batch import Batch
from lt2.train.loss import IGNORE, chunked_cross_entropy, next_token_targets
from lt2.voting import mean_probability, voted_logprobs
from lt2_platform.data.stream import PackedDataset
from lt2_platform.evaluate.config import PositionsConfig
from lt2_platform.evaluate.spans import grouped, mean_of_spans
from lt2_platform.evaluate.tasks import TaskContext
from lt2_platform.evaluate.validation import check_tokens, chunks, held_out_rows, said_of

READ = 64  # packed rows at a time
LOOKED_AT = 512  # rows that decide on a length
ENOUGH = 32  # spans


def positions_rows(config: PositionsConfig, model: LoopedLM, context: TaskContext) -> list[dict[str, Any]]:
    """The task "positions": `loss` over all positions, `late_loss` over the second half of them, and `loss` at each
    octave of positions, whose rows say its `first` and its last `position`, counted from 1. All have the `groups` of
    spans that `spans.difference` takes.

    The standard error is over spans, whose tokens are not independent; `n` counts tokens.

    Raises:
        ConfigError: no data, data of another tokenizer, or no document that holds a span.
    """
    dataset = context.dataset
    if dataset is None:
        raise ConfigError("positions read held-out documents; give the evaluation its data")
    check_tokens(dataset, context.tokenizer)
    length = config.length or length_for(dataset, held_out_rows(dataset, config.held_out))
    parts = parts_of(length)
    sums = []  # of each batch (2, B, parts)
    for done, batch in enumerate(batches(dataset, config, length), 1):
        both = torch.stack(losses_of(model, batch.to(model.embed.weight.device)))  # (2, B, L)
        sums.append(torch.stack([both[..., first - 1 : last].sum(-1) for _, first, last, _ in parts], -1).cpu())
        context.progress({"message": "positions", "batch": done})
    if not sums:
        raise ConfigError(too_short(dataset, config, length))
    nats, tokens = torch.cat(sums, 1).numpy()  # (S, parts) each
    more = {"unit": "nats/token", "length": length, **said_of(model, dataset)}
    rows = []
    for place, (metric, _, _, where) in enumerate(parts):
        sums_of = nats[:, place], tokens[:, place]
        if not sums_of[1].any():  # these are of conversations' prompts alone
            continue
        rows.append({"metric": metric, **mean_of_spans(*sums_of), **where, "groups": grouped(*sums_of), **more})
    return rows


def losses_of(model: LoopedLM, batch: Batch) -> tuple[Tensor, Tensor]:
    """-log p of every predicted token, 0 where it does not count, and 1 where it does: (B, L) fp64 each."""
    targets = next_token_targets(batch, document_mask=False)
    if isinstance(model.config.layout, RandomLayout):
        nats = -mean_probability(voted_logprobs(model, batch.tokens)).masked_fill(targets == IGNORE, 0)
    else:
        hidden = model(batch.tokens[:, :-1]).hidden.flatten(0, 1)
        nats = chunked_cross_entropy(hidden, model.head_weight, targets.flatten()).ce_tokens.view(targets.shape)
    return nats.double(), (targets != IGNORE).double()


def batches(dataset: PackedDataset, config: PositionsConfig, length: int) -> Iterator[Batch]:
    """The spans of `length` + 1 tokens, `batch_size` at a time."""
    found = islice(spans(dataset, held_out_rows(dataset, config.held_out), length), config.max_spans)
    while some := list(islice(found, config.batch_size)):
        yield Batch.from_numpy({name: np.stack([span[name] for span in some]) for name in some[0]})


def spans(dataset: PackedDataset, rows: range, length: int) -> Iterator[dict[str, np.ndarray]]:
    """Each `length` + 1 tokens of one document that lie in one row; the last token of one is the next one's first."""
    for numbers in chunks(rows, READ):
        batch = dataset.batch(numbers)
        columns = {name: batch[name] for name in ("tokens", "loss_mask") if name in batch}
        for row, doc_ids in enumerate(batch["doc_ids"]):
            for begin, end in _documents(doc_ids):
                for start in range(begin, end - length, length):
                    yield {name: values[row, start : start + length + 1] for name, values in columns.items()}


def _documents(doc_ids: np.ndarray) -> list[tuple[int, int]]:
    """[begin, end) of every document of a row, without padding."""
    borders = [0, *(np.flatnonzero(np.diff(doc_ids)) + 1), len(doc_ids)]
    return [(begin, end) for begin, end in zip(borders, borders[1:]) if doc_ids[begin] >= 0]


def length_for(dataset: PackedDataset, rows: range) -> int:
    """The rows' seq_len, or as often halved as it takes for the first rows to hold ENOUGH spans, or else any."""
    predicted = _predicted(dataset, rows[:LOOKED_AT])
    lengths = [dataset.seq_len >> halvings for halvings in range(dataset.seq_len.bit_length() - 1)]
    spans_of = {length: int((predicted // length).sum()) for length in lengths}
    return next((length for wanted in (ENOUGH, 1) for length in lengths if spans_of[length] >= wanted), dataset.seq_len)


def too_short(dataset: PackedDataset, config: PositionsConfig, length: int) -> str:
    """Why there is no span, with the longest length of which there is one."""
    longest = _predicted(dataset, held_out_rows(dataset, config.held_out)).max(initial=0)
    return (
        f"{dataset.uri}: no held-out document has {length + 1} tokens in one row of {dataset.seq_len + 1}; set the "
        f"task's length to at most {longest}, or prepare longer documents or rows"
    )


def _predicted(dataset: PackedDataset, rows: range) -> np.ndarray:
    """For every document in these rows, how many of its tokens have another before them."""
    ids = (doc_ids for numbers in chunks(rows, READ) for doc_ids in dataset.batch(numbers)["doc_ids"])
    return np.array([end - begin - 1 for row in ids for begin, end in _documents(row)], dtype=np.int64)


def parts_of(length: int) -> list[tuple[str, int, int, dict[str, int]]]:
    """(metric, first position, last one, what its row says of them): all, the second half, and every octave."""
    ends = [2**power for power in range(math.ceil(math.log2(length)))] + [length]
    octaves = zip([1, *(end + 1 for end in ends)], ends)  # 1, 2, 3 to 4, 5 to 8, …
    parts: list[tuple[str, int, int, dict[str, int]]] = [
        ("loss", 1, length, {}),
        ("late_loss", length // 2 + 1, length, {}),
    ]
    return parts + [("loss", first, last, {"first": first, "position": last}) for first, last in octaves]
