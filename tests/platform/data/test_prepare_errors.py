"""Bad input: one line that names the thing and the fix, and nothing left behind."""

import errno
import json
import os
import shutil

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from lt2.config import ConfigError
from lt2_platform.data import cut
from lt2_platform.data import prepare as module
from lt2_platform.data.folder import MARK
from lt2_platform.data.prepare import PrepareConfig, prepare
from lt2_platform.data.sources import listing as sources
from lt2_platform.data.stream import PackedDataset
from lt2_platform.data.tokenizers import tokenize
from lt2_platform.storage import Storage


@pytest.fixture
def folder(tmp_path):
    def write(name, content):
        (tmp_path / name).write_bytes(content if isinstance(content, bytes) else content.encode())

    write("good.txt", "some text " * 50)
    write("long.jsonl", '{"text": "ok"}\n\n' + json.dumps({"text": "x" * 1000}) + "\n")
    write("other.jsonl", '{"body": "x", "id": 1}\n' * 3)
    write("chats.jsonl", '{"messages": [{"role": "user", "content": "x"}], "id": 1}\n')
    write("bad.jsonl", '{"text": null}\n{broken\n{"text": ""}\n')
    write("blank.jsonl", "\n\n")
    write("nothing.jsonl", "")
    write("cut.jsonl.gz", b"\x1f\x8b\x08\x00\x00\x00\x00\x00\x00\x03KLJ")
    pq.write_table(pa.table({"id": [1], "content": ["x"]}), tmp_path / "other.parquet")
    return tmp_path


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        (
            {"tokenizer": "gpt-5"},
            "unknown tokenizer 'gpt-5'; use byte, or a path to a tokenizer.json or a *.tiktoken file",
        ),
        (
            {"source": "{}/nope.txt"},
            "source {}/nope.txt does not exist; give a file, a folder, a glob or python-stdlib",
        ),
        ({"source": "{}/*.nope"}, "source {}/*.nope matches no file; check the path"),
        (
            {"source": "{}/other.parquet"},
            "{}/other.parquet has no column 'text' (columns: id, content); set prepare.text_column",
        ),
        (
            {"source": "{}/other.jsonl"},
            "{}/other.jsonl has no column 'text' (columns: body, id); set prepare.text_column",
        ),
        (
            {"source": "{}/chats.jsonl"},
            "{}/chats.jsonl has no column 'text' (columns: messages, id); "
            "for conversations the source is {type: openthoughts, path: …, format: jsonl}",
        ),
        (
            {"source": "{}/long.jsonl", "shard_sequences": 16},
            "document {}/long.jsonl row 2 has 1,002 tokens, more than a shard holds (16 sequences of 32); "
            "set prepare.max_document_tokens to split such, or prepare.shard_sequences to 32 or more",
        ),
        (
            {"source": "{}/bad.jsonl"},
            "no usable row in {}/bad.jsonl (empty text: 1, invalid json: 1, null text: 1), the first being row 0 of "
            "{}/bad.jsonl; check prepare.format and prepare.text_column",
        ),
        (
            {"source": "{}/blank.jsonl"},
            "the corpus is empty: no document in {}/blank.jsonl; give a source with text",
        ),
        (
            {"source": ("{}/blank.jsonl", "{}/nothing.jsonl")},
            "the corpus is empty: no document in {}/blank.jsonl and 1 more; give a source with text",
        ),
        (
            {"source": "{}/good.txt", "seq_len": 600},
            "the corpus has 502 training tokens, fewer than one sequence of seq_len + 1 = 601; "
            "lower prepare.seq_len or add text",
        ),
    ],
)
def test_message_and_nothing_left(folder, no_ray, settings, message):
    settings = json.loads(json.dumps({"source": "{}/good.txt", "seq_len": 31, **settings}).replace("{}", str(folder)))
    before = sorted(os.listdir(folder))
    with pytest.raises(ConfigError) as error:
        prepare(PrepareConfig.model_validate(settings), str(folder / "out"))
    assert str(error.value) == message.replace("{}", str(folder))
    assert sorted(os.listdir(folder)) == before


