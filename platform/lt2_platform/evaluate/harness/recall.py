"""Recall tasks: an answer must appear in a short greedy continuation. Their documents are cut around the answer.

The model reads a document, then the prompt that asks, and continues. Of a longer document remains what fits a window of
tokens, centred on the first answer; the prompt stays whole. Cloze rows {context, prompt, answers} have both apart, in
SWDE, FDA and SQuAD completion the prompt is the last line of the text.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from lt2_platform.data.tokenizers.tokenize import Tokenizer

WINDOW, NEW_TOKENS = 2048, 48
PROMPT_CHARACTERS = 1000  # of a last line that is longer, this much of its end is the prompt


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
        return tokenizer.decode(ids[len(ids) - size :].tolist())
    middle = len(tokenizer.encode_batch([context[: min(places)]])[0])
    first = int(np.clip(middle - size // 2, 0, len(ids) - size))
    return tokenizer.decode(ids[first : first + size].tolist())


def cut_to_window(document: str, prompt: str, answers: Sequence[str], tokenizer: Tokenizer, window: int) -> str:
    """Document and prompt, the document cut around an answer so that with BOS and 48 new tokens they fit `window`."""
    count = lambda text: len(tokenizer.encode_batch([text])[0])  # noqa: E731
    room = window - NEW_TOKENS - 1
    if count(document + prompt) <= room:
        return document + prompt
    size = max(room - count(prompt), 0)
    while True:
        text = cut_around(document, answers, tokenizer, size) + prompt
        over = count(text) - room
        if over <= 0 or size == 0:
            return text
        size = max(size - over, 0)  # a part of a text may need more tokens than it had in the whole


def document_and_prompt(text: str) -> tuple[str, str]:
    """A text in two: the prompt is its last line with the line breaks before, or the end of a very long line."""
    document = text[: text.rfind("\n") + 1].rstrip()
    prompt = text[len(document) :]
    if len(prompt) > PROMPT_CHARACTERS:
        return text[:-PROMPT_CHARACTERS], text[-PROMPT_CHARACTERS:]
    return document, prompt
