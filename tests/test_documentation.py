"""README and docs say what the code does: commands parse, settings exist, links, files and flags are there."""

from __future__ import annotations

import re
import shlex
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import typer
import typer.core

from lt2_workflows.cli import app
from lt2_workflows.commands.sweeps import sweep_workflow
from lt2_workflows.loading import load_workflow

ROOT = Path(__file__).resolve().parent.parent
PAGES = [ROOT / "README.md", ROOT / "CONTRIBUTING.md", *sorted((ROOT / "docs").glob("*.md"))]
BLOCK = re.compile(r"^```(\w*)\n(.*?)^```$", re.MULTILINE | re.DOTALL)
LINK = re.compile(r"\[[^\]]*\]\(([^)#\s]+)(#[^)\s]*)?\)")
CODE_PATH = re.compile(r"`((?:lt2|platform|workflows|dashboards|tests|benchmarks|scripts|examples|docs)/[\w./]*\w)`")


def blocks(page: Path, language: str) -> Iterator[str]:
    for found, text in BLOCK.findall(page.read_text()):
        if found == language:
            yield text


def commands(text: str) -> Iterator[list[str]]:
    """The words after `lt2` of every such line; `[--option]` is taken as given, `a|b` as two commands."""
    for line in text.replace("\\\n", " ").splitlines():
        line = line.removeprefix(".venv/bin/")
        if not line.startswith("lt2 "):
            continue
        first, *words = shlex.split(re.sub(r" \[(--[^\]]*)\]", r" \1", line), comments=True)[1:]
        for command in first.split("|"):
            yield [command, *words]


def documented_commands() -> list[tuple[str, list[str]]]:
    found = [(page.name, words) for page in PAGES for text in blocks(page, "") for words in commands(text)]
    return list({tuple(words): (page, words) for page, words in reversed(found)}.values())


def parse(words: list[str]) -> dict[str, Any]:
    """Values by parameter. Raises the usage error that the command would."""
    command: Any = typer.main.get_command(app)
    context = typer.Context(command, info_name="lt2")
    while isinstance(command, typer.core.TyperGroup):
        name, command, words = command.resolve_command(context, words)
        context = typer.Context(command, info_name=name, parent=context)
    return command.make_context(command.name, words).params


def short(part: str | list[str]) -> str:
    return part if isinstance(part, str) else " ".join(part)[:60]


def test_documented_commands_are_found():
    found = {words[0] for _, words in documented_commands()}
    missing = {"plan", "run", "sweep", "submit", "resume", "eval", "pack", "export", "generate", "compare"} - found
    assert not missing, "this file no longer reads the pages as they are written"


@pytest.mark.parametrize(("page", "words"), documented_commands(), ids=short)
def test_a_documented_command_parses(page, words, monkeypatch):
    monkeypatch.setenv("RAY_API_SERVER_ADDRESS", "http://head:8265")  # as docs/clusters.md says to
    parse(words)


@pytest.fixture(scope="module")
def readers_folder(tmp_path_factory):
    """A folder with the files that a reader of the pages has written: the ones that the pages print."""
    folder = tmp_path_factory.mktemp("reader")
    extending = list(blocks(ROOT / "docs" / "extending.md", "python"))
    for name in ("scaled", "articles", "copying"):
        (text,) = [text for text in extending if f'type: Literal["{name}"]' in text]
        (folder / f"{name}.py").write_text(text)
    (recipe,) = blocks(ROOT / "docs" / "recipes.md", "python")
    (folder / "mine.py").write_text(recipe)
    mixer = (ROOT / "examples" / "deltaproduct.py").read_text()
    (folder / "my_mixer.py").write_text(mixer.replace('"deltaproduct"', '"mine"'))
    (folder / "examples").symlink_to(ROOT / "examples")
    return folder


CONFIGURED = [
    (page, words)
    for page, words in documented_commands()
    if words[0] in ("plan", "run", "step", "sweep", "submit", "recipes") and words[1:] and "…" not in words[1]
]


@pytest.mark.parametrize(("page", "words"), CONFIGURED, ids=short)
def test_documented_settings_exist(page, words, readers_folder, monkeypatch):
    monkeypatch.setenv("RAY_API_SERVER_ADDRESS", "http://head:8265")
    monkeypatch.chdir(readers_folder)
    given = parse(words)
    if words[0] == "sweep":
        sweep_workflow(given["name"], given["set_"] or [], given["grid"] or [], given["seeds"], {})
    else:
        load_workflow(given["recipe"], given.get("set_") or [])


@pytest.mark.parametrize("page", [*PAGES, ROOT / "LOG.md", ROOT / "CHANGELOG.md"], ids=lambda page: page.name)
def test_links_lead_somewhere(page):
    text = page.read_text()
    targets = [target for target, _ in LINK.findall(text) if "://" not in target and not target.startswith("mailto:")]
    missing = [target for target in targets if not (page.parent / target).exists()]
    assert not missing


def anchors(page: Path) -> set[str]:
    """Of its headings, as GitHub makes them."""
    headings = re.findall(r"^#+ (.*)$", BLOCK.sub("", page.read_text()), re.MULTILINE)
    return {"#" + re.sub(r"[^\w\- ]", "", heading.lower()).replace(" ", "-") for heading in headings}


def test_anchors_of_links_are_headings():
    found = [
        (page, target, anchor)
        for page in [*PAGES, ROOT / "CHANGELOG.md"]
        for target, anchor in re.findall(r"\[[^\]]*\]\(([^)#\s:]*)(#[^)\s]+)\)", page.read_text())
    ]
    assert len(found) > 5, "this file no longer reads the pages as they are written"
    wrong = [
        (page.name, target + anchor)
        for page, target, anchor in found
        if anchor not in anchors(page.parent / target if target else page)
    ]
    assert not wrong


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_files_that_are_named_exist(page):
    named = CODE_PATH.findall(page.read_text())
    assert not [path for path in named if not (ROOT / path).exists()]


SCRIPT = re.compile(r"\b((?:scripts|benchmarks)/\w+(?:\.py)?)([^\n`#]*)")


def test_flags_of_scripts_exist():
    asked = set()
    for page in PAGES:
        for script, rest in SCRIPT.findall(page.read_text().replace("\\\n", " ")):
            asked |= {(script, flag) for flag in re.findall(r"(?<!\S)--[a-z][\w-]*", rest)}
    assert ("scripts/train_torchrun.py", "--start-from") in asked, "this file no longer reads the pages as they are"
    unknown = {(script, flag) for script, flag in asked if f'"{flag}"' not in (ROOT / script).read_text()}
    assert not unknown - {("scripts/train_torchrun.py", "--help")}
