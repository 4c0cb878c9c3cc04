"""Does a file have the columns that its source needs?"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import PurePosixPath
from typing import TYPE_CHECKING, Any

import pyarrow as pa
import pyarrow.parquet as pq

from lt2.config import ConfigError
from lt2_platform.data.sources.configs import CONVERSATION_COLUMNS, ColumnSource, FileSource
from lt2_platform.storage import arrow_filesystem
from lt2_platform.storage_errors import is_of_the_store
from lt2_platform.wording import one_line

if TYPE_CHECKING:
    from lt2_platform.data.sources.listing import SourceFile


def parquet_metadata(file: SourceFile, source: FileSource) -> Any:
    """The footer of a parquet file. Raises ConfigError if it is damaged or columns are missing or of another type."""
    fs, path = arrow_filesystem(file.path)
    try:
        metadata = pq.read_metadata(path, filesystem=fs)
    except (OSError, ValueError) as error:
        if is_of_the_store(error):
            raise
        remedy = "replace or remove it"
        if any(suffix in (".json", ".jsonl") for suffix in PurePosixPath(file.path).suffixes):
            remedy = "if it is JSON lines, set format: jsonl of the source"
        raise ConfigError(f"{file.name} is not a readable parquet file ({one_line(error)}); {remedy}") from error
    schema = metadata.schema.to_arrow_schema()
    check_columns(file, source, schema.names)
    for column in (*(name for alternatives in source.columns for name in alternatives), *source.optional_columns):
        if schema.names.count(column) > 1:
            raise ConfigError(f"{file.name} has several columns '{column}'; rewrite it with one of that name")
    for column in source.text_columns:
        kind = schema.field(column).type
        if not is_text(kind):
            raise ConfigError(f"column '{column}' of {file.name} is {kind}, not text; {source.fix}")
    return metadata


def is_text(kind: pa.DataType) -> bool:
    """Whether a parquet column of this type holds text, bytes or nothing but nulls."""
    if pa.types.is_dictionary(kind):
        return is_text(kind.value_type)
    return any(
        test(kind)
        for test in (pa.types.is_string, pa.types.is_large_string, pa.types.is_string_view, pa.types.is_binary,
                     pa.types.is_large_binary, pa.types.is_binary_view, pa.types.is_null)
    )  # fmt: skip


def check_columns(file: SourceFile, source: FileSource, present: Sequence[str]) -> None:
    """Raise ConfigError for a file without a column that its source needs; it lists the columns that are there."""
    for alternatives in source.columns:
        if not any(column in present for column in alternatives):
            wanted = " or ".join(f"'{column}'" for column in alternatives)
            listed = ", ".join(present) or "none"
            fix = source.fix
            if isinstance(source, ColumnSource) and any(column in present for column in CONVERSATION_COLUMNS):
                fix = f"for conversations the source is {{type: openthoughts, path: …, format: {file.format}}}"
            raise ConfigError(f"{file.name} has no column {wanted} (columns: {listed}); {fix}")
