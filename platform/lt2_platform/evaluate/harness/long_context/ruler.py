"""RULER's tasks besides the needles: variable tracking, common and frequent words, questions among documents.

Made once per tokenizer, length and seed, like needles, with the settings RULER publishes (one chain of four hops; 10
words 30 times among others 3 times; Zipf's exponent 2). Prompts and scores are RULER's, its spelling included. What
differs: every sample has a generator of its own, and a prompt is as long as fits.
"""

from __future__ import annotations

import math
import random
import re
import string
from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

from lt2.config import ConfigError
from lt2_platform.data.tokenizers.tokenize import Tokenizer
from lt2_platform.evaluate.harness.long_context import needles, ruler_qa
from lt2_platform.evaluate.harness.long_context.fit import Drawing, filled, row
from lt2_platform.evaluate.harness.long_context.needle_words import ADJECTIVES, NOUNS

NEW_TOKENS = {"ruler_vt": 30, "ruler_cwe": 120, "ruler_fwe": 50, "ruler_qa_squad": 32, "ruler_qa_hotpot": 32}
TASKS = (*needles.TASKS, *NEW_TOKENS)

HOPS, EXAMPLE_NOISE = 4, 10
VT_INTRODUCTION = "Memorize and track the chain(s) of variable assignment hidden in the following text.\n\n"
VT_QUESTION = (
    "\nQuestion: Find all variables that are assigned the value {value} in the text above. Answer: According to the "
    "chain(s) of variable assignment in the text above, {count} variables are assgined the value {value}, they are:"
)

COMMON = 10
CWE_TEXT = (
    "Below is a numbered list of words. In these words, some appear more often than others. Memorize the ones that "
    "appear most often.\n{context}\nQuestion: What are the 10 most common words in the above list? Answer: The top 10 "
    "words that appear most often in the list are:"
)

ZIPF_SUM = math.pi**2 / 6  # zeta(2)
FWE_TEXT = (
    "Read the following coded text and track the frequency of each coded word. Find the three most frequently appeared "
    "coded words. {context}\nQuestion: Do not provide any explanation. Please ignore the dots '....'. What are the "
    "three most frequently appeared words in the above coded text? Answer: According to the coded text above, the "
    "three most frequently appeared words are:"
)


@dataclass(frozen=True)
class Sources:
    """Files that the tasks are made from: essays (a folder of .txt), SQuAD's and HotpotQA's json."""

    essays: str | None = None
    squad: str | None = None
    hotpot: str | None = None


def make(
    name: str, tokenizer: Tokenizer, length: int, *, samples: int = 500, seed: int = 42, sources: Sources = Sources()
) -> list[dict[str, Any]]:
    """Rows {query, outputs or answers, length, max_length, max_new_tokens} of one of TASKS.

    `outputs` must all be said; of `answers` any one.

    Raises:
        ConfigError: an unknown task, a source that is missing or unreadable, or a length that leaves no room.
    """
    if name in needles.TASKS:
        return needles.make(name, tokenizer, length, samples=samples, seed=seed, essays=sources.essays)
    if name not in NEW_TOKENS:
        raise ConfigError(f"unknown task {name!r} of RULER (known: {', '.join(TASKS)})")
    new_tokens = NEW_TOKENS[name]
    if not name.startswith("ruler_qa"):
        drawing = drawing_of(name, length, sources)
        found = filled(name, drawing, tokenizer, length, new_tokens, samples=samples, seed=seed)
        return [row(*sample, length, max_new_tokens=new_tokens) for sample in found]
    questions = ruler_qa.read(name, sources.squad if name == "ruler_qa_squad" else sources.hotpot)
    questions = ruler_qa.that_fit(questions, tokenizer, length - new_tokens, samples)
    if not questions.asked:
        raise ConfigError(
            f"{name}: {length} tokens leave no room for any question with its documents; "
            "give greater --lengths, or leave the task out of --tasks"
        )
    drawing = Drawing(partial(ruler_qa.sample, questions), 0, len(questions.documents))
    found = filled(name, drawing, tokenizer, length, new_tokens, samples=len(questions.asked), seed=seed)
    rows = [row(*sample, length, max_new_tokens=new_tokens) for sample in found]
    return [{"answers": one.pop("outputs"), **one} for one in rows]


