"""`lt2 doctor`: whether this machine, a store and a cluster do what LT2 needs, before a run finds out."""

from __future__ import annotations

import logging
import os
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from dataclasses import asdict
from typing import TYPE_CHECKING, Annotated

import typer

from lt2_workflows.commands.options import JsonOption, StorageOption

if TYPE_CHECKING:
    from lt2_platform.doctor.finding import Finding
    from lt2_platform.storage import Storage


def doctor(
    storage: StorageOption = None,
    kernels: Annotated[
        bool,
        typer.Option("--kernels", help="Also run every mixer and compare it with fp64; takes minutes on a new card."),
    ] = False,
    mixers: Annotated[
        str | None, typer.Option(metavar="TYPE,TYPE", help="As --kernels, for these. [default: all]")
    ] = None,
    json_: JsonOption = False,
) -> None:
    """Check whether this machine, the storage and Ray meet LT2's needs. Exit code 1 if not.

    With RAY_ADDRESS set, every node of that cluster is checked; otherwise a local Ray is started and stopped.
    """
    from lt2.config import ConfigError, mixer_types
    from lt2_platform.storage import Storage
    from lt2_workflows.console import as_json

    only = [] if mixers is None else [name.strip() for name in mixers.split(",")]
    for name in only:
        if name not in mixer_types():
            raise ConfigError(f"--mixers: no mixer {name!r}; choose from {', '.join(mixer_types())}")
    found: list[Finding] = []
    with removed_if_new(Storage(storage)) as root:
        for finding in look(root, run_kernels=kernels or bool(only), mixers=only):
            if not json_:
                if not found or found[-1].part != finding.part:
                    typer.echo(finding.part)
                typer.echo(f"  {finding.state:<8} {finding.name:<20} {finding.said}")
            found.append(finding)
    problems = sum(finding.state == "PROBLEM" for finding in found)
    if json_:
        typer.echo(as_json([asdict(finding) for finding in found]))
    elif problems:
        typer.echo(f"{problems} problem{'s' if problems != 1 else ''}")
    else:
        typer.echo("no problems found")
    raise typer.Exit(1 if problems else 0)


@contextmanager
def removed_if_new(storage: Storage) -> Iterator[Storage]:
    """Remove the store's folder afterwards if it did not exist before the checks."""
    new = "://" not in storage.root and not os.path.exists(storage.root)
    yield storage
    if new:
        with suppress(OSError):  # somebody uses it by now
            os.rmdir(storage.root)


def look(storage: Storage, *, run_kernels: bool, mixers: list[str]) -> Iterator[Finding]:
    import torch

    from lt2_platform.doctor import kernels, machine, software, store
    from lt2_platform.machine.devices import this_device

    device = torch.device(this_device())
    yield from software.software()
    yield from machine.machine()
    yield from kernels.chosen(device)
    if run_kernels:
        yield from kernels.run(device, mixers)
    usable = True
    for finding in store.store(storage):
        usable = usable and finding.state != "PROBLEM"
        yield finding
    if usable:
        yield from ray_works(storage)


def ray_works(storage: Storage) -> Iterator[Finding]:
    from lt2_platform.doctor import cluster
    from lt2_platform.doctor.finding import Finding
    from lt2_platform.machine.cores import usable
    from lt2_workflows.engine.local_ray import NoRayError, connect, leave_ray, ray_head, unanswered

    address = os.environ.get("RAY_ADDRESS")
    if address and (silent := unanswered(address)):
        yield Finding(cluster.PART, "cluster", "PROBLEM", silent)
        return
    started = time.perf_counter()
    try:
        if address:
            connect(address, log_to_driver=False, logging_level=logging.WARNING)
            yield Finding(cluster.PART, "cluster", "ok", f"connected to {address}")
            yield from cluster.nodes(storage)
            leave_ray()
            return
        with ray_head(usable()):
            seconds = time.perf_counter() - started
            yield Finding(cluster.PART, "local Ray", "ok", f"started in {seconds:.0f} s; RAY_ADDRESS names no cluster")
            yield from cluster.nodes(storage)
    except NoRayError as error:
        yield Finding(cluster.PART, "cluster" if address else "local Ray", "PROBLEM", str(error))
