from __future__ import annotations

import pytest
from typer.testing import CliRunner

from lt2_workflows.cli import app
from lt2_workflows.commands.overview import SECTIONS, first_sentence
from tests.workflows.test_cli import lt2


def test_help_shows_every_command_once_with_its_whole_first_sentence():
    shown = CliRunner().invoke(app, ["--help"]).output
    typer_names = {command.name or command.callback.__name__ for command in app.registered_commands if command.callback}
    groups = {group.name for group in app.registered_groups}
    assert sorted(name for names in SECTIONS.values() for name in names) == sorted(typer_names | groups)
    assert "..." not in shown.split("Options:")[1]
    assert all(f"{title}:" in shown for title in SECTIONS)


@pytest.mark.parametrize("group", ["pack", "cluster", "bench"])
def test_a_groups_commands_are_described_by_whole_sentences(group):
    shown = CliRunner().invoke(app, [group, "--help"]).output
    assert "..." not in shown.split("Commands:")[1]


@pytest.mark.parametrize(
    ("text", "first"),
    [("One.", "One"), ("One: a, b. Two.", "One: a, b"), ("One\n    goes on.\n\n    Two.", "One goes on"), (None, "")],
)
def test_first_sentence(text, first):
    assert first_sentence(text) == first


def test_the_dashboards_own_options_are_in_its_help():
    shown = lt2("dashboard", "--help")
    assert shown.returncode == 0
    assert "--port PORT" in shown.stdout
