"""Evaluation packs: built from files and `datasets` folders, checked when read, clear about what is missing."""

import json

import datasets
import pytest

from lt2.config import ConfigError
from lt2_platform.data.tokenize import ByteTokenizer
from lt2_platform.evaluate.harness import packs
from lt2_platform.storage import Storage
from tests.platform.evaluate.items import arc, choices, copa, write


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
        ConfigError, match=rf"has no piqa, race; build with `lt2 pack build {pack} piqa=PATH race=PATH`"
    ):
        packs.require(pack, ["piqa", "arc_easy", "race"])
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
    ],
    ids=["broken", "empty"],
)
def test_bad_sources(tmp_path, content, message):
    file = tmp_path / "arc_easy.jsonl"
    file.write_text(content)
    with pytest.raises(ConfigError, match=message):
        packs.build(str(tmp_path / "pack"), {"arc_easy": str(file)})
    assert not (tmp_path / "pack" / "manifest.json").exists()


def test_ones_own_items_need_no_definition_but_their_columns(tmp_path):
    tasks = packs.build(str(tmp_path / "pack"), write(tmp_path, mine=choices()))["tasks"]
    assert tasks["mine"]["format"] == "choices"
    (tmp_path / "odd.jsonl").write_text(json.dumps({"text": "x"}))
    with pytest.raises(ConfigError, match="not a known task .* columns choices gold query, or "):
        packs.build(str(tmp_path / "pack"), {"mine": str(tmp_path / "odd.jsonl")})
    with pytest.raises(ConfigError, match="does not exist"):
        packs.build(str(tmp_path / "pack"), {"mine": str(tmp_path / "nowhere")})
    with pytest.raises(ConfigError, match="no data of a known task"):
        packs.discover(str(tmp_path / "pack"))


def test_a_newer_packs_version_is_refused(tmp_path):
    Storage(str(tmp_path)).write_json("manifest.json", {"schema_version": 2, "tasks": {}})
    with pytest.raises(ConfigError, match="schema version 2"):
        packs.read_manifest(str(tmp_path))
