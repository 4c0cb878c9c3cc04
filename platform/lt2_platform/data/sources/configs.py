"""Where text comes from, as configs. Importable without torch.

A source of one's own is a subclass of `FileSource` in a file of one's own: its `module` names a function
(config, row) -> document, as those in `lt2_platform.data.sources.documents`.
"""

from __future__ import annotations

import functools
import json
from collections.abc import Callable, Mapping
from typing import Annotated, Any, ClassVar, Literal

from pydantic import BeforeValidator, Field, SerializeAsAny, model_validator

from lt2.config import Config, ConfigError
from lt2.extension import Extension

STDLIB = "python-stdlib"

Paths = str | tuple[str, ...]
"""Files, folders or globs, local or s3://."""


class SourceConfig(Extension):
    """Base of all sources. `source` is, as in every open config, the Python file that defines the kind."""

    noun: ClassVar[str] = "source"

    @classmethod
    def read(cls, value: Any) -> Any:
        if isinstance(value, list | tuple) and not all(isinstance(item, str) for item in value):
            mixture = "{type: mixture, sources: [{weight: 0.5, source: …}, …]}"
            raise ValueError(f"a list is of paths alone; sources of several types are {mixture}")
        return super().read(value)


class FileSource(SourceConfig):
    """Base of the sources that are files of one schema.

    `format` "auto" goes by each file's extension; any other one takes from folders and globs the files with an
    extension of that format. `fix` ends the message about a file without the right columns.
    """

    fix: ClassVar[str] = "check that the files are of this source"

    path: Paths
    format: Literal["auto", "text", "jsonl", "parquet"] = "auto"

    @property
    def by_extension(self) -> bool:
        """Whether files of other formats inside folders are passed over."""
        return True

    @property
    def columns(self) -> tuple[tuple[str, ...], ...]:
        """The columns a row must have; of each tuple of alternatives at least one. Nothing else of parquet is read."""
        raise TypeError(f"{type(self).__name__} must define columns to be read")

    @property
    def optional_columns(self) -> tuple[str, ...]:
        return ()

    @property
    def text_columns(self) -> tuple[str, ...]:
        """The columns that must be text in parquet."""
        return ()

    @property
    def masks_loss(self) -> bool:
        """Whether some tokens of its documents are not learned."""
        return False

    def reader(self) -> Callable[[Mapping[str, Any]], Any]:
        """The function row -> document."""
        return functools.partial(self.implementation(), self)


AnySource = Annotated[SerializeAsAny[Paths | SourceConfig], BeforeValidator(SourceConfig.read)]


class ColumnSource(FileSource):
    """One document per row of a table, in one column; or, in files of plain text, one per piece of about 128 KiB."""

    module: ClassVar[str] = "lt2_platform.data.sources.documents:column_text"
    fix: ClassVar[str] = "set text_column of the source"

    text_column: str = "text"

    @property
    def columns(self) -> tuple[tuple[str, ...], ...]:
        return ((self.text_column,),)

    @property
    def text_columns(self) -> tuple[str, ...]:
        return (self.text_column,)


class PlainSource(ColumnSource):
    """What a `prepare.source` that is only a path means."""

    fix: ClassVar[str] = "set prepare.text_column"
    type: Literal["plain"] = "plain"

    @property
    def by_extension(self) -> bool:
        return self.format == "auto"


class TextConfig(FileSource):
    """Text files; a long one is cut at a blank line about every 128 KiB."""

    type: Literal["text"] = "text"
    format: Literal["text"] = "text"

    @property
    def columns(self) -> tuple[tuple[str, ...], ...]:
        return ()


class PythonStdlibConfig(TextConfig):
    """The standard library of the running Python: some 10 MB of text that every machine has."""

    type: Literal["python_stdlib"] = "python_stdlib"
    path: Literal["python-stdlib"] = "python-stdlib"


class JsonlConfig(ColumnSource):
    """JSON lines, plain, .zst, .zstd or .gz."""

    type: Literal["jsonl"] = "jsonl"
    format: Literal["jsonl"] = "jsonl"


class ParquetConfig(ColumnSource):
    """Parquet files."""

    type: Literal["parquet"] = "parquet"
    format: Literal["parquet"] = "parquet"


class FineWebEduConfig(FileSource):
    """FineWeb-Edu: parquet of text, id, dump, url, file_path, language, language_score, token_count, score, int_score.

    `min_int_score` leaves out documents whose classifier score, rounded, is lower (the data set itself begins at 3).
    """

    module: ClassVar[str] = "lt2_platform.data.sources.documents:educational_text"
    fix: ClassVar[str] = "for another schema use type parquet"
    type: Literal["fineweb_edu"] = "fineweb_edu"
    format: Literal["parquet"] = "parquet"
    min_int_score: int | None = Field(default=None, ge=0, le=5)

    @property
    def columns(self) -> tuple[tuple[str, ...], ...]:
        return (("text",),) if self.min_int_score is None else (("text",), ("int_score",))

    @property
    def text_columns(self) -> tuple[str, ...]:
        return ("text",)


