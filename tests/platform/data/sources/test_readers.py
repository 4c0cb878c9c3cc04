"""Every format gives its documents, however it is sliced, and every kind of bad row is named."""

import errno
import gzip
import io
import json
import random
import re

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
import zstandard

from lt2.config import ConfigError
from lt2_platform.data.sources import columns, readers
from lt2_platform.data.sources.configs import PlainSource
from lt2_platform.data.sources.documents import Fault
from lt2_platform.data.sources.listing import PIECE_BYTES, Slice
from lt2_platform.data.sources.readers import bad_beginnings, lines, peek_columns, pieces, read_rows, rows_before
from tests.platform.data.corpora import expected_pieces, find_files

WHOLE = Slice(0, 0, None)
TEXT = PlainSource(path="")


def rows_of(path, part=WHOLE):
    (file,) = find_files(str(path))
    return list(read_rows(file, part, TEXT))


def test_every_format_gives_its_documents(corpus):
    folder, texts = corpus
    for name, documents in texts:
        assert [row.text for row in rows_of(folder / name)] == documents
        assert [row.row for row in rows_of(folder / name)] == list(range(len(documents)))


@pytest.mark.parametrize("step", [1, 7, 64, 1000])
def test_lines_belong_to_the_slice_they_begin_in(step):
    rng = random.Random(1)
    content = b"\n".join(b"x" * rng.randint(0, 30) for _ in range(100))
    whole = content.splitlines(keepends=True)
    cuts = range(0, len(content), step)
    assert [line for cut in cuts for line in lines(io.BytesIO(content), cut, cut + step)] == whole


def test_a_line_that_begins_at_the_cut_is_in_the_later_slice():
    content = b"aa\nbb\ncc\n"
    assert [list(lines(io.BytesIO(content), cut, cut + 3)) for cut in (0, 3, 6)] == [[b"aa\n"], [b"bb\n"], [b"cc\n"]]


@pytest.mark.parametrize("marks", [[b"\n\n", b"\n"], [b"\r\n\r\n"], [b"\n"], [b" "], [b"\n"] + [b" "] * 40_000])
def test_pieces_do_not_depend_on_the_slicing(marks):
    rng = random.Random(2)
    content = b"".join(b"w" * rng.randint(1, 9) + rng.choice(marks) for _ in range(150_000))[: 5 * PIECE_BYTES + 17]
    expected = expected_pieces(content)
    assert [text.decode() for _, text in pieces(io.BytesIO(content), 0, None)] == expected
    for step in (1, 2, 4):
        cuts = range(0, len(content), step * PIECE_BYTES)
        found = [text for cut in cuts for _, text in pieces(io.BytesIO(content), cut, cut + step * PIECE_BYTES)]
        assert [text.decode() for text in found] == expected


def test_text_files(tmp_path):
    (tmp_path / "bom.txt").write_bytes(b"\xef\xbb\xbfhello")
    (tmp_path / "short.txt.gz").write_bytes(gzip.compress(b"one\n\ntwo\n"))
    (tmp_path / "empty.txt").write_bytes(b"")
    (tmp_path / "latin.txt").write_bytes("café".encode("latin-1"))
    assert [row.text for row in rows_of(tmp_path / "bom.txt")] == ["hello"]
    assert [row.text for row in rows_of(tmp_path / "short.txt.gz")] == ["one\n\ntwo\n"]
    assert [row.text for row in rows_of(tmp_path / "empty.txt")] == [Fault("empty text", "")]
    assert [row.text for row in rows_of(tmp_path / "latin.txt")] == [Fault("invalid utf-8", "caf\ufffd")]


JSON_ROWS = [
    (b'{"text": "good \\ud83d\\ude00"}', "good 😀"),
    (b"", None),
    (b'{"text": "cut off', "invalid json"),
    (b"[" * 100_000, "invalid json"),
    (b'["text"]', "not a json object"),
    (b'{"body": "x"}', "missing column"),
    (b'{"text": null}', "null text"),
    (b'{"text": ""}', "empty text"),
    (b'{"text": " \\n\\t "}', "empty text"),
    (b'{"text": 3}', "not a string"),
    (b'{"text": ["a"]}', "not a string"),
    (b'{"text": "caf\xe9"}', "invalid utf-8"),
    (b'{"text": "lone \\ud83d surrogate"}', "lone surrogate"),
    ('{"text": "a\u2028b"}'.encode(), "a\u2028b"),
    (b'{"text": "last, without newline"}', "last, without newline"),
]


@pytest.mark.parametrize("suffix", [".jsonl", ".jsonl.zst"])
def test_json_faults(tmp_path, suffix):
    content = b"\xef\xbb\xbf" + b"\n".join(line for line, _ in JSON_ROWS)
    path = tmp_path / f"x{suffix}"
    path.write_bytes(zstandard.compress(content) if suffix.endswith("zst") else content)
    for index, (row, (line, expected)) in enumerate(zip(rows_of(path), JSON_ROWS, strict=True)):
        assert row.row == index
        found = row.text.reason if isinstance(row.text, Fault) else row.text
        assert found == expected, line
        if isinstance(row.text, Fault):
            assert row.text.sample == line.decode(errors="replace")[:200]


