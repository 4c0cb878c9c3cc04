"""What a source names, in which order, and how it is divided."""

import errno
import gzip
import hashlib
import os

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from lt2.config import ConfigError
from lt2_platform.data.sources import listing as sources
from lt2_platform.data.sources.configs import PlainSource
from lt2_platform.data.sources.listing import PIECE_BYTES, Slice, plan_units
from lt2_platform.data.sources.paths import look_for
from lt2_platform.storage import Storage
from tests.platform.data.corpora import find_files

TEXT = [PlainSource(path="")]


def names(found):
    return [file.path.rsplit("/", 1)[-1] for file in found]


def test_folder_glob_and_file_give_the_same_files(corpus):
    folder, texts = corpus
    every = [name for name, _ in texts]
    assert names(find_files(str(folder))) == every
    assert names(find_files(f"{folder}/*")) == every
    assert names(find_files([f"{folder}/{name}" for name in every])) == every
    assert names(find_files(f"{folder}/*.jsonl*")) == ["a.jsonl", "b.jsonl.zst", "c.jsonl.zstd"]


def test_formats_and_versions(corpus):
    folder, _ = corpus
    found = find_files(str(folder))
    assert [(file.format, file.compression) for file in found] == [
        ("jsonl", None),
        ("jsonl", "zstd"),
        ("jsonl", "zstd"),
        ("parquet", None),
        ("text", None),
    ]
    content = (folder / "a.jsonl").read_bytes()
    assert (found[0].bytes, found[0].version) == (len(content), hashlib.sha256(content).hexdigest())


def test_a_file_mentioned_twice_counts_once_and_keeps_its_place(corpus):
    folder, _ = corpus
    assert names(find_files([f"{folder}/e.txt", str(folder), f"{folder}/*.txt"])) == [
        "e.txt",
        "a.jsonl",
        "b.jsonl.zst",
        "c.jsonl.zstd",
        "d.parquet",
    ]


def test_hidden_and_foreign_files_are_left_out_of_folders(tmp_path):
    for name in ("_SUCCESS", ".part.txt.crc", "notes.pdf", "deep/.git/x.txt", "deep/b.txt", "a.txt.gz"):
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).write_bytes(gzip.compress(b"x"))
    assert names(find_files(str(tmp_path))) == ["a.txt.gz", "b.txt"]
    assert names(find_files(f"{tmp_path}/*.pdf", "text")) == ["notes.pdf"]


@pytest.mark.parametrize("place", ["local", "s3"])
def test_wildcards_leave_out_what_folders_do(request, tmp_path, place):
    root = Storage(str(tmp_path) if place == "local" else request.getfixturevalue("s3_root"))
    for name in ("d/a.txt", "d/.b.txt", "d/_temporary/0/c.txt", "d/.ipynb_checkpoints/d.txt", "d/e/f.txt"):
        root.write_bytes(name, b"x")
    for pattern in ("d", "d/*", "d/**/*.txt", "*"):
        assert names(find_files(f"{root.root}/{pattern}")) == ["a.txt", "f.txt"]
    assert names(find_files(f"{root.root}/d/_*/0/*.txt")) == ["c.txt"]  # asked for by its name


@pytest.mark.parametrize("place", ["local", "s3"])
def test_a_folder_with_brackets_in_its_name(request, tmp_path, place):
    root = Storage(str(tmp_path) if place == "local" else request.getfixturevalue("s3_root"))
    root.write_bytes("data[1] 50%/a.txt", b"x")
    assert names(find_files(f"{root.root}/data[1] 50%")) == ["a.txt"]
    look_for(f"{root.root}/data[1] 50%")


def test_linked_folders_are_read_and_those_that_lead_back_up_are_not(tmp_path):
    for name in ("in/a.txt", "elsewhere/deep/b.txt"):
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).write_text("x")
    (tmp_path / "in/link").symlink_to(tmp_path / "elsewhere")
    (tmp_path / "elsewhere/up").symlink_to(tmp_path / "in")
    assert names(find_files(str(tmp_path / "in"))) == ["a.txt", "b.txt"]


def test_a_folder_that_cannot_be_read_is_named(tmp_path, monkeypatch):
    (tmp_path / "closed").mkdir()
    (tmp_path / "a.txt").write_text("x")
    scan = os.scandir

    def refuse(folder):
        if folder == str(tmp_path / "closed"):
            raise PermissionError(errno.EACCES, "Permission denied")
        return scan(folder)

    monkeypatch.setattr(os, "scandir", refuse)
    with pytest.raises(ConfigError, match=r"^.*/closed cannot be read \(Permission denied\); make it readable or rem"):
        find_files(str(tmp_path))


def make_pipe(path):
    os.mkfifo(path)


def make_loop(path):
    path.symlink_to(path.name)


def make_latin1(path):
    (path.parent / os.fsdecode(b"caf\xe9.txt")).write_text("x")


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (make_pipe, r"/p\.txt is not a regular file \(a pipe, a socket or a device\); remove it$"),
        (make_loop, r"/p\.txt cannot be read \(Too many levels of symbolic links\); make it readable or remove it$"),
        (make_latin1, r"/caf\\udce9\.txt has a name that is not UTF-8; rename it$"),
    ],
)
def test_what_cannot_be_read_is_named_and_not_waited_for(tmp_path, make, message):
    (tmp_path / "a.txt").write_text("x")
    make(tmp_path / "p.txt")
    with pytest.raises(ConfigError, match=message):
        find_files(str(tmp_path))