class DclmConfig(FileSource):
    """DCLM-baseline: .jsonl.zst (in places .jsonl.zstd) whose fields come and go; only `text` is read."""

    module: ClassVar[str] = "lt2_platform.data.sources.documents:column_text"
    fix: ClassVar[str] = "for another schema use type jsonl"
    text_column: ClassVar[str] = "text"
    type: Literal["dclm"] = "dclm"
    format: Literal["jsonl"] = "jsonl"

    @property
    def columns(self) -> tuple[tuple[str, ...], ...]:
        return (("text",),)


Template = Literal["chatml", "llama3", "plain"]
"""How the turns of a conversation are written."""

CONVERSATION_COLUMNS = ("conversations", "messages")


class OpenThoughtsConfig(FileSource):
    """OpenThoughts: conversations with long reasoning, in `conversations` ({from, value}) or `messages`, and `system`.

    template: how turns are written. Its markers become special tokens where the tokenizer has them (chatml: Qwen's;
    llama3: Llama 3's), else ordinary text; the conversation itself is always ordinary text. loss "assistant": only what
    the assistant says, and the marker that ends it, is learned. Answers that end while thinking are quarantined, or
    kept.
    """

    module: ClassVar[str] = "lt2_platform.data.sources.documents:conversation"
    fix: ClassVar[str] = "openthoughts files have one of them"
    type: Literal["openthoughts"] = "openthoughts"
    format: Literal["parquet", "jsonl"] = "parquet"
    template: Template = "chatml"
    loss: Literal["all", "assistant"] = "all"
    unterminated_think: Literal["quarantine", "keep"] = "quarantine"

    @property
    def columns(self) -> tuple[tuple[str, ...], ...]:
        return (CONVERSATION_COLUMNS,)

    @property
    def optional_columns(self) -> tuple[str, ...]:
        return ("system",)

    @property
    def masks_loss(self) -> bool:
        return self.loss == "assistant"


class Share(Config):
    """A source of a mixture and its weight, relative to the others'; None: as many tokens as it has."""

    weight: float | None = Field(default=None, gt=0)
    source: AnySource


class MixtureConfig(SourceConfig):
    """Several sources, each a fixed fraction of the training tokens, exact to a token; without weights, each once.

    stopping_strategy "first_exhausted": the mixture is as long as the scarcest source allows and no token comes twice;
    of the others, what comes first in source order is taken. "all_exhausted": every token comes at least once, and
    sources that run out begin again, for whole and partial epochs. A document at a cut may be cut too. Held-out
    documents are not weighed: each is in the validation split once. Training's shuffle does the mixing.
    """

    type: Literal["mixture"] = "mixture"
    sources: tuple[Share, ...] = Field(min_length=2)
    stopping_strategy: Literal["first_exhausted", "all_exhausted"] = "first_exhausted"

    @model_validator(mode="after")
    def _check(self) -> MixtureConfig:
        if len({share.weight is None for share in self.sources}) > 1:
            raise ValueError("give a weight to every source, or to none to take each once")
        return self


def parts_of(source: Paths | SourceConfig, *, format: str = "auto", text_column: str = "text") -> list[FileSource]:
    """The sources to read, in order: one, or those of a mixture. `format` and `text_column` are for bare paths."""
    if isinstance(source, MixtureConfig):
        inner = [share.source for share in source.sources]
        if any(isinstance(one, MixtureConfig) for one in inner):
            raise ConfigError("a mixture inside a mixture; list its sources in the outer one, with weights multiplied")
        return [part for one in inner for part in parts_of(one, format=format, text_column=text_column)]
    if isinstance(source, FileSource):
        return [source]
    if isinstance(source, SourceConfig):
        raise ConfigError(f"source type {source.type!r} is neither files nor a mixture; derive it from FileSource")
    return [PlainSource.model_validate({"path": source, "format": format, "text_column": text_column})]


def paths_of(source: Paths | SourceConfig) -> list[str]:
    """Every path that a source names."""
    found = (part.path for part in parts_of(source))
    return [path for paths in found for path in ([paths] if isinstance(paths, str) else paths)]


def describe(source: Paths | SourceConfig) -> str:
    """A source in a few words, for a plan."""
    if isinstance(source, MixtureConfig):
        total = sum(share.weight or 0 for share in source.sources)
        shares = [f"{share.weight / total:.0%} " if share.weight else "" for share in source.sources]
        return " + ".join(share + describe(one.source) for share, one in zip(shares, source.sources, strict=True))
    if isinstance(source, PythonStdlibConfig):
        return STDLIB
    if isinstance(source, FileSource):
        return f"{source.type} {source.path if isinstance(source.path, str) else ', '.join(source.path)}"
    return str(source)


def identity(source: SourceConfig) -> Any:
    """Everything about a source but where it lies, as JSON."""

    def without_paths(value: Any) -> Any:
        if isinstance(value, Mapping):
            return {key: without_paths(item) for key, item in value.items() if key != "path"}
        return [without_paths(item) for item in value] if isinstance(value, list) else value

    return without_paths(json.loads(source.model_dump_json()))
