"""The shipped sources on files of their true schemas, with every fault those come with."""

import hashlib
import json
import subprocess
import sys

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from pydantic import ValidationError

from lt2.config import ConfigError
from lt2_platform.data.live.lanes import LivePlan, live_batches
from lt2_platform.data.prepare import PrepareConfig, prepare
from lt2_platform.data.sources.configs import SourceConfig
from lt2_platform.data.sources.documents import Fault, Piece, text_of
from lt2_platform.data.sources.listing import Slice, look_through, plan_units
from lt2_platform.data.sources.readers import LEFT_OUT, read_rows
from lt2_platform.data.tokenizers.tokenize import load_tokenizer
from tests.platform.data.schemas import (
    CONVERSATIONS,
    DCLM_ROWS,
    THOUGHT,
    write_dclm,
    write_fineweb_edu,
    write_openthoughts,
)


def read(source):
    """Every row of a source given as a dict: its document, Fault or LEFT_OUT."""
    part = SourceConfig.read(source)
    files, _ = look_through([part])
    slices = [one for unit in plan_units(files, [part]) for one in unit]
    return [row.text for one in slices for row in read_rows(files[one.file], one, part)]


def outcome(found):
    return found.reason if isinstance(found, Fault) else found


def text_in(out, split="train"):
    tokens = np.concatenate([np.stack(pq.read_table(path)["tokens"].to_numpy()) for path in (out / split).iterdir()])
    return bytes(token for token in tokens.reshape(-1) if token < 256).decode()


def test_paths_as_strings_mean_what_they_always_did(tmp_path, no_ray, monkeypatch):
    """Digests of datasets and steps made before sources had types."""
    monkeypatch.chdir(tmp_path)
    folder = tmp_path / "in"
    folder.mkdir()
    (folder / "a.txt").write_text("".join(f"chapter {i}\n\n" for i in range(40)))
    rows = [json.dumps({"text": f"row {i} " * 9}) for i in range(50)]
    (folder / "b.jsonl").write_text("\n".join([*rows, '{"text": null}', "", "{broken", ""]))
    cells = [f"cell {i} " * 7 for i in range(30)] + [None, ""]
    pq.write_table(pa.table({"text": cells, "id": range(32)}), folder / "c.parquet")
    out = tmp_path / "out"
    manifest = prepare(PrepareConfig(source="in", seq_len=63, validation_fraction=0.1, seed=3), str(out))
    digests = [hashlib.sha256(path.read_bytes()).hexdigest()[:16] for path in sorted(out.glob("*/part*.parquet"))]
    assert digests == ["af46ab7a2d381112", "ec5bb9844f0a6fff"]
    assert manifest["quarantine"]["reasons"] == {"empty text": 1, "invalid json": 1, "null text": 2}
    assert set(manifest["config"]) == {
        "source", "format", "text_column", "tokenizer", "seq_len", "validation_fraction", "seed", "shard_sequences",
        "max_documents",
    }  # fmt: skip
    assert set(manifest["sources"][0]) == {"type", "path", "bytes", "documents", "sha256"}


def test_fineweb_edu(tmp_path):
    texts = write_fineweb_edu(tmp_path)
    assert read({"type": "fineweb_edu", "path": str(tmp_path)}) == texts
    found = read({"type": "fineweb_edu", "path": str(tmp_path), "min_int_score": 4})
    assert found[1:3] + found[5:] == [texts[1], texts[2], texts[5]]
    assert found[0] is LEFT_OUT
    assert found[3].reason == "no int_score"
    assert found[4] is LEFT_OUT


def test_only_the_columns_of_a_source_are_read(tmp_path, monkeypatch):
    write_fineweb_edu(tmp_path)
    asked = []
    real = pq.ParquetFile.iter_batches

    def spying(self, *arguments, **options):
        asked.append(options["columns"])
        return real(self, *arguments, **options)

    monkeypatch.setattr(pq.ParquetFile, "iter_batches", spying)
    read({"type": "fineweb_edu", "path": str(tmp_path)})
    read({"type": "fineweb_edu", "path": str(tmp_path), "min_int_score": 3})
    assert {tuple(columns) for columns in asked} == {("text",), ("text", "int_score")}


def test_dclm_in_both_spellings(tmp_path):
    write_dclm(tmp_path)
    expected = [outcome for _, outcome in DCLM_ROWS]
    assert [outcome(found) for found in read({"type": "dclm", "path": str(tmp_path)})] == expected * 2


