"""Documents that share words with evaluation items are found, told and left out, however they are read."""

from __future__ import annotations

import json
import re
import unicodedata

import pyarrow as pa
import pytest
from pydantic import ValidationError

from lt2.config import ConfigError
from lt2_platform.data import overlap
from lt2_platform.data.live.live import LiveDataset
from lt2_platform.data.live.on_the_fly import live_plan
from lt2_platform.data.overlap import Decontaminate, with_pack
from lt2_platform.data.prepare import PrepareConfig, prepare
from lt2_platform.data.sources import listing
from lt2_platform.evaluate.harness.tasks import packs
from lt2_platform.storage import Storage

ITEM = "When a loop is applied twice, its second pass reads what the first one wrote, and nothing else."
WORDS = re.findall(r"\w+", ITEM.lower())
OTHER = "Seven green bottles hang on the wall, and one of them falls down at noon every day of the week."


def found_by(n: int, *items: str) -> overlap.Overlap:
    return overlap.overlap({"loops": [[item] for item in items]}, n)


def test_a_run_of_n_words_is_found_whatever_its_case_and_punctuation():
    found = found_by(13, ITEM).find("Before. " + " -- ".join(WORDS[4:17]).upper() + "? After")
    assert found == ("loops", " ".join(WORDS[4:17]))
    assert found_by(13, ITEM).find("before " + " ".join(WORDS[4:16]) + " after") is None
    assert found_by(12, ITEM).find("before " + " ".join(WORDS[4:16]) + " after") is not None
    assert found_by(12, ITEM).find(" ".join(f"_{word}_" for word in WORDS[4:16])) is not None
    accents = "Le café où naïfs et ﬁers dînaient"
    assert found_by(7, accents).find(unicodedata.normalize("NFD", accents).replace("ﬁ", "fi")) is not None
    assert found_by(5, ITEM).find(" ".join(reversed(WORDS))) is None
    assert found_by(18, ITEM).find(ITEM) is not None  # all there is of both
    assert found_by(19, ITEM).find(ITEM * 2) is None


@pytest.mark.parametrize("at_once", [7, 8, 9, 1000])
def test_a_long_document_is_read_in_stretches_that_miss_nothing(monkeypatch, at_once):
    monkeypatch.setattr(overlap, "WORDS_AT_ONCE", at_once)
    for first in range(12):
        text = " ".join([*"abcdefghijkl"[:first], *WORDS[:6], "x", "y"])
        assert found_by(6, ITEM).find(text) == ("loops", " ".join(WORDS[:6])), (at_once, first)
        assert found_by(7, ITEM).find(text) is None


def test_every_item_counts_and_is_told_by_the_first_task_that_has_it():
    both = overlap.overlap({"a": [[OTHER], ["too short"]], "b": [["no", ITEM], [OTHER]]}, 13)
    assert both.tasks == {"a": {"items": 2, "long_enough": 1}, "b": {"items": 2, "long_enough": 2}}
    assert [both.find(text)[0] for text in (ITEM, OTHER)] == ["b", "a"]
    assert both.find("another " * 50) is None
    assert overlap.overlap({}, 13).find(ITEM) is None


def test_what_is_written_is_what_is_read(tmp_path):
    made = overlap.overlap({"a": [[OTHER]], "b": [[ITEM]]}, 13)
    made.write(Storage(str(tmp_path)))
    read = overlap.read(f"{tmp_path}/{made.file}")
    assert [read.find(text) for text in (ITEM, OTHER, "x")] == [made.find(text) for text in (ITEM, OTHER, "x")]
    assert read.sha256 == made.sha256
    assert made.sha256 != found_by(12, ITEM, OTHER).sha256


@pytest.fixture
def pack(tmp_path) -> str:
    """Two tasks, one of them with a training split, and needles, which are no text of anybody's."""
    choices = {"test": pa.Table.from_pylist([{"query": f"Why? {ITEM}", "choices": ["a", "b"], "gold": 0}])}
    cloze = {
        "test": pa.Table.from_pylist([{"context": OTHER, "prompt": "At", "answers": [f"no {ITEM[::-1]}"]}]),
        "train": pa.Table.from_pylist([{"context": "only here " * 20, "prompt": "At", "answers": ["noon"]}]),
    }
    needles = {"test": pa.Table.from_pylist([{"query": "hay " * 20, "outputs": ["1"], "max_length": 99}])}
    tasks = {"mine": choices, "read": cloze, "needles": needles}
    packs.add(f"{tmp_path}/pack", tasks, dict.fromkeys(tasks, "here"))
    return f"{tmp_path}/pack"


def test_of_a_pack_all_texts_of_the_evaluated_items_count(pack):
    every = with_pack(Decontaminate(pack=pack))
    assert every.tasks == {"mine": {"items": 1, "long_enough": 1}, "read": {"items": 1, "long_enough": 1}}
    assert every.find(ITEM[::-1]) is not None  # in a list
    assert [every.find(text) is None for text in (ITEM, OTHER, "only here " * 20, "hay " * 20)] == [False] * 2 + [
        True
    ] * 2
    some = with_pack(Decontaminate(pack=pack, tasks=("read", "needles")))
    assert [some.find(text) is None for text in (ITEM, OTHER, "hay " * 20)] == [True, False, False]


