"""One Ray per driver: started here, joined by the attempts, left before a lease is released."""

from __future__ import annotations

import json
import logging
import os
import secrets
import shutil
import signal
import sys
import tempfile
import time
from collections.abc import Iterator, Mapping
from contextlib import contextmanager, suppress
from pathlib import Path

from lt2_platform.signals import kept
from lt2_platform.step_records import died_here, this_process

PREFIX, OWNER = "lt2-ray-", "owner.json"


@contextmanager
def ray_head(num_cpus: int) -> Iterator[dict[str, str]]:
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
    if "RAY_AUTH_MODE" not in os.environ:
        # Before Ray is imported: it reads them once.
        os.environ.update({"RAY_AUTH_MODE": "token", "RAY_AUTH_TOKEN_PATH": str(token)})
    import ray

    with kept(signal.SIGTERM):  # Ray's handler ends the process with its leases unreleased
        ray.init(
            address="local",
            num_cpus=num_cpus,
            include_dashboard=False,
            log_to_driver=False,
            logging_level=logging.WARNING,
            _temp_dir=str(folder),
        )
    try:
        yield dict(os.environ) | {"RAY_ADDRESS": ray.get_runtime_context().gcs_address}
    finally:
        ray.shutdown()
        shutil.rmtree(folder, ignore_errors=True)


def _sweep() -> None:
    """Remove the session folders of drivers that were killed; logs and spilled objects can be large."""
    for folder in Path(tempfile.gettempdir()).glob(f"{PREFIX}*"):
        with suppress(OSError, ValueError):  # another user's, or one that is just being made
            if died_here(json.loads((folder / OWNER).read_text())):
                shutil.rmtree(folder, ignore_errors=True)


def join_ray() -> Mapping[str, float]:
    """Connect this process to the driver's Ray (or cluster), with its workers' output in our log; its resources."""
    import ray

    if not ray.is_initialized():
        with kept(signal.SIGTERM):
            ray.init(address=os.environ.get("RAY_ADDRESS", "local"), log_to_driver=True, include_dashboard=False)
    return ray.cluster_resources()


def leave_ray() -> None:
    """Disconnect from Ray, which ends our actors, and give them the moment they need before others may start."""
    if "ray" not in sys.modules:
        return
    import ray

    if ray.is_initialized():
        ray.shutdown()
        time.sleep(1.0)
