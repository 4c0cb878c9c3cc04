"""Documents out of a slice of a file, streamed: memory holds one buffer and one document, never a file."""

from __future__ import annotations

import io
import json
import re
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager, suppress
from functools import partial
from typing import Any, BinaryIO, NamedTuple

import pyarrow as pa
import pyarrow.parquet as pq

from lt2.config import ConfigError
from lt2_platform.data.overlap import Overlap
from lt2_platform.data.sources.columns import check_columns, is_text
from lt2_platform.data.sources.configs import FileSource
from lt2_platform.data.sources.documents import SAMPLE_CHARACTERS, Document, Fault, checked, text_of
from lt2_platform.data.sources.listing import PIECE_BYTES, Slice, SourceFile
from lt2_platform.storage import arrow_filesystem
from lt2_platform.storage_errors import is_of_the_store
from lt2_platform.wording import one_line, printable

PEEKED_ROWS, PEEKED_BYTES, PEEK_BUFFER = 100, 2**20, 2**16
MAX_DOCUMENT_BYTES = 256 * 2**20
LEFT_OUT = Fault("left out by the source's own filter")
_BOM = b"\xef\xbb\xbf"
_BLANK_LINE = re.compile(rb"\n\r?\n")


class Row(NamedTuple):
    """A document, a bad row, LEFT_OUT, or None for a blank line; `row` counts lines, pieces or table rows from 0."""

    row: int
    text: Document | Fault | None


def read_rows(file: SourceFile, part: Slice, source: FileSource, without: Overlap | None = None) -> Iterator[Row]:
    """The rows of one slice in file order; bad ones are also those that overlap `without`, the items of evaluations.

    Raises ConfigError if the file itself cannot be read.
    """
    rows = _rows(file, part, source)
    return rows if without is None else map(partial(_not_evaluated, without=without), rows)


def _not_evaluated(row: Row, *, without: Overlap) -> Row:
    if row.text is None or isinstance(row.text, Fault):
        return row
    found = without.find(text_of(row.text))
    return row if found is None else Row(row.row, Fault(f"overlaps {found[0]}", found[1][:SAMPLE_CHARACTERS]))


def _rows(file: SourceFile, part: Slice, source: FileSource) -> Iterator[Row]:
    with _blaming(file):
        if file.format == "parquet":
            yield from _parquet_rows(file, part, source)
        elif file.format == "jsonl":
            with _open(file) as stream:
                yield from _json_rows(stream, part, source)
        else:
            with _open(file) as stream:
                yield from _text_rows(stream, part)


@contextmanager
def _blaming(file: SourceFile) -> Iterator[None]:
    try:
        yield
    except (OSError, pa.ArrowException) as error:
        if is_of_the_store(error):  # another attempt goes on from here; a ConfigError would end it for good
            raise
        raise ConfigError(f"cannot read {file.name} ({one_line(error)}); replace or remove that file") from error


def rows_before(file: SourceFile, part: Slice) -> int:
    """How many rows of `file` come before this slice (reads that far: for the message of an error, not for a loop)."""
    if part.start == 0:
        return 0
    if file.format == "parquet":
        fs, path = arrow_filesystem(file.path)
        metadata = pq.read_metadata(path, filesystem=fs)
        return sum(metadata.row_group(group).num_rows for group in range(part.start))
    with _open(file) as stream:
        if file.format == "jsonl":
            return sum(1 for _ in lines(stream, 0, part.start))
        return sum(1 for _ in pieces(stream, 0, part.start))


def peek_columns(file: SourceFile) -> list[str]:
    """Keys of the first objects of a jsonl file (100, or as many as begin in its first MiB), in order of appearance."""
    keys: dict[str, None] = {}
    seen = 0
    with _blaming(file), _open(file, PEEK_BUFFER) as stream:
        for line, _ in zip(lines(stream, 0, None), range(PEEKED_ROWS), strict=False):
            with suppress(ValueError, RecursionError):
                value = json.loads(line)
                keys.update(dict.fromkeys(value if isinstance(value, dict) else ()))
            seen += len(line)
            if seen >= PEEKED_BYTES:
                break
    return list(keys)


def bad_beginnings(files: Sequence[SourceFile], parts: Sequence[FileSource]) -> list[str]:
    """What is wrong with jsonl files that cannot be read or lack a column in all of their first rows.

    Like parquet's footers these are two requests a file; a thousand local files take about a second.
    """

    def look(file: SourceFile) -> str | None:
        try:
            if columns := peek_columns(file):
                check_columns(file, parts[file.source], columns)
        except ConfigError as error:
            return str(error)
        return None

    with ThreadPoolExecutor(16) as pool:
        return [problem for problem in pool.map(look, (file for file in files if file.format == "jsonl")) if problem]


def _open(file: SourceFile, buffer: int = 2**20) -> BinaryIO:
    fs, path = arrow_filesystem(file.path)
    if file.compression:
        # Arrow's streams go on after the first zstd frame and notice a truncated file; python-zstandard's do neither.
        raw = fs.open_input_stream(path, compression=file.compression)
    else:
        raw = fs.open_input_file(path)
    return io.BufferedReader(raw, buffer)  # type: ignore[arg-type]


def _text_rows(stream: BinaryIO, part: Slice) -> Iterator[Row]:
    for index, (window, content) in enumerate(pieces(stream, part.start, part.stop)):
        yield Row(index, _text(content if window else content.removeprefix(_BOM)))


