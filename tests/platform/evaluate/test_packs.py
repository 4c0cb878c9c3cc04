"""Evaluation packs: built from files and `datasets` folders, checked when read, clear about what is missing."""

import json
import re
from contextlib import nullcontext

import datasets
import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from lt2.config import ConfigError
from lt2_platform.data.tokenizers.tokenize import ByteTokenizer
from lt2_platform.evaluate.harness import answers
from lt2_platform.evaluate.harness.tasks import packs
from lt2_platform.storage import Storage
from tests.platform.evaluate.items import arc, choices, copa, piqa, write


def test_build_read_and_add(tmp_path):
    pack = str(tmp_path / "pack")
    origin = packs.Origin(revision="abc", licence="CC-BY-4.0")
    packs.build(pack, write(tmp_path / "data", arc_easy=arc()), origin=origin)
    packs.build(pack, write(tmp_path / "data", copa=copa()), tokenizer=ByteTokenizer())
    manifest = packs.read_manifest(pack)
    easy, copa_record = manifest["tasks"]["arc_easy"], manifest["tasks"]["copa"]
    assert (easy["revision"], easy["licence"], easy["format"]) == ("abc", "CC-BY-4.0", "upstream")
    assert copa_record["tokenizer"]["sha256"] == ByteTokenizer.sha256
    assert packs.evaluated_split(easy) == "validation"
    table = packs.read_split(Storage(pack), "arc_easy", easy, "validation")
    assert table.to_pylist() == arc()
    assert packs.verify(pack) == []


def test_datasets_folders_are_found_and_keep_their_splits(tmp_path):
    for split, n in {"train": 3, "validation": 6}.items():
        datasets.Dataset.from_list(arc(n)).save_to_disk(str(tmp_path / "hub" / "ai2_arc" / "ARC-Easy" / split))
    rows = [{"question": "is it", "answer": True, "passage": "p"}, {"question": "so", "answer": False, "passage": "q"}]
    datasets.Dataset.from_list(rows).save_to_disk(str(tmp_path / "hub" / "boolq" / "none" / "validation"))
    found = packs.discover(str(tmp_path / "hub"))
    assert set(found) == {"arc_easy", "boolq"}
    pack = str(tmp_path / "pack")
    tasks = packs.build(pack, found)["tasks"]
    assert {split: record["rows"] for split, record in tasks["arc_easy"]["splits"].items()} == {
        "train": 3,
        "validation": 6,
    }
    boolq = packs.read_split(Storage(pack), "boolq", tasks["boolq"], "validation")
    assert boolq["label"].to_pylist() == [1, 0]  # what the SuperGLUE release calls the answer


def test_a_missing_task_is_named_with_the_command_that_adds_it(tmp_path):
    pack = str(tmp_path / "pack")
    packs.build(pack, write(tmp_path, arc_easy=arc()))
    with pytest.raises(
        ConfigError, match=rf"has no piqa, race; add them with `lt2 pack build {pack} piqa=PATH race=PATH`"
    ):
        packs.require(pack, ["piqa", "arc_easy", "race"])
    made = f"`lt2 pack ruler {pack} --tokenizer TOKENIZER --tasks niah_single_1,ruler_vt --lengths 1024,4096`, or"
    with pytest.raises(ConfigError, match=f"add them with {made}"):
        packs.require(pack, ["niah_single_1_1024", "ruler_vt_4096"])
    with pytest.raises(ConfigError, match="TOKENIZER --essays FOLDER --tasks niah_single_2 --lengths 1024`"):
        packs.require(pack, ["niah_single_2_1024"])
    with pytest.raises(ConfigError, match="add them with `lt2 pack build .* piqa=PATH` and `lt2 pack ruler "):
        packs.require(pack, ["piqa", "niah_single_1_1024"])
    with pytest.raises(ConfigError, match="not an evaluation pack"):
        packs.read_manifest(str(tmp_path / "elsewhere"))


@pytest.mark.parametrize("change", ["corrupt", "missing"])
def test_damage_is_found(tmp_path, change):
    pack = tmp_path / "pack"
    packs.build(str(pack), write(tmp_path, arc_easy=arc(), copa=copa()))
    file = pack / "copa" / "validation.parquet"
    if change == "missing":
        file.unlink()
    else:
        data = bytearray(file.read_bytes())
        data[20] ^= 1
        file.write_bytes(bytes(data))
    (problem,) = packs.verify(str(pack))
    assert change in problem
    assert "copa/validation.parquet" in problem
    assert "build copa again" in problem


@pytest.mark.parametrize(
    ("content", "message"),
    [
        ('{"question": 1}\n{broken\n', r":2 is not JSON"),
        ("", "no rows"),
        ("[1, 2]\n", r":1 is not a row; a row is an object"),
        ('{"question": ["a"]}\n{"question": "b"}\n', "cannot be read .*cannot mix list and non-list"),
    ],
    ids=["broken", "empty", "list", "mixed"],
)
def test_bad_sources(tmp_path, content, message):
    file = tmp_path / "arc_easy.jsonl"
    file.write_text(content)
    with pytest.raises(ConfigError, match=message):
        packs.build(str(tmp_path / "pack"), {"arc_easy": str(file)})
    assert not (tmp_path / "pack" / "manifest.json").exists()


