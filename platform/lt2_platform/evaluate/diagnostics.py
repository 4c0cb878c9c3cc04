"""The unrolled diagnostics (lt2.analysis.diagnostics) of a model on held-out documents, as rows of an evaluation."""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np
import torch

from lt2.analysis.diagnostics import Reading, unrolled
from lt2.config import ConfigError
from lt2.model import LoopedLM
from lt2_platform.data.stream import PackedDataset
from lt2_platform.evaluate.config import DiagnosticsConfig
from lt2_platform.evaluate.tasks import TaskContext
from lt2_platform.evaluate.validation import check_tokens

ROWS_READ = 512  # packed rows that are searched for starts of documents
SHORTEST = 16  # tokens that are worth a look


def diagnostics_rows(config: DiagnosticsConfig, model: LoopedLM, context: TaskContext) -> list[dict]:
    """The task "diagnostics": one row per reading and (loop, layer), which count from 0.

    `first_token_mass` and `rms` are means over the tokens of all documents, `max_abs` the largest of any.
    """
    if context.dataset is None:
        raise ConfigError("diagnostics read held-out documents; give the evaluation its data")
    check_tokens(context.dataset, context.tokenizer)
    bos = context.tokenizer.bos_id
    spans = list(beginnings(context.dataset, bos_id=bos, count=config.documents, length=config.length))
    if not spans:
        raise ConfigError(
            f"no held-out document of {context.dataset.uri} has its first {SHORTEST} tokens in one row; prepare with a "
            "larger validation_fraction"
        )
    device = model.embed.weight.device
    found = [(len(span), unrolled(model, torch.from_numpy(span)[None].to(device))) for span in spans]
    return [row for place in zip(*(readings for _, readings in found)) for row in _rows(place, [n for n, _ in found])]


def beginnings(dataset: PackedDataset, *, bos_id: int | None, count: int, length: int) -> Iterator[np.ndarray]:
    """The first `length` tokens, or what of them its row holds, of `count` documents, which begin with their BOS."""
    left = count
    for index in range(min(dataset.n_sequences, ROWS_READ)):
        batch = dataset.batch([index])
        tokens, doc_ids = batch["tokens"][0], batch["doc_ids"][0]
        for document in np.unique(doc_ids[doc_ids >= 0]):
            (places,) = np.nonzero(doc_ids == document)
            # A row's document 0 may have begun in the row before; without a BOS only the split's first row tells.
            begins = document > 0 or index == 0 or tokens[0] == bos_id
            if begins and len(places) >= SHORTEST and left:
                left -= 1
                yield tokens[places[:length]]


def _rows(readings: tuple[Reading, ...], lengths: list[int]) -> list[dict]:
    """Rows of one (loop, layer) from its reading in every document."""
    first = readings[0]
    place = {"loop": first.loop, "layer": first.layer, "mixer": first.mixer, "n": len(readings)}
    rows = [
        {"metric": "max_abs", "value": float(np.max([reading.max_abs for reading in readings]))},  # NaN of any is NaN
        {"metric": "rms", "value": float(np.average([reading.rms for reading in readings], weights=lengths))},
    ]
    masses = [reading.first_token_mass for reading in readings if reading.first_token_mass is not None]
    if masses:  # only attention has one
        mean = float(np.average(masses, weights=[length - 1 for length in lengths]))
        rows.insert(0, {"metric": "first_token_mass", "value": mean})
    return [{**row, **place} for row in rows]