def test_damaged_compressed_file(folder, no_ray):
    with pytest.raises(ConfigError, match=r"^cannot read .*/cut\.jsonl\.gz \(.+\); replace or remove that file$"):
        prepare(PrepareConfig(source=f"{folder}/cut.jsonl.gz"), str(folder / "out"))


def test_unwritable_out(folder, no_ray):
    out = f"{folder}/good.txt/out"
    with pytest.raises(ConfigError, match=rf"^storage root {out} cannot be written \(a part of the path is a file\);"):
        prepare(PrepareConfig(source=f"{folder}/good.txt", seq_len=7), out)


def test_other_dataset_is_not_overwritten(folder, no_ray):
    out = str(folder / "out")
    manifest = prepare(PrepareConfig(source=f"{folder}/good.txt", seq_len=7), out)
    with pytest.raises(ConfigError, match=r"/out holds a dataset of other input or settings; choose another folder or"):
        prepare(PrepareConfig(source=f"{folder}/good.txt", seq_len=15), out)
    (folder / "good.txt").write_text("changed text " * 50)
    with pytest.raises(ConfigError, match="holds a dataset of other input"):
        prepare(PrepareConfig(source=f"{folder}/good.txt", seq_len=7), out)
    assert json.loads((folder / "out" / "manifest.json").read_text()) == manifest


@pytest.mark.parametrize("moment", ["before the shards", "between the shards"])
def test_a_process_that_was_overtaken_breaks_nothing(folder, no_ray, monkeypatch, moment):
    config = PrepareConfig(source=f"{folder}/good.txt", seq_len=1023, shard_sequences=192, validation_fraction=0)
    (folder / "good.txt").write_text("some text\n\n" * 60_000)
    out, overtaken = str(folder / "out"), []

    def overtake():
        if not overtaken:
            overtaken.append(True)
            prepare(config, out)

    if moment == "before the shards":
        refuse = module.refuse_empty
        monkeypatch.setattr(module, "refuse_empty", lambda *args: (overtake(), refuse(*args)))
    else:
        write = cut.write_shard
        monkeypatch.setattr(cut, "write_shard", lambda shard, job: (overtake(), write(shard, job))[1])
    manifest = prepare(config, out)
    assert overtaken
    assert manifest["splits"]["train"]["sequences"] > 0
    PackedDataset(out).verify()
    assert not (folder / "out/.staging").exists()


def test_other_special_tokens_of_the_same_tokenizer_are_another_dataset(folder, no_ray):
    vocabulary = {"type": "WordLevel", "vocab": {"a": 0, "</s>": 1, "<end>": 2}, "unk_token": "a"}
    (folder / "tokenizer.json").write_text(json.dumps({"version": "1.0", "added_tokens": [], "model": vocabulary}))
    config = PrepareConfig(
        source=f"{folder}/long.jsonl", seq_len=1, tokenizer=f"{folder}/tokenizer.json", validation_fraction=0
    )
    eos = []
    for name, out in (("</s>", "one"), ("<end>", "two")):
        (folder / "tokenizer_config.json").write_text(json.dumps({"eos_token": name}))
        tokenize._loaded.cache_clear()
        eos.append(prepare(config, str(folder / out))["tokenizer"]["eos_id"])
    assert eos == [1, 2]
    with pytest.raises(ConfigError, match="holds a dataset of other input or settings"):
        prepare(config, str(folder / "one"))