def drawing_of(name: str, length: int, sources: Sources) -> Drawing:
    if name == "ruler_vt":
        return Drawing(lambda units, _, rng: tracking(units, rng), HOPS + 1, length)
    if name == "ruler_fwe":
        return Drawing(lambda units, _, rng: frequent_words(units, length, rng), FEWEST_CODED, length)
    words, few = vocabulary(sources.essays), 20 if length < 4096 else 40  # words of the worked example
    too_few = f"only {len(words):,} words (--essays adds more)"
    return Drawing(lambda units, _, rng: common_words(units, few, words, rng), COMMON + 1, len(words), too_few)


# Variable tracking


def tracking(units: int, rng: random.Random) -> tuple[str, list[str]]:
    """One worked example, then a chain VAR A = 12345, VAR B = VAR A, … among `units` sentences; all its names count."""
    example, names = chain_in_noise(EXAMPLE_NOISE, 3, rng)
    text, outputs = chain_in_noise(units, 5, rng)
    return VT_INTRODUCTION + example + " " + " ".join(names) + "\n\n\n\n" + VT_INTRODUCTION + text, outputs


def chain_in_noise(units: int, letters: int, rng: random.Random) -> tuple[str, list[str]]:
    names: list[str] = []
    while len(names) < HOPS + 1:
        name = "".join(rng.choices(string.ascii_uppercase, k=letters))
        names += [name] * (name not in names)
    value = str(rng.randint(10_000, 99_999))
    assigned = [f"VAR {names[0]} = {value}", *(f"VAR {b} = VAR {a} " for a, b in zip(names, names[1:]))]
    sentences = [needles.GRASS + "\n"] * units
    for i, place in enumerate(sorted(rng.sample(range(units), len(assigned)))):
        sentences.insert(place + i, assigned[i])
    context = " ".join(sentences).replace(". \n", ".\n")
    return context + VT_QUESTION.format(value=value, count=HOPS + 1), names


# Common words


def common_words(units: int, few: int, words: Sequence[str], rng: random.Random) -> tuple[str, list[str]]:
    """A worked example of `few` words, then a numbered list of `units` words of which 10 are common."""
    often, seldom = ((3, 1), (6, 1)) if few == 20 else ((10, 3), (30, 3))
    example, answers = numbered(few, *often, words, rng)
    text, outputs = numbered(units, *seldom, words, rng)
    said = " ".join(f"{i}. {word}" for i, word in enumerate(answers, start=1))
    return f"{CWE_TEXT.format(context=example)} {said}\n{CWE_TEXT.format(context=text)}", outputs


def numbered(count: int, repeats: int, others: int, words: Sequence[str], rng: random.Random) -> tuple[str, list[str]]:
    drawn = rng.sample(words, count)
    listed = drawn[:COMMON] * repeats + drawn[COMMON:] * others
    rng.shuffle(listed)
    return " ".join(f"{i}. {word}" for i, word in enumerate(listed, start=1)), drawn[:COMMON]


def vocabulary(essays: str | None) -> list[str]:
    """Words to list: those of the needles' keys, and with essays theirs (lower case, four letters or more)."""
    found = {*ADJECTIVES, *NOUNS}
    if essays is not None:
        text = " ".join(needles.read_essays(essays, "ruler_cwe"))
        found.update(re.findall(r"(?<![\w'’-])[a-z]{4,12}(?![\w'’-])", text))
    return sorted(found)


# Frequent words

FEWEST_CODED = 120  # where the fourth and the fifth word differ in count


def frequent_words(units: int, length: int, rng: random.Random) -> tuple[str, list[str]]:
    """Made-up words, the k-th of them units / (k² ζ(2)) times; the first is written as dots, the next three count."""
    size = max(length // 50, 5)
    coded: dict[str, None] = {}
    while len(coded) < size:
        coded["".join(rng.choices(string.ascii_lowercase, k=6))] = None
    vocabulary = ["...", *list(coded)[1:]]
    listed = [word for k, word in enumerate(vocabulary, start=1) for _ in range(int(units / (k * k * ZIPF_SUM)))]
    rng.shuffle(listed)
    return FWE_TEXT.format(context=" ".join(listed)), vocabulary[1:4]