def test_parquet_faults(tmp_path):
    values = [b"good", None, b"", b"\xff\xfe", b"\xed\xa0\xbd", "déjà".encode()]
    reasons = ["good", "null text", "empty text", "invalid utf-8", "invalid utf-8", "déjà"]
    malformed = pa.array(values, pa.binary()).view(pa.string())
    for kind, column in {
        "string": malformed,
        "binary": pa.array(values, pa.binary()),
        "large": malformed.cast(pa.binary()).cast(pa.large_binary()),
    }.items():
        pq.write_table(pa.table({"text": column}), tmp_path / f"{kind}.parquet")
        found = [row.text for row in rows_of(tmp_path / f"{kind}.parquet")]
        assert [value.reason if isinstance(value, Fault) else value for value in found] == reasons, kind
    dictionary = pa.array(["a", "b", "a", None]).dictionary_encode()
    pq.write_table(pa.table({"text": dictionary}), tmp_path / "d.parquet")
    assert [row.text for row in rows_of(tmp_path / "d.parquet")] == ["a", "b", "a", Fault("null text", "")]


def test_parquet_reads_only_its_row_groups(corpus):
    folder, texts = corpus
    documents = dict(texts)["d.parquet"]
    rows = rows_of(folder / "d.parquet", Slice(0, 1, 3))
    assert [row.text for row in rows] == documents[9:27]


def test_rows_before(corpus):
    folder, texts = corpus
    (table,) = find_files(str(folder / "d.parquet"))
    assert [rows_before(table, Slice(0, group, group + 1)) for group in range(3)] == [0, 9, 18]
    (jsonl,) = find_files(str(folder / "a.jsonl"))
    (book,) = find_files(str(folder / "e.txt"))
    for file, cut in ((jsonl, 10_000), (book, 2 * PIECE_BYTES)):
        whole = list(read_rows(file, WHOLE, TEXT))
        after = list(read_rows(file, Slice(0, cut, None), TEXT))
        assert rows_before(file, Slice(0, cut, None)) == len(whole) - len(after) > 0


def test_a_truncated_file_is_an_error_not_a_shorter_corpus(tmp_path):
    content = b"".join(json.dumps({"text": random.Random(i).randbytes(40).hex()}).encode() + b"\n" for i in range(5000))
    for name, packed in (("x.jsonl.zst", zstandard.compress(content)), ("x.jsonl.gz", gzip.compress(content))):
        (tmp_path / name).write_bytes(packed[: len(packed) // 2])
        with pytest.raises(ConfigError, match=rf"^cannot read .*/{name} \(.*\); replace or remove that file$"):
            rows_of(tmp_path / name)


def test_a_document_beyond_the_limit_is_refused_without_being_held(tmp_path, monkeypatch):
    monkeypatch.setattr(readers, "MAX_DOCUMENT_BYTES", 300_000)
    content = b'{"text": "a"}\n{"text": "' + b"x" * 1_000_000 + b'"}\n{"text": "b"}\n'
    (tmp_path / "x.jsonl").write_bytes(content)
    found = [row.text for row in rows_of(tmp_path / "x.jsonl")]
    assert (found[0], found[1].reason, found[2]) == ("a", "longer than 256 MiB", "b")
    assert max(len(line) for line in lines(io.BytesIO(content), 0, None)) == 300_001
    cuts = [list(lines(io.BytesIO(content), cut, cut + 400_000)) for cut in range(0, len(content), 400_000)]
    assert [len(lines_of) for lines_of in cuts] == [2, 0, 1]
    (tmp_path / "y.txt").write_bytes(b"x" * 3_000_000)
    assert [row.text.reason for row in rows_of(tmp_path / "y.txt")] == ["longer than 256 MiB"]
    assert max(len(text) for _, text in pieces(io.BytesIO(b"x" * 3_000_000), 0, None)) < 600_000


def test_peek_columns(tmp_path):
    (tmp_path / "x.jsonl").write_bytes(b'not json\n[1]\n{"b": 1}\n{"a": 1, "b": 2}\n')
    (file,) = find_files(str(tmp_path / "x.jsonl"))
    assert peek_columns(file) == ["b", "a"]


def test_long_rows_are_not_all_read_for_their_columns(tmp_path):
    long = json.dumps({"a": "x" * 600_000}) + "\n"
    (tmp_path / "x.jsonl").write_text(2 * long + '{"late": 1}\n')
    (file,) = find_files(str(tmp_path / "x.jsonl"))
    assert peek_columns(file) == ["a"]


def test_the_beginning_of_every_file_is_looked_into(tmp_path):
    for number in range(200):
        (tmp_path / f"{number:03d}.jsonl").write_text(
            '{"text": "a"}\n' if number not in (70, 199) else '{"body": "a"}\n'
        )
    found = bad_beginnings(find_files(str(tmp_path)), [TEXT])
    assert [problem.split(" has no column 'text'")[0] for problem in found] == [
        f"{tmp_path}/{number:03d}.jsonl" for number in (70, 199)
    ]


AWAY = "AWS Error NETWORK_CONNECTION during GetObject operation: curlCode: 7, Couldn't connect to server"


@pytest.mark.parametrize("error", [OSError(AWAY), OSError(errno.EMFILE, "Too many open files")])
def test_a_store_that_fails_is_no_fault_of_the_file(corpus, monkeypatch, error):
    folder, _ = corpus

    def away(*_, **__):
        raise error

    for name in ("a.jsonl", "e.txt"):
        (file,) = find_files(str(folder / name))
        with monkeypatch.context() as broken:
            broken.setattr(readers, "_open", away)
            with pytest.raises(OSError, match=re.escape(str(error))) as raised:
                list(read_rows(file, WHOLE, TEXT))
        assert raised.value is error
    (table,) = find_files(str(folder / "d.parquet"))
    monkeypatch.setattr(columns.pq, "read_metadata", away)
    with pytest.raises(OSError, match=re.escape(str(error))):
        columns.parquet_metadata(table, TEXT)
