"""Arguments and options that several commands take, and the checks of what was given. Imports nothing heavy."""

from __future__ import annotations

from typing import Annotated, get_args

import typer

CheckpointArgument = Annotated[
    str, typer.Argument(metavar="CHECKPOINT", help="A checkpoint, its folder, or a run's name.")
]
StorageOption = Annotated[
    str | None,
    typer.Option(
        "--storage", metavar="ROOT", help="Folder or s3://bucket/prefix. [default: $LT2_STORAGE or ./lt2-storage]"
    ),
]
JsonOption = Annotated[bool, typer.Option("--json", help="Print JSON.")]
AskedByOption = Annotated[
    str | None,
    typer.Option("--template", help="As --chat, with this template: chatml, llama3 or plain.", show_default=False),
]


def check_template(name: str | None) -> None:
    """Raise ConfigError if --template names none of ours."""
    from lt2_platform.data.sources.configs import Template

    if name is not None and name not in get_args(Template):
        raise config_error(f"--template {name}: choose one of {', '.join(get_args(Template))}")


def chosen_device(asked: str | None) -> str:
    """What --device says, by default cuda where there is one. Raises ConfigError for one that is not here."""
    from lt2_platform.machine.devices import this_device

    where = asked or this_device()
    if where not in ("cuda", "cpu") or (where == "cuda" and this_device() == "cpu"):
        raise config_error(f"--device {where}: " + ("no GPU here" if where == "cuda" else "choose cuda or cpu"))
    return where


def config_error(message: str) -> Exception:
    from lt2.extension import ConfigError  # brings pydantic, which --help can do without

    return ConfigError(message)
