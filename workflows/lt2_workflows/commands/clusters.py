"""`lt2 cluster`: render a cluster's files from its settings, check files offline."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from lt2_workflows.commands.overview import Group

cluster = typer.Typer(cls=Group, help="Files that bring up a Ray cluster.", no_args_is_help=True, rich_markup_mode=None)


@cluster.command()
def render(
    settings: Annotated[
        str, typer.Argument(metavar="SETTINGS", help="Settings file; start from platform/clusters/settings.yaml.")
    ],
    out: Annotated[Path | None, typer.Option("--out", help="[default: the folder of SETTINGS]")] = None,
) -> None:
    """Write a cluster's files from its settings.

    These are KubeRay manifests, the autoscaler's file, a Slurm script, a Dockerfile and Grafana dashboards.
    """
    from lt2_workflows.cluster.check import check_file
    from lt2_workflows.cluster.render import render as render_all
    from lt2_workflows.cluster.settings import read_settings

    files = render_all(read_settings(settings))
    folder = out or Path(settings).parent
    folder.mkdir(parents=True, exist_ok=True)
    for name, text in files.items():
        (folder / name).write_text(text)
        typer.echo(folder / name)
    for name in ("raycluster.yaml", "rayjob.yaml", "autoscaler.yaml"):
        check_file(str(folder / name))


@cluster.command()
def check(files: Annotated[list[str], typer.Argument(metavar="FILE...")]) -> None:
    """Check RayCluster, RayJob and `ray up` files by their schemas. Needs no cluster."""
    from lt2.config import ConfigError
    from lt2_workflows.cluster.check import check_file

    for file in files:
        if not Path(file).is_file():
            raise ConfigError(f"{file} does not exist")
        check_file(file)
        typer.echo(f"{file}: valid")