@pytest.mark.parametrize("extension", ["gz", "zst"])
def test_a_compressed_file_cut_to_nothing_is_no_empty_file(tmp_path, extension):
    (tmp_path / f"a.jsonl.{extension}").write_bytes(b"")
    (tmp_path / "b.jsonl").write_bytes(b"")
    with pytest.raises(ConfigError, match=rf"^.*a\.jsonl\.{extension} is cut to 0 bytes; replace or remove it$"):
        find_files(str(tmp_path))


def test_s3_files_carry_their_etag(s3_root):
    Storage(s3_root).write_bytes("in/x.jsonl", b'{"text": "hello"}\n')
    for source in (f"{s3_root}/in", f"{s3_root}/in/*.jsonl", f"{s3_root}/in/x.jsonl"):
        (file,) = find_files(source)
        assert (file.path, file.bytes) == (f"{s3_root}/in/x.jsonl", 18)
        assert file.version == hashlib.md5(b'{"text": "hello"}\n').hexdigest()
        assert sources.describe(file, 1)["etag"] == file.version


def test_s3_keys_that_stand_for_folders_are_no_files(s3_root):
    for key in ("in/", "in/sub/", "in/sub/a.txt", "in//b.txt"):
        Storage(s3_root).fs.pipe_file(f"{s3_root}/{key}", b"" if key.endswith("/") else b"x")
    found = find_files(f"{s3_root}/in", "text")
    assert [file.path for file in found] == [f"{s3_root}/in//b.txt", f"{s3_root}/in/sub/a.txt"]


def test_standard_library():
    found = find_files("python-stdlib")
    assert len(found) > 300
    assert [file.name for file in found] == sorted(file.name for file in found)
    assert any(file.name.endswith("/asyncio/events.py") for file in found)
    assert not any("/test/" in file.name or "site-packages" in file.name for file in found)
    assert all(file.name.startswith("python-stdlib-3.") for file in found)


@pytest.mark.parametrize(
    ("source", "message"),
    [
        ("{}/nope", r"^source .*/nope does not exist; give a file, a folder, a glob or python-stdlib$"),
        ("{}/*.nope", r"^source .*/\*\.nope matches no file; check the path$"),
        ("{}/empty", r"^source .*/empty matches no file; check the path$"),
        ("{}/odd/x.csv", r"^cannot tell the format of .*/x\.csv; set prepare\.format to text, jsonl or parquet$"),
        ("{}/odd", r"^source .*/odd holds no text, jsonl or parquet file \(found x\.csv\); set prepare\.format"),
        ("", r"^an empty path is given as source; give a file, a folder"),
        ("gs://bucket/x", r"^gs://bucket/x: unsupported storage scheme"),
    ],
)
def test_wrong_sources(tmp_path, source, message):
    (tmp_path / "empty").mkdir()
    (tmp_path / "odd").mkdir()
    (tmp_path / "odd" / "x.csv").write_text("a,b\n")
    with pytest.raises(ConfigError, match=message):
        find_files(source.format(tmp_path))


def test_no_source():
    with pytest.raises(ConfigError, match=r"no source given; set prepare\.source"):
        find_files([])


def test_missing_bucket(s3_root):
    with pytest.raises(ConfigError, match="source s3://no-such-bucket/x does not exist"):
        find_files("s3://no-such-bucket/x")


def test_units_cover_every_file_once_in_order(corpus, monkeypatch):
    folder, _ = corpus
    found = find_files(str(folder))
    assert len(plan_units(found, TEXT)) == 1
    monkeypatch.setattr(sources, "UNIT_BYTES", PIECE_BYTES)
    units = plan_units(found, TEXT)
    assert len(units) > 2
    parts = [part for unit in units for part in unit]
    assert [part.file for part in parts] == sorted(part.file for part in parts)
    groups = pq.read_metadata(folder / "d.parquet").num_row_groups
    assert [part for part in parts if part.file == 3] == [Slice(3, group, group + 1) for group in range(groups)]
    text = [part for part in parts if part.file == 4]
    assert text[0].start == 0
    assert text[-1].stop == found[4].bytes
    assert [part.stop for part in text[:-1]] == [part.start for part in text[1:]]
    assert all(part.start % PIECE_BYTES == 0 for part in text)


def test_parquet_column_errors(tmp_path):
    pq.write_table(pa.table({"id": [1], "content": ["x"], "n": [1.5]}), tmp_path / "x.parquet")
    (tmp_path / "y.parquet").write_bytes(b"PAR1 not really")
    good, bad = find_files(str(tmp_path))
    with pytest.raises(ConfigError, match=r"x\.parquet has no column 'text' \(columns: id, content, n\); set"):
        plan_units([good], TEXT)
    with pytest.raises(ConfigError, match=r"column 'n' of .*x\.parquet is double, not text; set prepare\.text_column"):
        plan_units([good], [PlainSource(path="", text_column="n")])
    with pytest.raises(ConfigError, match=r"y\.parquet is not a (readable )?parquet file \(.*\); replace or remove it"):
        plan_units([bad], TEXT)
    twice = pa.Table.from_arrays([pa.array(["x"]), pa.array(["y"])], names=["text", "text"])
    pq.write_table(twice, tmp_path / "x.parquet")
    with pytest.raises(ConfigError, match=r"x\.parquet has several columns 'text'; rewrite it with one of that name"):
        plan_units([good], TEXT)
