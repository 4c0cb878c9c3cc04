"""Needles: fit, findable, frozen. Cloze recall: the cut keeps the answer. Both end to end through the harness."""

import re

import pyarrow as pa
import pytest

from lt2.config import ConfigError
from lt2_platform.data.tokenizers.tokenize import ByteTokenizer
from lt2_platform.evaluate.checkpoints import evaluate_checkpoint
from lt2_platform.evaluate.config import HarnessConfig
from lt2_platform.evaluate.harness.long_context import needles
from lt2_platform.evaluate.harness.recall import (
    contains_all,
    contains_any,
    cut_around,
    cut_to_window,
    document_and_prompt,
)
from lt2_platform.evaluate.harness.tasks import packs
from tests.platform.evaluate.tiny import model, save

TOKENIZER = ByteTokenizer()


@pytest.fixture
def essays(tmp_path):
    folder = tmp_path / "essays"
    folder.mkdir()
    for name in ("b", "a"):
        text = " ".join(f"Essay {name} says {i} things. Is that many?" for i in range(80))
        (folder / f"{name}.txt").write_text(text)
    return str(folder)


@pytest.mark.parametrize("name", sorted(needles.TASKS))
def test_samples_fit_and_hold_what_is_asked(name, essays):
    rows = needles.make(name, TOKENIZER, 1024, samples=6, essays=essays)
    task = needles.TASKS[name]
    for row in rows:
        assert row["length"] == len(row["query"].encode()) <= 1024 - 128 - 1
        assert len(row["outputs"]) == task.queries * task.values
        assert all(f" is: {output}." in row["query"] for output in row["outputs"])
        asked = row["query"].rsplit("special magic", 1)[1]
        assert not any(output in asked for output in row["outputs"])
        width = 36 if task.value == "uuids" else 7
        assert {len(output) for output in row["outputs"]} == {width}
    assert max(row["length"] for row in rows) > 0.7 * 1024
    assert len({row["query"] for row in rows}) == 6


def test_a_sample_is_a_function_of_seed_task_and_number(essays):
    make = lambda **options: needles.make("niah_single_2", TOKENIZER, 1024, essays=essays, **options)  # noqa: E731
    assert make(samples=5)[:2] == make(samples=2)
    assert make(samples=2) != make(samples=2, seed=7)


@pytest.mark.parametrize("name", ["niah_multikey_1", "niah_multikey_2", "niah_multiquery"])
def test_what_is_asked_for_has_one_value(name, essays, monkeypatch):
    monkeypatch.setattr(needles, "ADJECTIVES", ["red", "old"])
    monkeypatch.setattr(needles, "NOUNS", ["lamp", "bell", "river"])
    for row in needles.make(name, TOKENIZER, 1500, samples=20, essays=essays):
        text, asked = row["query"].rsplit("What ", 1)
        keys = set(re.findall(r"[a-z]+-[a-z]+", asked))
        assert len(keys) == needles.TASKS[name].queries
        assert [text.count(f" for {key} is:") for key in keys] == [1] * len(keys)


def test_frozen_text():
    """A change here changes every published number: bump the revision that `lt2 pack needles` records."""
    (row,) = needles.make("niah_single_1", TOKENIZER, 700, samples=1)
    assert row["query"].startswith(
        "A special magic number is hidden within the following text. Make sure to memorize it. "
        "I will quiz you about the number afterwards.\nThe grass is green. The sky is blue."
    )
    key = row["query"].rsplit(" for ", 1)[1].split(" mentioned")[0]
    assert row["query"].endswith(
        f"\nWhat is the special magic number for {key} mentioned in the provided text?"
        f" The special magic number for {key} mentioned in the provided text is"
    )
    assert f"\nOne of the special magic numbers for {key} is: {row['outputs'][0]}.\n" in row["query"]


@pytest.mark.parametrize(
    ("name", "length", "message"),
    [
        ("niah_single_2", 1024, "give --essays"),
        ("niah_single_1", 300, "leave no room"),
        ("niah_single_9", 1024, "unknown needle task"),
    ],
)
def test_bad_requests(name, length, message):
    with pytest.raises(ConfigError, match=message):
        needles.make(name, TOKENIZER, length, samples=1)


def test_a_length_that_is_too_small_is_told_the_least_that_is_enough():
    with pytest.raises(ConfigError, match="leave no room") as error:
        needles.make("niah_single_1", TOKENIZER, 300, samples=1)
    least = int(str(error.value).partition("it takes ")[2].split()[0])
    assert needles.make("niah_single_1", TOKENIZER, least, samples=1)
    with pytest.raises(ConfigError, match="leave no room"):
        needles.make("niah_single_1", TOKENIZER, least - 1, samples=1)


def test_too_few_essays_are_named(essays, tmp_path):
    with pytest.raises(ConfigError, match="too few to fill 8,192 tokens"):
        needles.make("niah_single_3", TOKENIZER, 8192, samples=1, essays=essays)
    with pytest.raises(ConfigError, match="no .txt files"):
        needles.make("niah_single_3", TOKENIZER, 1024, samples=1, essays=str(tmp_path))
    (tmp_path / "latin1.txt").write_bytes(b"caf\xe9")
    with pytest.raises(ConfigError, match=r"latin1\.txt is not UTF-8 \(.*\); convert or remove it"):
        needles.make("niah_single_3", TOKENIZER, 1024, samples=1, essays=str(tmp_path))


