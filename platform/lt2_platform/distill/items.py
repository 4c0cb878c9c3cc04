"""Test items from a dataset's own held-out text, for models too small for the public benchmarks."""

from __future__ import annotations

import random
from collections.abc import Sequence
from typing import Any

import numpy as np
import pyarrow as pa

from lt2.config import ConfigError
from lt2_platform.data.stream import PackedDataset
from lt2_platform.data.tokenizers.tokenize import Tokenizer, load_recorded
from lt2_platform.evaluate.config import HeldOut
from lt2_platform.evaluate.harness.long_context import ruler
from lt2_platform.evaluate.harness.tasks import packs
from lt2_platform.evaluate.validation import held_out_rows

CONTINUATION = "continuation"
CHOICES = 4


def make_pack(
    data: str,
    out: str,
    *,
    held_out: HeldOut = "all",
    items: int = 200,
    context: int = 160,
    continuation: int = 32,
    needles: Sequence[str] = (),
    needle_samples: int = 50,
    seed: int = 0,
) -> list[str]:
    """Write an evaluation pack to `out` and return its tasks: `continuation`, and needles as NAME_LENGTH.

    Raises:
        ConfigError: too little held-out text, or a needle task that is unknown or needs essays.
    """
    dataset = PackedDataset(data, "validation")
    tokenizer = load_recorded(dataset.manifest["tokenizer"], dataset.storage)
    tables = {CONTINUATION: {"test": continuations(dataset, tokenizer, held_out, items, context, continuation, seed)}}
    for name in needles:
        task, _, length = name.rpartition("_")
        if not length.isdigit():
            raise ConfigError(f"needles {name!r}: give NAME_LENGTH, e.g. niah_multikey_2_512")
        rows = ruler.make(task, tokenizer, int(length), samples=needle_samples, seed=seed)
        tables[name] = {"test": pa.Table.from_pylist(rows)}
    packs.add(out, tables, dict.fromkeys(tables, data), tokenizer=tokenizer)
    return list(tables)


def continuations(
    dataset: PackedDataset, tokenizer: Tokenizer, part: HeldOut, items: int, context: int, length: int, seed: int
) -> pa.Table:
    """Rows {query, choices, gold}: `context` tokens of a held-out document, and which `length` tokens come next.

    They are spread evenly over the part of the held-out rows.
    """
    pieces = list(_pieces(dataset, held_out_rows(dataset, part), context + length, seed))
    if len(pieces) < CHOICES:
        raise ConfigError(
            f"{dataset.uri}: {len(pieces)} held-out documents are of {context + length} tokens or more; prepare with "
            "a larger validation_fraction, or make items shorter"
        )
    rows: list[dict[str, Any]] = []
    count = min(items, len(pieces))
    for index in (place * len(pieces) // count for place in range(count)):  # of all documents, not the first few
        rng = random.Random(f"{seed}/{index}")
        others = rng.sample([piece for place, piece in enumerate(pieces) if place != index], CHOICES - 1)
        choices = [tokenizer.decode(piece[context:].tolist()) for piece in (pieces[index], *others)]
        order = rng.sample(range(CHOICES), CHOICES)
        query = tokenizer.decode(pieces[index][:context].tolist())
        rows.append({"query": query, "choices": [choices[i] for i in order], "gold": order.index(0)})
    return pa.Table.from_pylist(rows)


def _pieces(dataset: PackedDataset, rows: range, length: int, seed: int) -> list[np.ndarray]:
    """One stretch of `length` tokens of each of `rows`, inside one document and clear of its ends."""
    found = []
    for number in rows:
        row = dataset.batch([number])
        tokens, docs = row["tokens"][0], row["doc_ids"][0]
        starts = [
            start
            for start in range(1, len(tokens) - length - 1)
            if docs[start - 1] == docs[start + length] and docs[start] >= 0
        ]
        if starts:
            start = random.Random(f"{seed}/{number}").choice(starts)
            found.append(tokens[start : start + length])
    return found