@pytest.mark.parametrize("name", ["mine.parquet", "mine.jsonl"])
def test_a_file_of_other_bytes_is_named(tmp_path, name):
    (tmp_path / name).write_bytes(b"\xff\xfe no text")
    with pytest.raises(ConfigError, match=rf"mine: .*{name} cannot be read \(.*\); give a complete file"):
        packs.build(str(tmp_path / "pack"), {"mine": str(tmp_path / name)})


def test_parts_of_a_split_with_other_columns_are_named(tmp_path):
    for part, value in enumerate(("a", 1)):
        pq.write_table(pa.table({"query": [value]}), tmp_path / f"test-0000{part}-of-00002.parquet")
    with pytest.raises(ConfigError, match="mine: the parts of test differ in their columns .*test-00001-of-00002"):
        packs.build(str(tmp_path / "pack"), {"mine": str(tmp_path)})


def test_a_row_ends_at_its_line_feed_and_nowhere_else(tmp_path):
    row = choices(1)[0] | {"query": "one\u2028two\x85three"}
    (tmp_path / "rows.jsonl").write_bytes((json.dumps(row, ensure_ascii=False) + "\r\n").encode())
    pack = str(tmp_path / "pack")
    record = packs.build(pack, {"mine": str(tmp_path / "rows.jsonl")})["tasks"]["mine"]
    assert packs.read_split(Storage(pack), "mine", record, "test").to_pylist() == [row]


@pytest.mark.parametrize(
    ("name", "split"),
    [("extra", "test"), ("retrieval", "test"), ("arc_easy_val_1000", "validation"), ("arc-training", "train")],
)
def test_the_split_of_a_file_is_a_word_of_its_name(tmp_path, name, split):
    sources = write(tmp_path, arc_easy=arc())
    place = (tmp_path / "arc_easy-validation.jsonl").rename(tmp_path / f"{name}.jsonl")
    record = packs.build(str(tmp_path / "pack"), {task: str(place) for task in sources})["tasks"]["arc_easy"]
    assert list(record["splits"]) == [split]


@pytest.mark.parametrize("content", ['{"schema_version": 1, "ta', "[]", '{"schema_version": 1}'])
def test_a_damaged_manifest_is_named(tmp_path, content):
    (tmp_path / "manifest.json").write_text(content)
    for ask in (packs.verify, packs.read_manifest, lambda pack: packs.require(pack, ["copa"])):
        with pytest.raises(ConfigError, match="its manifest.json is damaged; remove the pack and build it again"):
            ask(str(tmp_path))


def test_ones_own_items_need_no_definition_but_their_columns(tmp_path):
    tasks = packs.build(str(tmp_path / "pack"), write(tmp_path, mine=choices()))["tasks"]
    assert tasks["mine"]["format"] == "choices"
    (tmp_path / "odd.jsonl").write_text(json.dumps({"text": "x"}))
    with pytest.raises(ConfigError, match="not a known task .* columns choices gold query, or "):
        packs.build(str(tmp_path / "pack"), {"mine": str(tmp_path / "odd.jsonl")})
    with pytest.raises(ConfigError, match="does not exist"):
        packs.build(str(tmp_path / "pack"), {"mine": str(tmp_path / "nowhere")})
    with pytest.raises(ConfigError, match="no data of a known task; it is expected in ai2_arc/ARC-Easy"):
        packs.discover(str(tmp_path / "pack"))
    (tmp_path / "hub" / "piqa").mkdir(parents=True)
    with pytest.raises(ConfigError, match=f"no data of a known task; {tmp_path}/hub has: give that"):
        packs.discover(str(tmp_path))


def test_a_newer_packs_version_is_refused(tmp_path):
    Storage(str(tmp_path)).write_json("manifest.json", {"schema_version": 2, "tasks": {}})
    with pytest.raises(ConfigError, match="schema version 2"):
        packs.read_manifest(str(tmp_path))


def cloze():
    return [{"context": "a b c", "prompt": "a b", "answers": ["c"]}]


def race(answer="A"):
    problem = {"question": "Who?", "answer": answer, "options": ["a", "b", "c", "d"]}
    return [{"article": "Once.", "problems": repr([problem])}]


