"""`lt2 pack`: task data as files. Everything heavy is imported by the command that needs it."""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from typing import TYPE_CHECKING, Annotated, Any

import typer

from lt2_workflows.commands.options import config_error
from lt2_workflows.commands.overview import Group

if TYPE_CHECKING:
    from lt2_platform.evaluate.harness.long_context.ruler import Sources

pack_app = typer.Typer(
    cls=Group, help="Evaluation packs: task data as files, so that workers need no hub.", no_args_is_help=True
)

PackArgument = Annotated[str, typer.Argument(metavar="PACK", help="The pack's folder or s3:// prefix.")]
TokenizerOption = Annotated[str, typer.Option(help="The model's: byte, a tokenizer.json or a *.tiktoken.")]
EssaysOption = Annotated[str | None, typer.Option(metavar="FOLDER", help="Essays (.txt) to hide needles in.")]


@pack_app.command("build")
def pack_build(
    pack: PackArgument,
    sources: Annotated[
        list[str] | None,
        typer.Argument(metavar="[TASK=PATH]...", help="A jsonl, parquet or `datasets` folder per task."),
    ] = None,
    folder: Annotated[
        str | None, typer.Option("--from", metavar="FOLDER", help="Take every known task found in this folder.")
    ] = None,
    revision: Annotated[str, typer.Option(help="Version of the data, to record.")] = "unknown",
    licence: Annotated[str, typer.Option(help="Licence of the data, to record.")] = "unknown",
) -> None:
    """Make a pack from files, or add tasks to one.

    A task that the pack already has is replaced, with a note of it.
    """
    from lt2_platform.evaluate.harness.tasks import packs

    found = packs.discover(folder) if folder else {}
    for item in sources or []:
        task, equals, path = item.partition("=")
        if not equals:
            raise config_error(f"{item}: expected TASK=PATH, e.g. arc_easy=data/ai2_arc/ARC-Easy")
        found[task] = path
    if not found:
        raise config_error("nothing to build: give TASK=PATH or --from FOLDER")
    before = packs.held(pack)
    manifest = packs.build(pack, found, origin=packs.Origin(revision, licence))
    for task in found:
        record = manifest["tasks"][task]
        left_out = ", ".join(record.get("left_out", []))
        without = f"; left out, as without answers: {left_out}" if left_out else ""
        typer.echo(f"{task:<20} {_rows(record)}{without}{_replaced(before.get(task), record)}")


def _rows(record: dict[str, Any]) -> str:
    return ", ".join(f"{split} {file['rows']:,}" for split, file in record["splits"].items())


def _replaced(before: dict[str, Any] | None, now: dict[str, Any]) -> str:
    """What became of the task that the pack had by this name, for whoever meant to add another one."""
    if before is None:
        return ""
    return "; unchanged" if before["splits"] == now["splits"] else f"; replaces what was there, {_rows(before)}"


@pack_app.command("needles")
def pack_needles(
    pack: PackArgument,
    tokenizer: TokenizerOption,
    essays: EssaysOption = None,
    tasks: Annotated[str, typer.Option(help="Names, comma-separated.")] = "niah_single_1,niah_single_2,niah_single_3",
    lengths: Annotated[str, typer.Option(help="Tokens, comma-separated.")] = "1024,2048,4096,8192",
    samples: Annotated[int, typer.Option(min=1)] = 500,
    seed: int = 42,
) -> None:
    """Add needle-in-a-haystack tasks to a pack, for one tokenizer."""
    from lt2_platform.evaluate.harness.long_context.ruler import Sources

    add_generated(pack, tokenizer, tasks.split(","), lengths, samples=samples, seed=seed, sources=Sources(essays))


@pack_app.command("ruler")
def pack_ruler(
    pack: PackArgument,
    tokenizer: TokenizerOption,
    essays: EssaysOption = None,
    squad: Annotated[str | None, typer.Option(metavar="FILE", help="SQuAD's json, e.g. dev-v2.0.json.")] = None,
    hotpot: Annotated[str | None, typer.Option(metavar="FILE", help="HotpotQA's json, with distractors.")] = None,
    tasks: Annotated[str | None, typer.Option(help="Names, comma-separated. [default: RULER's 13]")] = None,
    lengths: Annotated[str, typer.Option(help="Tokens, comma-separated.")] = "4096",
    samples: Annotated[int, typer.Option(min=1)] = 500,
    seed: int = 42,
) -> None:
    """Add RULER tasks to a pack, for one tokenizer."""
    from lt2_platform.evaluate.harness.long_context import ruler

    names = ruler.TASKS if tasks is None else tasks.split(",")
    sources = ruler.Sources(essays, squad, hotpot)
    add_generated(pack, tokenizer, names, lengths, samples=samples, seed=seed, sources=sources)


def add_generated(
    pack: str, tokenizer: str, names: Sequence[str], lengths: str, *, samples: int, seed: int, sources: Sources
) -> None:
    import pyarrow as pa

    from lt2.config import ConfigError
    from lt2_platform.data.tokenizers.tokenize import load_tokenizer
    from lt2_platform.evaluate.harness.long_context import ruler
    from lt2_platform.evaluate.harness.tasks import packs

    if not all(part.strip().isdigit() for part in lengths.split(",")):
        raise config_error(f"--lengths {lengths}: give numbers of tokens, comma-separated, e.g. 4096,8192")
    loaded = load_tokenizer(tokenizer)
    origin = ", ".join(f"{name} {place}" for name, place in vars(sources).items() if place is not None)
    made, problems = {}, {}
    for name, length in itertools.product(names, map(int, lengths.split(","))):
        try:
            made[f"{name}_{length}"] = ruler.make(name, loaded, length, samples=samples, seed=seed, sources=sources)
        except ConfigError as error:
            problems[str(error)] = None  # what several lengths lack is said once
    if problems:
        raise config_error("\n".join(problems))
    tables = {task: {"test": pa.Table.from_pylist(rows)} for task, rows in made.items()}
    source = f"made by lt2, seed {seed}" + (f", from {origin}" if origin else "")
    before, revision = packs.held(pack), packs.Origin("2", "see the sources")
    manifest = packs.add(pack, tables, dict.fromkeys(tables, source), origin=revision, tokenizer=loaded)
    for task, rows in made.items():
        typer.echo(f"{task:<24} {len(rows)} samples{_replaced(before.get(task), manifest['tasks'][task])}")


@pack_app.command("verify")
def pack_verify(pack: PackArgument) -> None:
    """Compare every file of a pack with its manifest. Exit code 2 if one differs."""
    from lt2_platform.evaluate.harness.tasks import packs

    problems = packs.verify(pack)
    if problems:
        raise config_error("\n".join(problems))
    typer.echo(f"{pack}: {len(packs.read_manifest(pack)['tasks'])} tasks, all files as recorded")
