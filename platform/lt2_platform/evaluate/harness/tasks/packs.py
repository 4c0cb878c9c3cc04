"""Evaluation packs: the data of lm-eval tasks as files of ours, so that no worker ever asks a hub.

    <pack>/manifest.json              per task: splits (file, rows, sha256), source, revision, licence, format or YAML
    <pack>/<task>/<split>.parquet     rows in the schema that the task's definition reads

Built once from files or from `datasets` folders; local or on S3. A pack may be added to. Everything read is checked
against the manifest first.
"""

from __future__ import annotations

import hashlib
import io
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from importlib.metadata import version
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq

from lt2.config import ConfigError
from lt2_platform.data.tokenizers.tokenize import Tokenizer
from lt2_platform.evaluate.harness.answers import check_rows, labelled
from lt2_platform.evaluate.harness.long_context.needles import TASKS as NEEDLES
from lt2_platform.evaluate.harness.long_context.ruler import TASKS as RULER_TASKS
from lt2_platform.evaluate.harness.tasks.sources import read_source
from lt2_platform.evaluate.harness.tasks.suites import COLUMNS, UPSTREAM
from lt2_platform.results.curves import read_parquet
from lt2_platform.results.store import check_name
from lt2_platform.storage import Storage

MANIFEST, SCHEMA_VERSION = "manifest.json", 1
EVALUATED = ("test", "validation", "train")  # the first that a pack has is evaluated


@dataclass(frozen=True)
class Origin:
    """What a manifest says of where data came from; the builder cannot know it."""

    revision: str = "unknown"
    licence: str = "unknown"


def build(
    pack: str, sources: Mapping[str, str], *, origin: Origin = Origin(), tokenizer: Tokenizer | None = None
) -> dict[str, Any]:
    """Add tasks to a pack and return its manifest.

    sources: task -> a file or folder, see `sources.read_source`. Rows are in the task's upstream schema, or those of a
    format of ours (suites.COLUMNS).
    tokenizer: recorded for data that is frozen for one tokenizer (needles).

    Raises:
        ConfigError: a name that cannot be a file's, an unknown task, a source that is not there or of no known layout,
            rows of another schema, or items whose answer is empty or none of their choices. Splits without any answers
            are left out, and recorded as that.
    """
    tables = {task: read_source(task, place) for task, place in sources.items()}
    return add(pack, tables, sources, origin=origin, tokenizer=tokenizer)


def add(
    pack: str,
    tasks: Mapping[str, Mapping[str, pa.Table]],
    sources: Mapping[str, str],
    *,
    origin: Origin = Origin(),
    tokenizer: Tokenizer | None = None,
) -> dict[str, Any]:
    """`build` from rows: task -> split -> table; `sources` says where each task's rows come from."""
    for task in tasks:
        check_name(task, "task")  # it names folders, samples and results
    formats = {task: format_of(task, tables) for task, tables in tasks.items()}
    usable = {task: labelled(task, formats[task], tables, sources[task]) for task, tables in tasks.items()}
    storage = Storage(pack)
    manifest = {"schema_version": SCHEMA_VERSION, "tasks": held(pack)}
    for task, tables in tasks.items():
        record: dict[str, Any] = {"source": sources[task], "revision": origin.revision, "licence": origin.licence}
        kept = usable[task]
        record |= {"format": formats[task], "lm_eval": version("lm_eval"), "splits": {}}
        if without := [split for split in tables if split not in kept]:
            record["left_out"] = without
        if tokenizer is not None:
            record["tokenizer"] = {key: getattr(tokenizer, key) for key in ("name", "sha256", "vocabulary")}
        for split, table in kept.items():
            sink = io.BytesIO()
            pq.write_table(table, sink)
            path = f"{task}/{split}.parquet"
            storage.write_bytes(path, sink.getvalue())
            digest = hashlib.sha256(sink.getvalue()).hexdigest()
            record["splits"][split] = {"file": path, "rows": table.num_rows, "sha256": digest}
        manifest["tasks"][task] = record
    storage.write_json(MANIFEST, manifest)
    return manifest


def discover(folder: str) -> dict[str, str]:
    """task -> path of every known task's data under a folder of datasets. Raises ConfigError if there is none."""
    root = Path(folder).expanduser()
    found = _known_tasks(root)
    if not found:
        usual = ", ".join(upstream.folders[0] for upstream in UPSTREAM.values())
        inside = [str(path) for path in sorted(root.iterdir()) if _known_tasks(path)] if root.is_dir() else []
        advice = f"{' and '.join(inside)} has: give that" if inside else f"it is expected in {usual}"
        raise ConfigError(f"{folder} has no data of a known task; {advice}. Or give TASK=PATH")
    return found


def _known_tasks(folder: Path) -> dict[str, str]:
    found = {}
    for task, upstream in UPSTREAM.items():
        places = (folder / name for name in upstream.folders)
        if (place := next((place for place in places if place.is_dir()), None)) is not None:
            found[task] = str(place)
    return found