def pieces(stream: BinaryIO, start: int, stop: int | None) -> Iterator[tuple[int, bytes]]:
    """(window, bytes) of the pieces of a text file that begin in bytes [start, stop), multiples of PIECE_BYTES.

    The file is cut at most once per 128 KiB window after the first: after the window's first blank line, else its first
    newline, else not at all. A cut depends on its own window only, so any division into slices gives the same pieces.
    """
    window, owner, held = start // PIECE_BYTES, None if start else 0, []
    if start:
        stream.seek(start)
    while content := stream.read(PIECE_BYTES):
        ours = stop is None or window * PIECE_BYTES < stop
        cut = _cut(content) if window else None
        if cut is not None:
            if owner is not None:
                yield owner, b"".join([*held, content[:cut]])
            owner, held, content = window, [], content[cut:]
        if not ours and (cut is not None or owner is None):
            return
        # A piece that passed the limit is refused later; holding the rest of it would only cost memory.
        if owner is not None and len(held) * PIECE_BYTES <= MAX_DOCUMENT_BYTES:
            held.append(content)
        window += 1
    if owner == 0 or any(held):
        yield owner or 0, b"".join(held)


def _cut(content: bytes) -> int | None:
    blank = _BLANK_LINE.search(content)
    if blank:
        return blank.end()
    newline = content.find(b"\n")
    return None if newline < 0 else newline + 1


def _json_rows(stream: BinaryIO, part: Slice, source: FileSource) -> Iterator[Row]:
    document = source.reader()
    for index, line in enumerate(lines(stream, part.start, part.stop)):
        if part.start == 0 and index == 0:
            line = line.removeprefix(_BOM)
        if not line.strip():
            yield Row(index, None)
            continue
        value = _json_object(line, source)
        found = value if isinstance(value, Fault) else document(value)
        yield Row(index, _sampled(found, line))


def lines(stream: BinaryIO, start: int, stop: int | None) -> Iterator[bytes]:
    """The lines that begin in bytes [start, stop); one longer than 256 MiB comes cut just past that."""
    position = start
    if start:
        stream.seek(start - 1)
        position = start - 1 + _skip_line(stream)
    while stop is None or position < stop:
        line = stream.readline(MAX_DOCUMENT_BYTES + 1)
        if not line:
            return
        position += len(line)
        if len(line) > MAX_DOCUMENT_BYTES and not line.endswith(b"\n"):
            position += _skip_line(stream)
        yield line


def _skip_line(stream: BinaryIO) -> int:
    skipped = 0
    while part := stream.readline(2**20):
        skipped += len(part)
        if part.endswith(b"\n"):
            break
    return skipped


def _json_object(line: bytes, source: FileSource) -> dict[str, Any] | Fault:
    if len(line) > MAX_DOCUMENT_BYTES:
        return Fault("longer than 256 MiB")
    try:
        value = json.loads(line.decode())
    except UnicodeDecodeError:
        return Fault("invalid utf-8")
    except (ValueError, RecursionError):
        return Fault("invalid json")
    if not isinstance(value, dict):
        return Fault("not a json object")
    if not all(any(column in value for column in alternatives) for alternatives in source.columns):
        return Fault("missing column")
    return value


def _parquet_rows(file: SourceFile, part: Slice, source: FileSource) -> Iterator[Row]:
    document = source.reader()
    wanted = [column for alternatives in source.columns for column in alternatives] + list(source.optional_columns)
    fs, path = arrow_filesystem(file.path)
    index = 0
    with pq.ParquetFile(path, filesystem=fs, pre_buffer=False) as table:
        columns = [column for column in wanted if column in table.schema_arrow.names]
        groups = list(range(part.start, table.num_row_groups if part.stop is None else part.stop))
        for batch in table.iter_batches(batch_size=256, row_groups=groups, columns=columns):
            values = {name: _values(batch.column(name)) for name in columns}
            for place in range(batch.num_rows):
                row = {name: _decoded(column[place]) for name, column in values.items()}
                fault = next((value for value in row.values() if isinstance(value, Fault)), None)
                first = values[columns[0]][place]
                yield Row(index, _sampled(fault or document(row), first if isinstance(first, bytes) else b""))
                index += 1


def _values(column: pa.Array) -> list[Any]:
    """Python values; text as bytes, because one malformed string would otherwise fail the whole batch."""
    if pa.types.is_dictionary(column.type):
        column = column.dictionary_decode()
    if is_text(column.type):
        return column.cast(pa.large_binary()).to_pylist()
    try:
        return column.to_pylist()
    except UnicodeDecodeError:
        return [_value(column[place]) for place in range(len(column))]


def _value(scalar: pa.Scalar) -> Any:
    try:
        return scalar.as_py()
    except UnicodeDecodeError:
        return Fault("invalid utf-8")


def _decoded(value: Any) -> Any:
    if not isinstance(value, bytes):
        return value
    if len(value) > MAX_DOCUMENT_BYTES:
        return Fault("longer than 256 MiB")
    try:
        return value.decode()
    except UnicodeDecodeError:
        return Fault("invalid utf-8")


def _text(content: bytes) -> Document | Fault:
    text = _decoded(content)
    return _sampled(text if isinstance(text, Fault) else checked(text), content)


def _sampled(found: Document | Fault | None, content: bytes) -> Document | Fault:
    """What a row became, a fault with the beginning of its content unless it has one; None means left out."""
    if found is None:
        return LEFT_OUT
    if not isinstance(found, Fault):
        return found
    if found.sample:  # may quote the lone surrogate that it is about, which no file can hold
        return Fault(found.reason, printable(found.sample))
    sample = content[: 4 * SAMPLE_CHARACTERS].decode(errors="replace").strip()[:SAMPLE_CHARACTERS]
    return Fault(found.reason, sample)