@pytest.mark.parametrize("column", ["conversations", "messages"])
def test_openthoughts_faults(tmp_path, column):
    write_openthoughts(tmp_path / "x.parquet", column)
    found = read({"type": "openthoughts", "path": str(tmp_path)})
    assert [getattr(one, "reason", None) for one in found] == [fault for _, fault in CONVERSATIONS]
    assert "Let me think about" in found[2].sample
    kept = read({"type": "openthoughts", "path": str(tmp_path), "unterminated_think": "keep"})
    assert text_of(kept[2]).endswith("<|im_start|>assistant\n<think>Let me think about<|im_end|>\n")


def test_malformed_text_inside_a_conversation_costs_one_row(tmp_path):
    values = pa.array([b"fine", b"\xff\xfe", b"fine", b"good"], pa.binary()).view(pa.string())
    turns = pa.StructArray.from_arrays([pa.array(["user", "assistant"] * 2), values], names=["from", "value"])
    lists = pa.ListArray.from_arrays(pa.array([0, 2, 4], pa.int32()), turns)
    pq.write_table(pa.table({"conversations": lists}), tmp_path / "x.parquet")
    first, second = read({"type": "openthoughts", "path": str(tmp_path)})
    assert first.reason == "invalid utf-8"
    assert "good" in text_of(second)


@pytest.mark.parametrize("fault", [("user", "lone \ud83d surrogate"), ("\ud83d", "hi")])
def test_a_surrogate_inside_a_conversation_costs_one_row(tmp_path, no_ray, fault):
    conversations = [[("user", "hi"), ("assistant", "well")], [fault, ("assistant", "well")]]
    rows = [{"messages": [dict(zip(("role", "content"), turn)) for turn in turns]} for turns in conversations]
    (tmp_path / "x.jsonl").write_text("\n".join(json.dumps(row) for row in rows))
    source = {"type": "openthoughts", "path": str(tmp_path / "x.jsonl"), "format": "jsonl"}
    manifest = prepare(PrepareConfig.model_validate({"source": source, "seq_len": 8}), str(tmp_path / "out"))
    assert manifest["quarantine"]["rows"] == 1
    (line,) = (tmp_path / "out/quarantine/part-00000.jsonl").read_text().splitlines()
    assert "\\ud83d" in json.loads(line)["sample"]


TEMPLATES = {
    "chatml": "<|im_start|>system\nThink first.<|im_end|>\n<|im_start|>user\n2+2?<|im_end|>\n"
    f"<|im_start|>assistant\n{THOUGHT}<|im_end|>\n",
    "llama3": "<|start_header_id|>system<|end_header_id|>\n\nThink first.<|eot_id|>"
    "<|start_header_id|>user<|end_header_id|>\n\n2+2?<|eot_id|>"
    f"<|start_header_id|>assistant<|end_header_id|>\n\n{THOUGHT}<|eot_id|>",
    "plain": f"System: Think first.\n\nUser: 2+2?\n\nAssistant: {THOUGHT}\n\n",
}


PARTS = [{"type": "text", "text": "Look "}, {"type": "text", "text": ""}, {"type": "text", "text": "here."}]
CALL = [{"type": "function", "function": {"name": "add", "arguments": "{}"}}]
CONTENTS = [
    (PARTS, {}, "Look here."),
    ("Look here.", {"tool_calls": [], "function_call": None}, "Look here."),
    ([], {}, "empty text"),
    (PARTS[1:2], {}, "empty text"),
    ([*PARTS, {"type": "image_url", "image_url": {"url": "u"}}], {}, "content that is not text"),
    ([{"type": "text", "text": None}], {}, "content that is not text"),
    (["Look here."], {}, "content that is not text"),
    ({"text": "Look here."}, {}, "not a string"),
    (None, {"tool_calls": CALL}, "tool use"),
    ("Look here.", {"tool_calls": CALL}, "tool use"),  # to learn the text alone would be to learn not to call
]
"""(content, what else the turn has, its text or its fault)"""


def said(row):
    return row.reason if isinstance(row, Fault) else text_of(row).split("Assistant: ")[1].removesuffix("\n\n")


def test_contents_of_turns(tmp_path):
    turns = [{"role": "assistant", "content": content, **more} for content, more, _ in CONTENTS]
    lines = [json.dumps({"messages": [{"role": "user", "content": "Where?"}, turn]}) for turn in turns]
    (tmp_path / "x.jsonl").write_text("\n".join(lines))
    found = read({"type": "openthoughts", "path": str(tmp_path), "format": "jsonl", "template": "plain"})
    assert [said(row) for row in found] == [expected for _, _, expected in CONTENTS]


