"""RULER's question answering: a question whose document stands among others. From SQuAD's or HotpotQA's own files."""

from __future__ import annotations

import json
import random
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from lt2.config import ConfigError
from lt2_platform.data.tokenizers.tokenize import Tokenizer

OPTIONS = {"ruler_qa_squad": "--squad", "ruler_qa_hotpot": "--hotpot"}
INSTRUCTION = (
    "Answer the question based on the given documents. Only give me the answer and do not output any other words."
)
TEXT = (
    INSTRUCTION
    + "\n\nThe following are given documents.\n\n{context}\n\n"
    + INSTRUCTION
    + "\n\nQuestion: {question} Answer:"
)


@dataclass(frozen=True)
class Asked:
    """A question, its right answers, the documents that answer it, and those that come first to go with them."""

    question: str
    answers: tuple[str, ...]
    gold: tuple[int, ...]
    near: tuple[int, ...] = ()


@dataclass(frozen=True)
class Questions:
    documents: list[str]
    asked: list[Asked]


def read(name: str, place: str | None) -> Questions:
    """Raises ConfigError if the file is not given, not there, or not of that data set."""
    if place is None:
        file = "dev-v2.0.json" if name == "ruler_qa_squad" else "hotpot_dev_distractor_v1.json"
        raise ConfigError(f"{name} asks questions of a file; give {OPTIONS[name]}, such as {file}")
    path = Path(place).expanduser()
    if not path.is_file():
        raise ConfigError(f"{name}: {place} does not exist; give its json file by {OPTIONS[name]}")
    try:
        data = json.loads(path.read_text())
        found = squad(data["data"]) if name == "ruler_qa_squad" else hotpot(data)
    except (json.JSONDecodeError, KeyError, TypeError, ValueError) as error:
        raise ConfigError(f"{name}: {place} is not in the layout of its data set ({error!r})") from error
    if not found.asked:
        raise ConfigError(f"{name}: {place} has no question with an answer")
    return found


def squad(articles: list[dict[str, Any]]) -> Questions:
    """SQuAD 1.1 or 2.0 (without what cannot be answered); documents are paragraphs, near ones of the same article."""
    documents = sorted({paragraph["context"] for article in articles for paragraph in article["paragraphs"]})
    number = {text: index for index, text in enumerate(documents)}
    asked = []
    for article in articles:
        numbers = [number[paragraph["context"]] for paragraph in article["paragraphs"]]
        for own, paragraph in zip(numbers, article["paragraphs"]):
            near = tuple(other for other in dict.fromkeys(numbers) if other != own)
            for item in paragraph["qas"]:
                answers = tuple(dict.fromkeys(answer["text"] for answer in item["answers"]))
                if answers and not item.get("is_impossible"):
                    asked.append(Asked(item["question"], answers, (own,), near))
    return Questions(documents, asked)


def hotpot(items: list[dict[str, Any]]) -> Questions:
    """HotpotQA with distractors; a document is a title and its sentences, and the item's ten are its gold ones."""
    texts = [[f"{title}\n{''.join(sentences)}" for title, sentences in item["context"]] for item in items]
    documents = sorted({text for found in texts for text in found})
    number = {text: index for index, text in enumerate(documents)}
    asked = [
        Asked(item["question"], (item["answer"],), tuple(dict.fromkeys(number[text] for text in found)))
        for item, found in zip(items, texts)
    ]
    return Questions(documents, asked)


def that_fit(questions: Questions, tokenizer: Tokenizer, room: int, most: int) -> Questions:
    """The first `most` questions that fit `room` tokens (BOS included) with the documents that answer them."""
    kept = []
    for index, item in enumerate(questions.asked):
        if len(kept) == most:
            break
        text, _ = sample(questions, 0, index, random.Random(0))
        if len(tokenizer.encode_batch([text])[0]) + (tokenizer.bos_id is not None) <= room:
            kept.append(item)
    return Questions(questions.documents, kept)


def sample(questions: Questions, count: int, index: int, rng: random.Random) -> tuple[str, list[str]]:
    """The index-th question among `count` documents: its own (all of them, however few are asked for), near, any."""
    item = questions.asked[index]
    more = max(0, count - len(item.gold))
    near = list(item.near) if more > len(item.near) else rng.sample(item.near, more)
    known = {*item.gold, *item.near}
    others = [i for i in range(len(questions.documents)) if i not in known] if more > len(near) else []
    chosen = [*item.gold, *near, *rng.sample(others, min(more - len(near), len(others)))]
    rng.shuffle(chosen)
    context = "\n\n".join(f"Document {i}:\n{questions.documents[n]}" for i, n in enumerate(chosen, start=1))
    return TEXT.format(context=context, question=item.question), list(item.answers)
