"""`lt2 --help`: commands by what they are for, each with its whole first sentence."""

from __future__ import annotations

import inspect
from typing import Any

from typer.core import TyperGroup

SECTIONS = {
    "Workflows": (
        "recipes",
        "plan",
        "run",
        "sweep",
        "step",
        "status",
        "results",
        "note",
        "report",
        "space",
        "delete",
        "copy",
        "dashboard",
        "doctor",
    ),  # fmt: skip
    "Models": ("generate", "checkpoints", "export", "diagnose", "positions", "check-mixer", "bench"),
    "Evaluation": ("eval", "pack", "compare", "paper-table"),
    "Clusters": ("submit", "logs", "cancel", "resume", "cluster"),
}


class Overview(TyperGroup):
    def list_commands(self, ctx: Any) -> list[str]:
        return [name for names in SECTIONS.values() for name in names]

    def format_commands(self, ctx: Any, formatter: Any) -> None:
        width = max(map(len, self.list_commands(ctx)))
        for title, names in SECTIONS.items():
            with formatter.section(title):
                formatter.write_dl([(f"{name:<{width}}", first_sentence(self.commands[name].help)) for name in names])


class Group(TyperGroup):
    """The commands of a group, in the same way."""

    def format_commands(self, ctx: Any, formatter: Any) -> None:
        with formatter.section("Commands"):
            formatter.write_dl([(name, first_sentence(self.commands[name].help)) for name in self.list_commands(ctx)])


def first_sentence(help_: str | None) -> str:
    text = " ".join(inspect.cleandoc(help_ or "").split("\n\n")[0].split())
    return text.split(". ")[0].rstrip(".")
