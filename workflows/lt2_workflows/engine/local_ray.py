"""One Ray per driver: started here, joined by the attempts, left before a lease is released."""

from __future__ import annotations

import json
import logging
import os
import secrets
import shutil
import signal
import socket
import sys
import tempfile
import time
from collections.abc import Iterator, Mapping
from contextlib import contextmanager, suppress
from functools import partial
from pathlib import Path
from typing import Any

from lt2_platform.machine.cores import usable
from lt2_platform.signals import kept
from lt2_platform.step_records import died_here, this_process
from lt2_platform.wording import one_line

PREFIX, OWNER = "lt2-ray-", "owner.json"
WATCHER = "RAY_TRAIN_ENABLE_PREEMPTION_WATCHER"
POLLS = "RAY_TRAIN_HEALTH_CHECK_INTERVAL_S"
PRESTART = "RAY_prestart_worker_first_driver"
STARTS = 3
ANSWER_SECONDS = 5.0

log = logging.getLogger(__name__)


class NoRayError(ConnectionError):
    """Ray did not start, or does not answer. Like any lost connection, nothing that a step has done wrong."""


@contextmanager
def ray_head(num_cpus: int, *, log_to_driver: bool = False) -> Iterator[dict[str, str]]:
    """Start a Ray on this machine for the duration; yields the environment in which other processes find it.

    One for all steps, so that branches running side by side share the machine's CPUs instead of each taking all.
    """
    _sweep()
    folder = Path(tempfile.mkdtemp(prefix=PREFIX))
    (folder / OWNER).write_text(json.dumps(this_process()))
    # Ray listens on every interface. A token of this run's own, since one in the home folder would be adopted silently
    # by some processes and not by others.
    token = folder / "token"
    token.touch(mode=0o600)
    token.write_text(secrets.token_hex(32))
    ours = {} if "RAY_AUTH_MODE" in os.environ else {"RAY_AUTH_MODE": "token", "RAY_AUTH_TOKEN_PATH": str(token)}
    # Nobody announces that the only machine will go: no process of every training need ask for it.
    ours |= {} if WATCHER in os.environ else {WATCHER: "0"}
    # Ray Train looks every two seconds for what few workers report, and each of them waits for it to end.
    ours |= {} if POLLS in os.environ else {POLLS: "0.5"}
    # Ray starts a worker per CPU with its first driver, us, who need none; attempts' own begin when they are needed.
    ours |= {} if PRESTART in os.environ else {PRESTART: "0"}
    try:
        with environment_variables(ours):  # whoever starts another Ray in this process has no such token
            import ray

            _read_token_again()
            try:
                options = {"log_to_driver": log_to_driver, "logging_level": logging.WARNING, "_temp_dir": str(folder)}
                _start(num_cpus=num_cpus, **options)
                yield dict(os.environ) | {"RAY_ADDRESS": ray.get_runtime_context().gcs_address}
            finally:
                _stop()
    finally:
        if ours and "ray._raylet" in sys.modules:
            _read_token_again()
        shutil.rmtree(folder, ignore_errors=True)


@contextmanager
def environment_variables(variables: Mapping[str, str]) -> Iterator[None]:
    """Set these variables of this process for the duration."""
    before = {name: os.environ.get(name) for name in variables}
    os.environ.update(variables)
    try:
        yield
    finally:
        for name, value in before.items():
            if value is None:
                os.environ.pop(name, None)
            else:
                os.environ[name] = value


def _read_token_again() -> None:
    """Ray reads these variables once, when it is imported, which a recipe's own file may have done before."""
    # As Ray's own tests do; there is no public way.
    from ray._raylet import AuthenticationTokenLoader, Config  # pyright: ignore[reportAttributeAccessIssue]

    Config.initialize("")
    AuthenticationTokenLoader.instance().reset_cache()