def test_contents_in_parts_from_parquet(tmp_path):
    image = {"type": "image", "text": None}
    rows = [{"messages": [{"role": "assistant", "content": parts}]} for parts in (PARTS, [*PARTS, image])]
    pq.write_table(pa.Table.from_pylist(rows), tmp_path / "x.parquet")
    found = read({"type": "openthoughts", "path": str(tmp_path), "template": "plain"})
    assert [said(row) for row in found] == ["Look here.", "content that is not text"]


@pytest.mark.parametrize("template", TEMPLATES)
def test_templates(tmp_path, template):
    write_openthoughts(tmp_path / "x.parquet")
    source = {"type": "openthoughts", "path": str(tmp_path), "template": template}
    document = read(source)[0]
    assert text_of(document) == TEMPLATES[template]
    assert all(piece.learned for piece in document)
    answers = [piece.text for piece in read({**source, "loss": "assistant"})[0] if piece.learned]
    assert "".join(answers) == THOUGHT + {"chatml": "<|im_end|>\n", "llama3": "<|eot_id|>", "plain": "\n\n"}[template]


def test_markers_are_specials_where_the_tokenizer_has_them(tmp_path):
    from tokenizers import AddedToken, Tokenizer, models, pre_tokenizers

    from lt2_platform.data.units import encode_documents

    words = Tokenizer(models.WordLevel({"[UNK]": 0, "hi": 1, "user": 2}, unk_token="[UNK]"))
    words.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    words.add_special_tokens([AddedToken("<|im_end|>", special=True), AddedToken("</s>", special=True)])
    words.save(str(tmp_path / "tokenizer.json"))
    tokenizer = load_tokenizer(str(tmp_path / "tokenizer.json"))
    end = tokenizer.special_id("<|im_end|>")
    (ids,) = encode_documents(tokenizer, [(Piece("hi"), Piece("<|im_end|>", special=True), Piece("<|im_end|> hi"))])
    assert ids.tolist() == [1, end, 0, 1]  # said by a user it is ordinary text
    assert load_tokenizer("byte").special_id("<|im_end|>") is None


def test_faults_and_left_out_rows_are_counted(tmp_path, no_ray):
    (tmp_path / "in").mkdir()
    write_fineweb_edu(tmp_path / "in")
    source = {"type": "fineweb_edu", "path": f"{tmp_path}/in", "min_int_score": 4}
    manifest = prepare(PrepareConfig(source=source, seq_len=15, validation_fraction=0), str(tmp_path / "out"))
    assert manifest["quarantine"]["reasons"] == {"no int_score": 1}
    (file,) = manifest["sources"]
    assert {key: file[key] for key in ("source", "type", "rows", "documents", "left_out")} == {
        "source": "fineweb_edu", "type": "parquet", "rows": 6, "documents": 3, "left_out": 2,
    }  # fmt: skip
    (line,) = (tmp_path / "out" / "quarantine" / "part-00000.jsonl").read_text().splitlines()
    assert json.loads(line) == {
        "source": f"{tmp_path}/in/000_00000.parquet", "row": 3, "reason": "no int_score",
        "sample": "lesson 3 on fractions",
    }  # fmt: skip


@pytest.mark.parametrize(
    ("source", "message"),
    [
        ({"type": "fineweb_edu"}, "x.parquet has no column 'text' (columns: id); for another schema use type parquet"),
        (
            {"type": "openthoughts"},
            "x.parquet has no column 'conversations' or 'messages' (columns: id); openthoughts files have one of them",
        ),
        ({"type": "parquet"}, "x.parquet has no column 'text' (columns: id); set text_column of the source"),
        ({"type": "dclm"}, "source {} holds no jsonl file (found x.parquet); give another path or type"),
        ({"type": "jsonl", "path": "{}/no"}, "source {}/no does not exist; give a file, a folder, a glob or"),
    ],
)
def test_files_of_another_schema(tmp_path, source, message):
    pq.write_table(pa.table({"id": [1]}), tmp_path / "x.parquet")
    source = {"path": "{}", **source}
    source["path"] = source["path"].replace("{}", str(tmp_path))
    with pytest.raises(ConfigError) as error:
        prepare(PrepareConfig(source=source), str(tmp_path / "out"))
    assert message.replace("{}", str(tmp_path)) in str(error.value)