def test_scores():
    doc = {"outputs": ["123", "ABC"], "answers": ["Paris", "the city"]}
    assert contains_all(doc, ["it is 123 and abc"]) == {"contains": 1.0}
    assert contains_all(doc, ["it is 123"]) == {"contains": 0.5}
    assert contains_any(doc, ["THE CITY of light"]) == {"contains": 1.0}
    assert contains_any(doc, ["Rome"]) == {"contains": 0.0}


@pytest.mark.parametrize("place", [0, 3, 500, 995])
def test_the_cut_keeps_the_first_answer_and_its_size(place):
    context = "x" * place + "Answer" + "y" * (1000 - place) + "answer"
    cut = cut_around(context, ["nothing", "answer"], TOKENIZER, 100)
    assert len(cut) == 100
    assert "Answer" in cut
    if 60 < place < 940:
        assert cut.index("Answer") == 50
    assert cut_around("short", ["s"], TOKENIZER, 100) == "short"
    assert cut_around("a" * 90 + "b" * 20, ["z"], TOKENIZER, 20) == "b" * 20


@pytest.mark.parametrize(
    "text", ["A document.\n\nName:", "A document.\nIn it Name", "x" * 3000, "one line", "", "a\n" + "y" * 2000]
)
def test_a_text_is_its_document_and_its_prompt(text):
    document, prompt = document_and_prompt(text)
    assert document + prompt == text
    assert len(prompt) <= 1000
    assert document == document.rstrip()
    if "Name" in text:
        assert (document, prompt.strip()) == ("A document.", text.splitlines()[-1])


def test_what_is_cut_fits_with_its_prompt_whole_whatever_the_tokenizer():
    """Cutting bytes inside a character leaves marks that take three bytes each, so a first cut can be too long."""
    document = "é" * 1500 + "Paris" + "ü" * 1500
    for window in range(100, 120):
        text = cut_to_window(document, "\nCapital:", ["paris"], TOKENIZER, window)
        assert len(text.encode()) + 48 + 1 <= window
        assert text.endswith("\nCapital:")
        assert "Paris" in text
    assert cut_to_window(document, "\nCapital:", ["Rome"], TOKENIZER, 58) == "\nCapital:"  # no room for any of it
    short = document[-10:] + "\nCapital:"
    assert cut_to_window(document[-10:], "\nCapital:", ["Rome"], TOKENIZER, len(short.encode()) + 49) == short


def test_needles_longer_than_the_models_own_length_are_read_whole(tmp_path):
    """A prompt cut at the model's length of 512 would lose its needle; only a window that was asked for cuts it."""
    pack = str(tmp_path / "pack")
    made = needles.make("niah_single_1", TOKENIZER, 900, samples=2)
    rows = {
        "niah_single_1_900": made,
        "documents": [{"query": "q" * 700, "answers": ["a"], "max_length": 860}],
        "cloze": [{"context": "c" * 700, "prompt": "?", "answers": ["a"]}],
    }
    tables = {name: {"test": pa.Table.from_pylist(found)} for name, found in rows.items()}
    packs.add(pack, tables, dict.fromkeys(tables, "made here"), tokenizer=TOKENIZER)
    checkpoint = save(tmp_path / "run", model(max_seq_len=512))

    def cut(name, **fields):
        config = HarnessConfig(pack=pack, tasks=tuple(tables), **fields)
        rows = evaluate_checkpoint(checkpoint, [config], data=None, out=str(tmp_path / name)).rows
        return {row["task"]: row["value"] for row in rows if row["metric"] == "context_cut"}

    assert cut("own") == {"cloze": 1}
    assert cut("asked", max_length=512) == {"cloze": 1, "niah_single_1_900": 2, "documents": 1}


def test_needles_and_cloze_through_the_harness(tmp_path):
    pack = str(tmp_path / "pack")
    rows = needles.make("niah_single_1", TOKENIZER, 700, samples=3)
    cloze = [{"context": "c" * 3000 + " Paris " + "d" * 900, "prompt": "\nIts capital is", "answers": ["Paris"]}] * 2
    tables = {"niah_single_1_700": {"test": pa.Table.from_pylist(rows)}, "cloze": {"test": pa.Table.from_pylist(cloze)}}
    packs.add(pack, tables, dict.fromkeys(tables, "made here"), tokenizer=TOKENIZER)
    assert {record["format"] for record in packs.read_manifest(pack)["tasks"].values()} == {"needles", "cloze"}
    config = HarnessConfig(pack=pack, tasks=tuple(tables), max_length=2048)
    found = evaluate_checkpoint(save(tmp_path / "run", model()), [config], data=None, out=str(tmp_path / "out")).rows
    # No "context_cut" rows: everything was made to fit.
    assert [(row["task"], row["metric"], row["n"]) for row in found] == [
        ("niah_single_1_700", "contains", 3),
        ("cloze", "contains", 2),
    ]