def _start(**options: Any) -> None:
    """Start a Ray of this process and connect to it. On a busy machine Ray gives up after half a minute; it is then
    started anew, since nobody else knows of it yet.
    """
    import ray

    for left in reversed(range(STARTS)):
        try:
            # Ray's handler would end the process with its leases unreleased.
            with kept(signal.SIGTERM), _out_of_our_group():
                ray.init(address="local", include_dashboard=False, **options)
            return
        except Exception as error:  # whatever our fixed options run into; Ray has no class for it
            _stop()
            if not left:
                raise NoRayError(
                    f"Ray did not start on this machine, tried {STARTS} times ({_said(error)}); stop what else keeps "
                    "it busy, check free memory, disk and process limits, and run the same command again"
                ) from error
            log.warning("Ray did not start (%s); starting it again", _said(error))


@contextmanager
def _out_of_our_group() -> Iterator[None]:
    """While the block runs, Ray's processes start in sessions of their own. A signal to our process group (`timeout`, a
    scheduler, kill -- -PGID) then is for us alone, who save before we stop them. However we end, the kernel ends them.
    """
    from ray._private import services  # there is no public way

    popen = services.ConsolePopen
    services.ConsolePopen = partial(popen, start_new_session=True)  # pyright: ignore[reportAttributeAccessIssue]
    try:
        yield
    finally:
        services.ConsolePopen = popen


def unanswered(address: str) -> str:
    """Why nothing is at host:port, for which Ray itself would wait a quarter of an hour; empty if something is, and for
    addresses of other kinds ("auto")."""
    host, _, port = address.removeprefix("ray://").rpartition(":")
    if not port.isdigit():
        return ""
    try:
        socket.create_connection((host.strip("[]"), int(port)), ANSWER_SECONDS).close()
        return ""
    except OSError as error:
        return f"nothing answers at RAY_ADDRESS={address} ({error}); correct it, or unset it to start a local Ray"


def connect(address: str, **options: Any) -> None:
    """Join the Ray at `address`, for which Ray waits a quarter of an hour."""
    import ray

    try:
        with kept(signal.SIGTERM):
            ray.init(address=address, include_dashboard=False, **options)
    except Exception as error:  # as above
        raise NoRayError(f"no Ray answers at {address} ({_said(error)}); check that it still runs there") from error


def _stop() -> None:
    """Leave Ray, and end what a start that broke off has left: Ray forgets it, but it would live as long as we do."""
    import psutil  # Ray brings it along
    import ray

    ray.shutdown()
    place = os.path.dirname(ray.__file__)
    for child in psutil.Process().children():
        with suppress(psutil.Error):  # it has just ended
            if any(part.startswith(place) for part in child.cmdline()):
                child.kill()
                child.wait(5)


def _said(error: Exception) -> str:
    """Ray's message, without the traceback that it may end with."""
    text = one_line(error).partition("Last connection error")[0].strip()
    return f"{text or type(error).__name__}"[:400]


def _sweep() -> None:
    """Remove the session folders of drivers that were killed; logs and spilled objects can be large."""
    for folder in Path(tempfile.gettempdir()).glob(f"{PREFIX}*"):
        with suppress(OSError, ValueError):  # another user's, or one that is just being made
            if died_here(json.loads((folder / OWNER).read_text())):
                shutil.rmtree(folder, ignore_errors=True)


def join_ray() -> Mapping[str, float]:
    """Connect this process to the driver's Ray (or cluster), with its workers' output in our log; its resources."""
    import ray

    address = os.environ.get("RAY_ADDRESS")
    if not ray.is_initialized():
        if address:
            connect(address, log_to_driver=True)
        else:
            _start(log_to_driver=True)
    return ray.cluster_resources()


@contextmanager
def ray_for(workers: int) -> Iterator[None]:
    """Connected, for the duration, to the Ray at $RAY_ADDRESS, or to one of this process with CPUs for `workers`; what
    they log is shown here."""
    address = os.environ.get("RAY_ADDRESS")
    if not address:
        with ray_head(max(usable(), workers), log_to_driver=True):
            yield
        return
    if silent := unanswered(address):
        raise NoRayError(silent)
    connect(address, log_to_driver=True, logging_level=logging.WARNING)
    try:
        yield
    finally:
        leave_ray()


def leave_ray() -> None:
    """Disconnect from Ray, which ends our actors, and give them the moment they need before others may start."""
    if "ray" not in sys.modules:
        return
    import ray

    if ray.is_initialized():
        ray.shutdown()
        time.sleep(1.0)
