"""Needles in a haystack (RULER's NIAH family), made once per tokenizer, length and seed, and kept in a pack.

The texts are RULER's (needle, haystacks, question, answer prefix). What differs: keys come from the lists in
needle_words, every sample has a generator of its own (so that neither order nor other tasks change it), sentences of
essays end at ". ", "! " or "? ", and the haystack is as long as fits instead of a multiple of 25 or 500 units.
"""

from __future__ import annotations

import random
import re
import uuid
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

from lt2.config import ConfigError
from lt2_platform.data.tokenizers.tokenize import Tokenizer
from lt2_platform.evaluate.harness.long_context.fit import Drawing, filled, row
from lt2_platform.evaluate.harness.long_context.needle_words import ADJECTIVES, NOUNS

TOKENS_TO_GENERATE = 128
DEPTHS = [round(100 * i / 39) for i in range(40)]  # percent of the essay before the needle

NEEDLE = "One of the special magic {kind} for {key} is: {value}."
GRASS = "The grass is green. The sky is blue. The sun is yellow. Here we go. There and back again."
TEMPLATE = (
    "{some} special magic {kind} {are} hidden within the following text. Make sure to memorize it. "
    "I will quiz you about the {kind} afterwards.\n{context}\n"
    "What {are_all} the special magic {kind} for {query} mentioned in the provided text?"
)
PREFIX = " The special magic {kind} for {query} mentioned in the provided text {are}"


@dataclass(frozen=True)
class Needles:
    """One task of the family: what hides what, and how many keys, values per key, and asked keys there are."""

    haystack: Literal["grass", "essays", "needles"]
    key: Literal["words", "uuids"] = "words"
    value: Literal["numbers", "uuids"] = "numbers"
    keys: int = 1
    values: int = 1
    queries: int = 1


TASKS: dict[str, Needles] = {
    "niah_single_1": Needles("grass"),
    "niah_single_2": Needles("essays"),
    "niah_single_3": Needles("essays", value="uuids"),
    "niah_multikey_1": Needles("essays", keys=4),
    "niah_multikey_2": Needles("needles"),
    "niah_multikey_3": Needles("needles", key="uuids", value="uuids"),
    "niah_multivalue": Needles("essays", values=4),
    "niah_multiquery": Needles("essays", keys=4, queries=4),
}


def make(
    name: str, tokenizer: Tokenizer, length: int, *, samples: int = 500, seed: int = 42, essays: str | None = None
) -> list[dict[str, Any]]:
    """Rows {query, outputs, length, max_length}: prompts of at most length - 128 tokens, BOS included.

    essays: a folder of .txt files (or one file), for the tasks that hide needles in essays.

    Raises:
        ConfigError: an unknown task, essays missing or too short, or a length that leaves no room.
    """
    if name not in TASKS:
        raise ConfigError(f"unknown needle task {name!r} (known: {', '.join(TASKS)})")
    task = TASKS[name]
    words = read_essays(essays, name) if task.haystack == "essays" else []
    too_few = f"the essays have only {len(words):,} words" if words else None
    drawing = Drawing(lambda units, _, rng: sample(task, words, units, rng), 1, len(words) or length, too_few)
    found = filled(name, drawing, tokenizer, length, TOKENS_TO_GENERATE, samples=samples, seed=seed)
    return [row(*sample, length) for sample in found]


def sample(task: Needles, words: Sequence[str], units: int, rng: random.Random) -> tuple[str, list[str]]:
    """(prompt, answers) with `units` of haystack: words of the essays, or lines."""
    keys: list[str] = []
    while len(keys) < task.keys:
        keys.append(other_key(task, keys, rng))
    values = [[draw(task.value, rng) for _ in range(task.values)] for _ in keys]
    needles = [NEEDLE.format(kind=task.value, key=k, value=v) for k, found in zip(keys, values) for v in found]
    rng.shuffle(needles)
    if task.haystack == "essays":
        context = in_essay(words[:units], needles, rng)
    else:
        lines = [GRASS] * units
        if task.haystack == "needles":
            lines = [
                NEEDLE.format(kind=task.value, key=other_key(task, keys, rng), value=draw(task.value, rng))
                for _ in range(units)
            ]
        for needle in needles:
            lines.insert(rng.randint(0, len(lines)), needle)
        context = "\n".join(lines)
    asked = rng.sample(range(len(keys)), task.queries)
    query = ", ".join(keys[i] for i in asked[:-1]) + ", and " * (len(asked) > 1) + keys[asked[-1]]
    single = task.queries * task.values == 1
    kind = task.value.removesuffix("s") if single else task.value
    are = "is" if single else "are"
    text = TEMPLATE.format(
        some="A" if single else "Some",
        kind=kind,
        are=are,
        are_all=are if single else "are all",
        context=context,
        query=query,
    )
    return text + PREFIX.format(kind=kind, query=query, are=are), [v for i in asked for v in values[i]]


def in_essay(words: Sequence[str], needles: Sequence[str], rng: random.Random) -> str:
    sentences = re.split(r"(?<=[.!?]) ", " ".join(words))
    cuts = sorted(int(len(sentences) * depth / 100) for depth in rng.sample(DEPTHS, len(needles)))
    parts, last = [], 0
    for cut, needle in zip(cuts, needles):
        parts += [*sentences[last:cut], needle]
        last = cut
    return " ".join([*parts, *sentences[last:]])


def other_key(task: Needles, keys: Sequence[str], rng: random.Random) -> str:
    """A key that is none of `keys`: what is asked for would have two values, of which only one counts."""
    while (key := draw(task.key, rng)) in keys:
        pass
    return key


def draw(kind: str, rng: random.Random) -> str:
    if kind == "numbers":
        return str(rng.randint(10**6, 10**7 - 1))
    if kind == "words":
        return f"{rng.choice(ADJECTIVES)}-{rng.choice(NOUNS)}"
    return str(uuid.UUID(int=rng.getrandbits(128), version=4))


def read_essays(place: str | None, name: str) -> list[str]:
    """All words of the essays, files in order of name."""
    if place is None:
        raise ConfigError(f"{name} hides its needles in essays; give --essays, a folder of .txt files")
    path = Path(place).expanduser()
    files = sorted(path.glob("*.txt")) if path.is_dir() else [path]
    if not files or not all(file.is_file() for file in files):
        raise ConfigError(f"{place} has no .txt files; give a folder of essays")
    texts: list[str] = []
    for file in files:
        try:
            texts.append(file.read_text(encoding="utf-8"))
        except UnicodeDecodeError as error:
            raise ConfigError(f"essay {file} is not UTF-8 ({error}); convert or remove it") from error
    return " ".join(texts).split()