def test_what_cannot_be_looked_for_is_told(pack, tmp_path):
    with pytest.raises(ConfigError, match=r"no item of .*pack has 90 words in a row, .* set a smaller decontaminate.n"):
        with_pack(Decontaminate(pack=pack, n=90))
    with pytest.raises(ConfigError, match="has no hellaswag; add them with"):
        with_pack(Decontaminate(pack=pack, tasks=("hellaswag",)))
    with pytest.raises(ConfigError, match="nowhere is not an evaluation pack"):
        with_pack(Decontaminate(pack=f"{tmp_path}/nowhere"))
    with pytest.raises(ValidationError, match="greater than or equal to 5"):
        Decontaminate(pack=pack, n=4)


def write(folder, name, texts) -> str:
    folder.mkdir(exist_ok=True)
    (folder / name).write_text("".join(json.dumps({"text": text}) + "\n" for text in texts))
    return f"{folder}/{name}"


def test_a_dataset_is_that_of_the_documents_that_overlap_nothing(pack, tmp_path, no_ray, monkeypatch):
    clean = [f"document {i} " * 20 for i in range(40)]
    mixed = [*clean[:20], f"A page that quotes: {ITEM} And goes on.", *clean[20:], OTHER]
    common = {"seq_len": 63, "validation_fraction": 0.2}
    guarded = common | {"decontaminate": {"pack": pack}}
    source = write(tmp_path / "a", "a.jsonl", mixed)
    made = prepare(PrepareConfig(source=source, **guarded), f"{tmp_path}/guarded")
    plain = prepare(PrepareConfig(source=write(tmp_path / "b", "b.jsonl", clean), **common), f"{tmp_path}/plain")
    assert made["splits"] == plain["splits"]  # sha256 of every shard among it
    assert made["quarantine"]["reasons"] == {"overlaps mine": 1, "overlaps read": 1}
    (file,) = (tmp_path / "guarded/quarantine").iterdir()
    first = json.loads(file.read_text().splitlines()[0])
    assert (first["row"], first["sample"]) == (20, " ".join(WORDS[:13]))
    told = made["decontaminated"]
    assert told["tasks"] == {name: {"items": 1, "long_enough": 1} for name in ("mine", "read")}
    assert (tmp_path / "guarded" / told["file"]).is_file()
    assert "decontaminated" not in plain
    monkeypatch.setattr(listing, "UNIT_BYTES", 5000)
    monkeypatch.setattr(listing, "PIECE_BYTES", 5000)
    few = prepare(PrepareConfig(source=source, max_documents=30, **guarded), f"{tmp_path}/few")
    assert sum(split["documents"] for split in few["splits"].values()) == 30


def test_a_corpus_of_which_nothing_is_left_leaves_no_folder(pack, tmp_path, no_ray):
    source = write(tmp_path / "a", "a.jsonl", [ITEM, OTHER])
    with pytest.raises(ConfigError, match=r"no usable row in .*\(overlaps mine: 1, overlaps read: 1\)"):
        prepare(PrepareConfig(source=source, decontaminate=Decontaminate(pack=pack)), f"{tmp_path}/out")
    assert not (tmp_path / "out").exists()


def test_another_pack_makes_another_dataset_and_the_same_one_does_not(pack, tmp_path, no_ray):
    source = write(tmp_path / "a", "a.jsonl", [f"document {i} " * 20 for i in range(9)])
    config = PrepareConfig(source=source, seq_len=63, decontaminate=Decontaminate(pack=pack))
    made = prepare(config, f"{tmp_path}/out")
    assert prepare(config, f"{tmp_path}/out") == made
    packs.add(
        pack, {"mine": {"test": pa.Table.from_pylist([{"query": OTHER, "choices": ["a"], "gold": 0}])}}, {"mine": "x"}
    )
    with pytest.raises(ConfigError, match="holds a dataset of other input or settings"):
        prepare(config, f"{tmp_path}/out")


def test_a_corpus_that_is_tokenised_while_training_leaves_out_the_same(pack, tmp_path, no_ray, monkeypatch):
    monkeypatch.setattr(listing, "UNIT_BYTES", 1000)
    monkeypatch.setattr(listing, "PIECE_BYTES", 1000)
    texts = [f"document {i} " * 9 if i % 10 else f"{i} {ITEM}" for i in range(200)]
    source = write(tmp_path / "a", "a.jsonl", texts)
    config = PrepareConfig(
        source=source,
        seq_len=63,
        validation_fraction=0.1,
        tokenize="on_the_fly",
        decontaminate=Decontaminate(pack=pack),
    )
    prepare(config, f"{tmp_path}/out")
    dataset = LiveDataset(f"{tmp_path}/out")
    plan = live_plan(dataset.uri, dataset.manifest, PrepareConfig.model_validate(dataset.manifest["config"]), seed=3)
    held_out = dataset.manifest["quarantine"]["reasons"]["overlaps mine"]
    lane = list_documents(plan)
    assert all(re.fullmatch(r"(document \d+ ){9}", text) for text in lane)
    assert 0 < held_out < 20
    assert len(lane) == 180 - dataset.manifest["splits"]["validation"]["documents"]


def list_documents(plan) -> list[str]:
    """Every document of one epoch of the only source."""
    from lt2_platform.data.live.lanes import Lane

    lane = Lane(plan, 0, 0, 1, None)
    return [text for index, slices in enumerate(plan.units[0]) for _, text in lane._usable(index, slices)]
