"""Reading what a pack is built from: files, folders written by `datasets`, and snapshots of a hub's repositories."""

from __future__ import annotations

import json
import re
from collections.abc import Sequence
from pathlib import Path
from typing import cast

import pyarrow as pa
import pyarrow.parquet as pq

from lt2.config import ConfigError
from lt2_platform.evaluate.harness.tasks.suites import UPSTREAM

SPLITS = ("train", "validation", "test")
SHARD = re.compile(r"-\d{5}-of-\d{5}$")


def read_source(task: str, place: str) -> dict[str, pa.Table]:
    """split -> rows.

    place: a jsonl or parquet file (its split is named by the file, else "test"); a folder of `datasets`
    (`save_to_disk`), or one with such a folder per split; or a folder with files named by split, as a hub's
    repositories have them (test-00000-of-00001.parquet). Of a task whose subjects are configs, the folder of all.

    Raises:
        ConfigError: nothing is there, or of no known layout, or several data sets, or a split is empty.
    """
    path = Path(place).expanduser()
    if not path.exists():
        raise ConfigError(f"{task}: {place} does not exist; give a jsonl or parquet file or a `datasets` folder")
    parts = {name_in_file(task, path): [path]} if path.is_file() else parts_of(task, path)
    if not parts:
        raise ConfigError(
            f"{task}: {place} is not a folder of `datasets` (save_to_disk) with {', '.join(SPLITS)}, and has no "
            "parquet or jsonl files named by split"
        )
    tables = {
        split: joined(task, split, {part: read_part(task, part) for part in found}) for split, found in parts.items()
    }
    empty = [split for split, table in tables.items() if not table.num_rows]
    if empty:
        raise ConfigError(f"{task}: {place} has no rows in {', '.join(empty)}")
    return {split: renamed(task, table) for split, table in tables.items()}


def split_names(task: str) -> dict[str, str]:
    """{name of a split in the source: its name in a pack}."""
    names = {name: name for name in SPLITS}
    few_shot = UPSTREAM[task].few_shot if task in UPSTREAM else "train"
    return names if few_shot == "train" else {"validation": "validation", "test": "test", few_shot: "train"}


def name_in_file(task: str, path: Path) -> str:
    words = re.findall("[a-z]+", path.stem.lower())
    known = split_names(task).items()
    return next((split for name, split in known if any(word.startswith(name[:3]) for word in words)), "test")


def parts_of(task: str, folder: Path) -> dict[str, list[Path]]:
    """split -> the files or `datasets` folders that hold it, in order of name."""
    names = split_names(task)
    if (folder / "state.json").is_file():
        return {names.get(folder.name, "test"): [folder]}
    found = [state.parent for state in [*folder.glob("*/state.json"), *folder.glob("*/*/state.json")]]
    parts = [(part.name, part) for part in found]
    for pattern in ("*.parquet", "*.jsonl", "*/*.parquet", "*/*.jsonl"):
        files = folder.glob(pattern) if not found else ()
        parts += [(SHARD.sub("", file.stem).removeprefix(task).lstrip("-_"), file) for file in files]
    kept = sorted((part, names[name]) for name, part in parts if name in names)
    merge = task in UPSTREAM and UPSTREAM[task].merge
    configs = {part.parent for part, _ in kept}
    if len(configs) > 1 and not merge:
        raise ConfigError(f"{task}: {folder} holds several configs; name one of {', '.join(map(str, sorted(configs)))}")
    return {split: [part for part, of in kept if of == split] for split in SPLITS if split in {of for _, of in kept}}


def read_part(task: str, path: Path) -> pa.Table:
    try:
        if path.is_dir():
            import datasets

            return cast(pa.Table, datasets.load_from_disk(str(path)).with_format("arrow")[:])
        if path.suffix == ".parquet":
            return pq.read_table(path)
        # Not splitlines(): it also breaks at characters that may stand inside a JSON string.
        return pa.Table.from_pylist(read_lines(task, path, path.read_bytes().decode().split("\n")))
    except (UnicodeDecodeError, pa.ArrowException, OSError) as error:
        raise ConfigError(
            f"{task}: {path} cannot be read ({error}); give a complete file whose rows share one schema"
        ) from error


def read_lines(task: str, path: Path, lines: Sequence[str]) -> list[dict]:
    rows = []
    for number, line in enumerate(lines, start=1):
        if not line.strip():
            continue
        try:
            row = json.loads(line)
        except json.JSONDecodeError as error:
            raise ConfigError(f"{task}: {path}:{number} is not JSON ({error.msg})") from None
        if not isinstance(row, dict):
            raise ConfigError(f'{task}: {path}:{number} is not a row; a row is an object, such as {{"query": "…", …}}')
        rows.append(row)
    return rows


def joined(task: str, split: str, tables: dict[Path, pa.Table]) -> pa.Table:
    try:
        return pa.concat_tables(tables.values())
    except pa.ArrowException as error:
        places = ", ".join(map(str, tables))
        raise ConfigError(f"{task}: the parts of {split} differ in their columns ({places}): {error}") from error


def renamed(task: str, table: pa.Table) -> pa.Table:
    for old, new in UPSTREAM[task].rename if task in UPSTREAM else ():
        if new not in table.column_names and old in table.column_names:
            values = table[old].cast(pa.int64()) if pa.types.is_boolean(table[old].type) else table[old]
            table = table.append_column(new, values)
    return table