def verify(pack: str) -> list[str]:
    """What is wrong with a pack's files and their items, [] if nothing."""
    storage = Storage(pack)
    problems = []
    for task, record in _read(storage)["tasks"].items():
        for split in record["splits"]:
            try:
                read_split(storage, task, record, split)
            except ConfigError as error:
                problems.append(str(error))
    return problems


def read_manifest(pack: str) -> dict[str, Any]:
    """Raises ConfigError if there is no pack, or one of another version."""
    return _read(Storage(pack))


def held(pack: str) -> dict[str, Any]:
    """The manifest's records by task, {} where there is no pack yet."""
    storage = Storage(pack)
    return _read(storage)["tasks"] if storage.exists(MANIFEST) else {}


def require(pack: str, tasks: Sequence[str]) -> dict[str, Any]:
    """The manifest's records of `tasks`. Raises ConfigError that names those a pack lacks and how to add them."""
    have = read_manifest(pack)["tasks"]
    missing = [task for task in tasks if task not in have]
    if missing:
        raise ConfigError(
            f"pack {pack} has no {', '.join(missing)}; add them with {_commands(pack, missing)}, or choose of what "
            f"it has: tasks={','.join(sorted(have))}"
        )
    return {task: have[task] for task in tasks}


def worded(tasks: Mapping[str, Mapping[str, Any]]) -> dict[str, Mapping[str, Any]]:
    """The records of tasks whose items are text: without needles and RULER's, which are made of filler."""
    return {task: record for task, record in tasks.items() if record["format"] != "needles"}


def _commands(pack: str, tasks: Sequence[str]) -> str:
    """What adds `tasks` to a pack: needles and RULER's are made, all others come from files."""
    parts = {task: task.rpartition("_") for task in tasks}
    made = [(name, length) for name, _, length in parts.values() if name in RULER_TASKS and length.isdigit()]
    files = [task for task, (name, _, length) in parts.items() if (name, length) not in made]
    commands = [f"`lt2 pack build {pack} {' '.join(f'{task}=PATH' for task in files)}`"] if files else []
    if made:
        names, lengths = (",".join(dict.fromkeys(found)) for found in zip(*made))
        hidden = any(name in NEEDLES and NEEDLES[name].haystack == "essays" for name, _ in made)
        options = f"--tokenizer TOKENIZER{' --essays FOLDER' * hidden} --tasks {names} --lengths {lengths}"
        commands.append(f"`lt2 pack ruler {pack} {options}`")
    return " and ".join(commands)


def read_split(storage: Storage, task: str, record: Mapping[str, Any], split: str) -> pa.Table:
    """One split's rows. Raises ConfigError if the file is missing or changed, or answers are none of the choices."""
    table = read_parquet(checked(storage, task, record, split))
    check_rows(task, record["format"], table, f"pack {storage.root}: {record['splits'][split]['file']}")
    return table


def checked(storage: Storage, task: str, record: Mapping[str, Any], split: str) -> bytes:
    file = record["splits"][split]
    try:
        data = storage.read_bytes(file["file"])
    except FileNotFoundError as error:
        raise ConfigError(f"pack {storage.root}: {file['file']} is missing; build {task} again") from error
    if hashlib.sha256(data).hexdigest() != file["sha256"]:
        raise ConfigError(f"pack {storage.root}: {file['file']} is corrupt (sha256); build {task} again")
    return data


def evaluated_split(record: Mapping[str, Any]) -> str:
    return next(split for split in EVALUATED if split in record["splits"])


def format_of(task: str, tables: Mapping[str, pa.Table]) -> str:
    """ "upstream", or the name of one of FORMATS that the columns fit."""
    columns = set(next(iter(tables.values())).column_names)
    for name, needed in COLUMNS.items():
        if needed <= columns:
            return name
    if task not in UPSTREAM:
        raise ConfigError(
            f"{task} is not a known task ({', '.join(sorted(UPSTREAM))}); for one of yours, give rows with the columns "
            + ", or ".join(" ".join(sorted(needed)) for needed in COLUMNS.values())
        )
    lacking = [column for column in UPSTREAM[task].columns if column not in columns]
    if lacking:
        raise ConfigError(
            f"{task}: the rows have no {', '.join(lacking)}, which its definition reads; they have "
            f"{', '.join(sorted(columns))}. Give the release that lm-eval uses"
        )
    return "upstream"


def _read(storage: Storage) -> dict[str, Any]:
    if not storage.exists(MANIFEST):
        raise ConfigError(f"{storage.root} is not an evaluation pack (no {MANIFEST}); build it with `lt2 pack build`")
    damaged = f"pack {storage.root}: its {MANIFEST} is damaged; remove the pack and build it again"
    try:
        manifest = storage.read_json(MANIFEST)
    except ValueError as error:
        raise ConfigError(damaged) from error
    if not isinstance(manifest, dict):
        raise ConfigError(damaged)
    if manifest.get("schema_version") != SCHEMA_VERSION:
        found = manifest.get("schema_version")
        raise ConfigError(
            f"pack {storage.root} has schema version {found}, this LT2 reads {SCHEMA_VERSION}; rebuild it"
        )
    if not isinstance(manifest.get("tasks"), dict):
        raise ConfigError(damaged)
    return manifest
