"""Recall tasks: an answer must appear in a short greedy continuation. Cloze items are cut around their answer.

Rows {context, prompt, answers}: the model reads the context, then the prompt, and continues. The context is what
remains of a document after cutting it to a window of tokens centred on the first answer.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from lt2_platform.data.tokenize import Tokenizer

WINDOW, NEW_TOKENS = 2048, 48


def contains_any(doc: Mapping[str, Any], results: Sequence[str]) -> dict[str, float]:
    """Whether any of the answers is in the continuation, whatever the case."""
    return {"contains": float(any(answer.lower() in results[0].lower() for answer in doc["answers"]))}


def contains_all(doc: Mapping[str, Any], results: Sequence[str]) -> dict[str, float]:
    """RULER's score: the share of the outputs that are in the continuation, whatever the case."""
    text = results[0].lower()
    return {"contains": sum(output.lower() in text for output in doc["outputs"]) / len(doc["outputs"])}


def cut_around(context: str, answers: Sequence[str], tokenizer: Tokenizer, size: int) -> str:
    """At most `size` tokens of `context`, an answer's first occurrence in their middle; its end if there is none."""
    ids = tokenizer.encode_batch([context])[0]
    if len(ids) <= size:
        return context
    places = [place for answer in answers if (place := context.lower().find(answer.lower())) >= 0]
    if not places:
        return tokenizer.decode(ids[-size:].tolist())
    middle = len(tokenizer.encode_batch([context[: min(places)]])[0])
    first = int(np.clip(middle - size // 2, 0, len(ids) - size))
    return tokenizer.decode(ids[first : first + size].tolist())


def cloze_text(row: Mapping[str, Any], tokenizer: Tokenizer, window: int) -> str:
    """Context and prompt, so that with BOS and 48 new tokens they fit `window`."""
    taken = len(tokenizer.encode_batch([row["prompt"]])[0]) + NEW_TOKENS + 1
    return cut_around(row["context"], row["answers"], tokenizer, max(window - taken, 0)) + row["prompt"]