def test_texts_that_do_not_begin_with_bos_are_other_data(folder, no_ray):
    vocabulary = {"type": "WordLevel", "vocab": {"a": 0, "</s>": 1, "<s>": 2}, "unk_token": "a"}
    (folder / "tokenizer.json").write_text(json.dumps({"version": "1.0", "added_tokens": [], "model": vocabulary}))
    config = PrepareConfig(
        source=f"{folder}/long.jsonl", seq_len=1, tokenizer=f"{folder}/tokenizer.json", validation_fraction=0
    )
    found = {}
    for out, more in (("usual", {}), ("theirs", {"tokenizer_class": "TokenizersBackend"}), ("none", None)):
        settings = folder / "tokenizer_config.json"
        settings.unlink() if more is None else settings.write_text(json.dumps({"eos_token": "</s>"} | more))
        tokenize._loaded.cache_clear()
        manifest = prepare(config, str(folder / out))
        found[out] = manifest["tokenizer"]["bos_id"], manifest["fingerprint"]
    assert [bos for bos, _ in found.values()] == [2, None, 2]
    assert found["usual"] == found["none"]
    assert found["usual"][1] != found["theirs"][1]


def test_a_failure_keeps_what_else_is_in_the_folder(folder, no_ray):
    (folder / "out").mkdir()
    (folder / "out" / "mine.txt").write_text("keep me")
    with pytest.raises(ConfigError, match="no usable row"):
        prepare(PrepareConfig(source=f"{folder}/bad.jsonl", seq_len=7), str(folder / "out"))
    assert os.listdir(folder / "out") == ["mine.txt"]


@pytest.mark.parametrize("name", ["train", "validation", "quarantine", "tokenizer", ".staging"])
def test_what_is_not_ours_is_refused_and_stays(folder, no_ray, name):
    (folder / "data" / name).mkdir(parents=True)
    (folder / "data" / name / "mine.txt").write_text("some text " * 50)
    config = PrepareConfig(source=f"{folder}/data/{name}", seq_len=7)
    with pytest.raises(ConfigError) as error:
        prepare(config, str(folder / "data"))
    assert str(error.value) == (
        f"{folder}/data has {name} already, which preparing would replace; choose another folder for the dataset, or "
        "move them away"
    )
    assert [path.name for path in (folder / "data").rglob("*")] == [name, "mine.txt"]
    assert prepare(config, str(folder / "elsewhere"))["splits"]["train"]["sequences"]


@pytest.mark.parametrize("content", ["{not json", "[]", '{"name": "my app"}'])
def test_another_manifest_is_no_datasets(folder, no_ray, content):
    (folder / "out").mkdir()
    (folder / "out/manifest.json").write_text(content)
    with pytest.raises(
        ConfigError, match=r"/out(/manifest\.json is not a dataset manifest| holds a dataset of other)[^\n]+$"
    ):
        prepare(PrepareConfig(source=f"{folder}/good.txt", seq_len=7), str(folder / "out"))
    assert [(path.name, path.read_text()) for path in (folder / "out").iterdir()] == [("manifest.json", content)]


@pytest.mark.parametrize("place", [".staging", "train", "manifest.json"])
def test_what_a_crash_left_is_known_as_ours(folder, no_ray, monkeypatch, place):
    """The first write to `place` fails in a way that nothing cleans up after."""
    config, out = PrepareConfig(source=f"{folder}/good.txt", seq_len=7), folder / "out"
    with monkeypatch.context() as patch:
        written = Storage._writing

        def crash(storage, full):
            if f"{out}/{place}" in full:
                raise OSError(errno.ENOSPC, "No space left on device")
            return written(storage, full)

        patch.setattr(Storage, "_writing", crash)
        with pytest.raises(OSError, match="No space left"):
            prepare(config, str(out))
    assert (out / MARK).exists()
    for stray in ("train/part-00099.parquet", "quarantine/part-00000.jsonl", "tokenizer/tokenizer.json"):
        (out / stray).parent.mkdir(exist_ok=True)
        (out / stray).touch()
    shutil.copytree(out, folder / "copy")
    with pytest.raises(ConfigError, match="no usable row"):
        prepare(PrepareConfig(source=f"{folder}/bad.jsonl", seq_len=7), str(folder / "copy"))
    assert not (folder / "copy").exists()
    (out / "tokenizer/tokenizer.json").unlink()
    (out / "tokenizer").rmdir()
    manifest = prepare(config, str(out))
    assert [path.name for path in (out / "train").iterdir()] == ["part-00000.parquet"]
    PackedDataset(str(out)).verify()
    assert sorted(path.name for path in out.iterdir()) == ["manifest.json", "train"]
    (out / MARK).touch()  # a crash after the manifest was written
    (out / ".staging").mkdir()
    assert prepare(config, str(out)) == manifest
    assert sorted(path.name for path in out.iterdir()) == ["manifest.json", "train"]
    monkeypatch.setattr(Storage, "delete", None)  # of a dataset that may only be read
    assert prepare(config, str(out)) == manifest