BAD_ROWS = {
    "mine": (choices(), {"query": "C", "choices": ["c", ""], "gold": 0}, "a choice of ['c', ''] is empty"),
    "other": (choices(), {"query": "C", "choices": ["c", "d"], "gold": 2}, "the answer 2 is not among the 2 choices"),
    "third": (choices(), {"query": "C", "choices": ["c", "d"], "gold": -1}, "the answer -1 is not among the 2 choices"),
    "none": (choices(), {"query": "C", "choices": [], "gold": 0}, "no choices"),
    "null": (choices(), {"query": "C", "choices": None, "gold": None}, "no choices"),
    "arc_easy": (arc(), arc(1)[0] | {"answerKey": "E"}, "the answer 'E' is not among the 3 choices"),
    "cloze": (cloze(), cloze()[0] | {"answers": ["c", ""]}, "an answer of answers ['c', ''] is empty"),
    "letters": (cloze(), cloze()[0] | {"answers": []}, "answers [] is not a list of answers"),
    "swde": ([{"text": "t", "value": "v"}], {"text": "t", "value": " "}, "an answer of value ' ' is empty"),
    "piqa": (piqa(), piqa(1)[0] | {"label": 2}, "the answer 2 is not among the 2 choices"),
    "copa": (copa(), copa(1)[0] | {"choice2": ""}, "a choice of ['It was stone.', ''] is empty"),
    "race": (race(), race("")[0], "the answer '' is not among the 4 choices"),
}


@pytest.mark.parametrize("task", BAD_ROWS)
def test_an_answer_that_is_no_choice_is_found_when_the_pack_is_made_and_when_it_is_read(tmp_path, task, monkeypatch):
    rows, bad, reason = BAD_ROWS[task]
    sources = write(tmp_path / "data", fine=choices(), **{task: [*rows, bad]})
    pack, said = str(tmp_path / "pack"), f"row {len(rows)}: {reason} (rows count from 0); fix or leave them out"
    with pytest.raises(ConfigError) as error:
        packs.build(pack, sources)
    assert str(error.value) == f"{task}: {sources[task]}, validation {said}"
    assert not Storage(pack).exists()
    with monkeypatch.context() as before:  # a pack from before this was checked
        before.setattr(packs, "labelled", lambda task, format, tables, source: tables)
        record = packs.build(pack, sources)["tasks"][task]
    with pytest.raises(ConfigError) as error:
        packs.read_split(Storage(pack), task, record, "validation")
    assert str(error.value) == f"pack {pack}: {task}/validation.parquet {said}"
    assert packs.verify(pack) == [str(error.value)]


def test_many_bad_rows_are_counted():
    table = pa.Table.from_pylist([{"query": "q", "choices": ["a", "b"], "gold": 3}] * 9)
    with pytest.raises(ConfigError, match=r"^here row 0: the .*row 4: [^;]*; and 4 more \(rows count from 0\)"):
        answers.check_rows("mine", "choices", table, "here")


def test_rows_that_allow_answers_of_several_lengths_are_named():
    row = {"query": "q", "outputs": ["7"], "max_length": 9}
    for lengths, said in {
        (8, 8, 8): "",
        (8, 16, 8): "row 1: max_new_tokens 16, and row 0 has 8: a task has one (rows",
        (8, None): "row 1: max_new_tokens None is not a number above 0 (rows",
        (0, 0): "row 0: max_new_tokens 0 is not a number above 0; row 1",
    }.items():
        table = pa.Table.from_pylist([row | {"max_new_tokens": length} for length in lengths])
        with pytest.raises(ConfigError, match=re.escape(f"here {said}")) if said else nullcontext():
            answers.check_rows("mine", "needles", table, "here")


def test_splits_whose_answers_are_secret_are_left_out(tmp_path):
    folder = tmp_path / "piqa"
    secret = [row | {"label": -1} for row in piqa()]
    for split, rows in {"validation": piqa(), "test": secret}.items():
        datasets.Dataset.from_list(rows).save_to_disk(str(folder / split))
    record = packs.build(str(tmp_path / "pack"), {"piqa": str(folder)})["tasks"]["piqa"]
    assert (list(record["splits"]), record["left_out"]) == (["validation"], ["test"])
    with pytest.raises(ConfigError, match="piqa: .* has no answers in test; give a split that has"):
        packs.build(str(tmp_path / "pack"), {"piqa": str(folder / "test")})


def test_answers_of_every_task_are_read_as_its_definition_does():
    row = {
        "arc_easy": arc(1)[0],
        "hellaswag": {"endings": ["a", "b", "c"], "label": "2"},
        "mmlu": {"choices": ["a", "b", "c", "d"], "answer": 3},
        "winogrande": {"option1": "a", "option2": "b", "answer": "2"},
        "social_iqa": {"answerA": "a", "answerB": "b", "answerC": "c", "label": "3"},
        "openbookqa": {"choices": {"text": ["a", "b"], "label": ["A", "B"]}, "answerKey": " B"},
        "boolq": {"label": 1},
        "race": {"problems": "[{'options': ['w', 'x', 'y', 'z'], 'answer': 'D'}]"},
    }
    found = {task: answers.UPSTREAM[task](one) for task, one in row.items()}
    assert {task: item[2] for task, item in found.items()} == {
        "arc_easy": 0, "hellaswag": 2, "mmlu": 3, "winogrande": 1,
        "social_iqa": 2, "openbookqa": 1, "boolq": 1, "race": 3,
    }  # fmt: skip