def test_a_source_without_a_usable_row(tmp_path, no_ray):
    (tmp_path / "x.jsonl").write_text('{"text": null}\n')
    with pytest.raises(ConfigError, match=r"no usable row in .*\(null text: 1\).*; check the source's type$"):
        prepare(PrepareConfig(source={"type": "dclm", "path": f"{tmp_path}/x.jsonl"}), str(tmp_path / "out"))


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"source": {"type": "fineweb", "path": "x"}}, "unknown source type 'fineweb'; did you mean 'fineweb_edu'?"),
        ({"source": ["a.txt", {"type": "jsonl", "path": "x"}]}, "a list is of paths alone; sources of several"),
        ({"source": {"type": "jsonl", "path": "x"}, "text_column": "body"}, "text_column is for a source that is a"),
        (
            {"max_documents": 3, "source": {"type": "mixture", "sources": [{"weight": 1, "source": "x"}] * 2}},
            "max_documents would leave all but the first sources of a mixture out",
        ),
    ],
)
def test_configs_that_cannot_mean_anything(settings, message):
    with pytest.raises(ValidationError, match=message.replace("?", r"\?")):
        PrepareConfig.model_validate(settings)


def test_configs_survive_json():
    shares = [
        {"weight": 2, "source": {"type": "dclm", "path": ["a", "s3://b/c"]}},
        {"weight": 1, "source": {"type": "openthoughts", "path": "d", "loss": "assistant"}},
        {"weight": 0.5, "source": "e.txt"},
    ]
    for source in (shares[0]["source"], {"type": "mixture", "sources": shares}, "x", ["x", "y"]):
        config = PrepareConfig(source=source)
        assert PrepareConfig.model_validate_json(config.model_dump_json()) == config


def test_source_configs_need_neither_torch_nor_ray():
    code = "import sys, lt2_platform.data.sources.configs; print({'torch', 'ray'} & set(sys.modules))"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "set()"


POEMS = """
from typing import ClassVar, Literal
from lt2_platform.data.sources.configs import FileSource

class PoemConfig(FileSource):
    module: ClassVar[str] = "poem"
    type: Literal["poems"] = "poems"
    format: Literal["jsonl"] = "jsonl"

    @property
    def columns(self):
        return (("title",), ("lines",))

def poem(config, row):
    return None if row["title"] == "draft" else "\\n".join([row["title"], *row["lines"]])
"""


def test_a_source_of_ones_own(tmp_path, no_ray):
    import pickle

    (tmp_path / "poems.py").write_text(POEMS)
    rows = [{"title": "One", "lines": ["a", "b"]}, {"title": "draft", "lines": []}, {"title": "Two", "lines": ["c"]}]
    (tmp_path / "x.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    source = {"type": "poems", "source": f"{tmp_path}/poems.py", "path": f"{tmp_path}/x.jsonl"}
    config = PrepareConfig(source=source, seq_len=3, validation_fraction=0)
    assert pickle.loads(pickle.dumps(config.source)) == config.source
    manifest = prepare(config, str(tmp_path / "out"))
    assert text_in(tmp_path / "out") == "One\na\nbTwo\nc"
    assert manifest["sources"][0]["left_out"] == 1


QUIZ = """
from typing import ClassVar, Literal
from lt2_platform.data.sources.configs import FileSource
from lt2_platform.data.sources.documents import Piece

class QuizConfig(FileSource):
    module: ClassVar[str] = "quiz"
    type: Literal["quiz"] = "quiz"
    format: Literal["jsonl"] = "jsonl"

    @property
    def columns(self):
        return (("q",), ("a",))

def quiz(config, row):
    return Piece(row["q"], learned=False), Piece(row["a"])
"""


def test_pieces_that_are_not_learned_need_a_mask(tmp_path, no_ray):
    (tmp_path / "quiz.py").write_text(QUIZ)
    (tmp_path / "x.jsonl").write_text('{"q": "1 + 1", "a": "2"}\n' * 9)
    source = {"type": "quiz", "source": f"{tmp_path}/quiz.py", "path": f"{tmp_path}/x.jsonl"}
    told = r"^source type 'quiz' gives pieces that are not learned, but its masks_loss is false; make it true$"
    config = PrepareConfig(source=source, seq_len=3, validation_fraction=0)
    with pytest.raises(ConfigError, match=told):
        prepare(config, str(tmp_path / "out"))
    files, _ = look_through(config.parts)
    plan = LivePlan(
        tuple(files), tuple(config.parts), (((Slice(0, 0, None),),),), (1.0,), {"file": None}, width=4, seed=0
    )
    with pytest.raises(ConfigError, match=told):
        next(live_batches(plan, position=0, global_batch_size=1, first=0, last=1, cursors={}))