@pytest.mark.parametrize("tokenize", ["ahead", "on_the_fly"])
def test_all_bad_files_are_named_at_once_before_any_is_tokenised(folder, no_ray, tokenize):
    (folder / "fine.jsonl").write_text('{"text": "ok"}\n' * 50)
    (folder / "empty.parquet").touch()
    (folder / "notes.pdf").touch()
    pq.write_table(pa.table({"text": [1]}), folder / "numbers.parquet")
    names = ["fine.jsonl", "nope.txt", "other.jsonl", "empty.parquet", "notes.pdf", "*.nope", "cut.jsonl.gz"]
    names += ["other.parquet", "numbers.parquet"]
    config = PrepareConfig(source=tuple(f"{folder}/{name}" for name in names), tokenize=tokenize)
    with pytest.raises(ConfigError) as error:
        prepare(config, str(folder / "out"))
    first, *lines = str(error.value).replace(f"{folder}/", "").split("\n  ")
    assert first == "8 of the corpus's files and paths cannot be used:"
    assert [line.partition(";")[0] for line in lines[:4]] == [
        "source nope.txt does not exist",
        "cannot tell the format of notes.pdf",
        "source *.nope matches no file",
        "other.jsonl has no column 'text' (columns: body, id)",
    ]
    assert lines[4].startswith("cannot read cut.jsonl.gz (")
    assert lines[5].startswith("empty.parquet is not a readable parquet file (")
    assert lines[6] == "other.parquet has no column 'text' (columns: id, content); set prepare.text_column"
    assert lines[7] == "column 'text' of numbers.parquet is int64, not text; set prepare.text_column"
    assert not (folder / "out").exists()


def test_many_bad_files_are_counted(tmp_path, no_ray):
    for index in range(25):
        (tmp_path / f"{index:02}.parquet").touch()
    with pytest.raises(ConfigError) as error:
        prepare(PrepareConfig(source=str(tmp_path)), str(tmp_path / "out"))
    lines = str(error.value).splitlines()
    assert lines[0].startswith("25 of")
    assert len(lines) == 22
    assert lines[-1] == "  and 5 more"


def test_a_file_that_may_not_be_read(folder, no_ray, monkeypatch):
    def refused(path, *, sampled):
        raise PermissionError(13, "Permission denied")

    monkeypatch.setattr(sources, "version_of", refused)  # tests may run as root, who may read everything
    with pytest.raises(ConfigError, match=r"good\.txt cannot be read \(Permission denied\); make it readable or"):
        prepare(PrepareConfig(source=f"{folder}/good.txt"), str(folder / "out"))


def test_json_lines_that_are_read_as_parquet_are_told_how_to_say_so(tmp_path):
    (tmp_path / "chat.jsonl").write_text('{"messages": []}\n')
    config = PrepareConfig.model_validate({"source": {"type": "openthoughts", "path": str(tmp_path / "chat.jsonl")}})
    with pytest.raises(ConfigError, match="if it is JSON lines, set format: jsonl of the source"):
        prepare(config, str(tmp_path / "out"))
