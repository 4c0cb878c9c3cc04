"""Workflows as Ray jobs: submit, follow, cancel. The job is `lt2 run`; everything durable stays in storage."""

from __future__ import annotations

import asyncio
import logging
import re
import shlex
import signal
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Any

from lt2.config import ConfigError
from lt2_workflows.engine.local_ray import environment_variables
from lt2_workflows.graph import Workflow
from lt2_workflows.job_package import RECORD, pack, refuse_secrets

if TYPE_CHECKING:
    from ray.job_submission import JobSubmissionClient

ATTEMPT = re.compile(r"(?P<workflow>.+)-attempt(?P<number>\d+)")
ADDRESS_VARIABLE = "RAY_API_SERVER_ADDRESS"
ENDED = {"SUCCEEDED", "FAILED", "STOPPED"}
STOPPED_CODE = 143  # as for a process that SIGTERM ended
LOST_S = 60.0
# What asking after a job raises when the cluster is away; the ConnectionError of `requests` is an OSError only.
NO_ANSWER = (OSError, RuntimeError)
# A line for each upload, and one for the end of each log.
TALKERS = (
    "ray.dashboard.modules.dashboard_sdk", "ray._private.runtime_env.packaging", "ray.dashboard.modules.job.sdk",
)  # fmt: skip


def connect(address: str) -> JobSubmissionClient:
    """A client of the cluster whose dashboard is at `address`, with the token of RAY_AUTH_MODE and RAY_AUTH_TOKEN_PATH.

    Raises ConfigError when it is not there or refuses us.
    """
    if not address.startswith(("http://", "https://")):
        raise ConfigError(f"--address {address}: give the URL of the cluster's dashboard, e.g. http://head:8265")
    from ray.exceptions import AuthenticationError
    from ray.job_submission import JobSubmissionClient

    for talker in TALKERS:
        logging.getLogger(talker).setLevel(logging.WARNING)
    try:
        # Ray's client goes where the environment says, whatever address it is given.
        with environment_variables({ADDRESS_VARIABLE: address}):  # of the two that it looks for this one comes first
            return JobSubmissionClient(address)
    except AuthenticationError:
        raise ConfigError(
            f"{address} rejects the token; set RAY_AUTH_MODE=token and RAY_AUTH_TOKEN_PATH to the cluster's token file"
        ) from None
    except (ConnectionError, RuntimeError) as error:
        said = next(iter(str(error).strip().splitlines()), type(error).__name__)
        raise ConfigError(f"no Ray answers at {address}: {said}") from None


def submit(client: JobSubmissionClient, workflow: Workflow, storage_root: str, python: str) -> str:
    """Start `lt2 run` of the resolved workflow on the cluster; returns the submission id, <workflow>-attempt<N>.

    `python` is the interpreter's absolute path on the head. Raises ConfigError when the workflow is running there, or
    something that looks like a secret would travel.
    """
    if not python.startswith("/"):
        raise ConfigError(f"--python {python}: give the absolute path of the interpreter on the cluster's head")
    if "@" in storage_root and "://" in storage_root:
        raise ConfigError("the storage root holds credentials; set them in the environment of the cluster's nodes")
    with tempfile.TemporaryDirectory(prefix="lt2-submit-") as folder:
        environment, known = pack(workflow, Path(folder))
        number = 1
        for job, status in attempts(client, known):
            if status not in ENDED:
                raise ConfigError(
                    f"{job} is {status.lower()}; `lt2 logs {job}` follows it, `lt2 cancel {job}` stops it"
                )
            number = attempt_number(job) + 1
        # PYTHONSAFEPATH reaches only processes that Ray starts for us; -P is the same for the first one.
        command = [python, "-P", "-m", "lt2_workflows.cli", "run", RECORD, "--storage", storage_root]
        job = {
            "entrypoint": f"exec {shlex.join(command)}",  # no shell between Ray's signals and the driver
            "submission_id": f"{known}-attempt{number}",
            "metadata": {"workflow": known, "name": workflow.name, "storage": storage_root},
        }
        refuse_secrets({"the job": str(job)})
        try:
            return client.submit_job(**job, runtime_env=environment)
        except RuntimeError as error:
            raise ConfigError(f"the cluster refused {job['submission_id']}: {_reason(error)}") from None


def attempts(client: JobSubmissionClient, workflow: str) -> list[tuple[str, str]]:
    """[(submission id, status)] of a workflow's jobs on this cluster, oldest first; by workflow id or name."""
    found = []
    for job in client.list_jobs():
        metadata = job.metadata or {}
        known = job.submission_id and ATTEMPT.fullmatch(job.submission_id)
        if known and workflow in (metadata.get("workflow"), metadata.get("name")):
            found.append((job.start_time or 0, job.submission_id, str(job.status.value)))
    return [(job, status) for _, job, status in sorted(found)]


def attempt_number(job: str) -> int:
    found = ATTEMPT.fullmatch(job)
    assert found is not None
    return int(found["number"])


def find_job(client: JobSubmissionClient, name: str) -> str:
    """The submission id that `name` (one, or a workflow's id or name: its newest) means. Raises ConfigError if none."""
    jobs = {job.submission_id for job in client.list_jobs()}
    if name in jobs:
        return name
    found = attempts(client, name)
    if not found:
        known = ", ".join(sorted(job for job in jobs if job)) or "none"
        raise ConfigError(f"no job of {name!r} on this cluster; its jobs: {known}")
    return found[-1][0]


def follow(client: JobSubmissionClient, job: str, write: Callable[[str], Any]) -> int:
    """Pass the job's log to `write` until it ends; its exit code (143 when it was cancelled).

    A lost connection is made again, where the log left off. Raises ConfigError when the cluster stays silent.
    """
    shown = 0
    heard = time.monotonic()
    while True:
        try:
            shown = asyncio.run(_tail(client, job, shown, write))
            info = client.get_job_info(job)
            heard = time.monotonic()
        except NO_ANSWER as error:
            if time.monotonic() - heard > LOST_S:
                elsewhere = _resuming(job, ", or, if it is gone, ", " on another cluster")
                raise ConfigError(
                    f"the cluster no longer answers ({_reason(error)}); {job} may still be running: "
                    f"`lt2 logs {job}` when it answers{elsewhere}"
                ) from None
            time.sleep(1.0)
            continue
        if info.status.value in ENDED:
            return _exit_code(job, info, write)
        time.sleep(0.5)


def cancel(client: JobSubmissionClient, job: str, timeout_s: float = 120.0) -> bool:
    """Stop the job and wait until all its processes are gone; False if it had ended. Its leases are released by then.

    Raises ConfigError when it does not end in time.
    """
    if not client.stop_job(job):
        return False
    deadline = time.monotonic() + timeout_s
    while True:
        try:
            if client.get_job_status(job).value in ENDED:
                return True
            known = "it is still running"
        except NO_ANSWER as error:
            known = f"the cluster no longer answers ({_reason(error)})"
        if time.monotonic() > deadline:
            raise ConfigError(f"{job} was asked to stop, but after {timeout_s:.0f} s {known}")
        time.sleep(0.2)


async def _tail(client: JobSubmissionClient, job: str, skip: int, write: Callable[[str], Any]) -> int:
    """Write the log from character `skip` on, for as long as the connection holds; how many characters there were."""
    from aiohttp import ClientError

    seen = 0
    try:
        async for text in client.tail_job_logs(job):
            write(text[max(0, skip - seen) :])
            seen += len(text)
    except (ClientError, RuntimeError, OSError):
        pass  # what it means is decided by the job's status
    return max(seen, skip)


def _exit_code(job: str, info: Any, write: Callable[[str], Any]) -> int:
    """The job's; what its log cannot say, since the process was given no time to, is said here."""
    if info.status.value == "STOPPED":
        return STOPPED_CODE
    code = info.driver_exit_code
    if code is None:  # it never started, or its node died
        write(f"{info.message}\n")
        return 1
    if code < 0:
        more = _resuming(job, "; ", " resumes from its last checkpoints")
        write(f"lt2: the process of {job} was killed by {signal.Signals(-code).name}{more}\n")
        return 128 - code
    return code


def _resuming(job: str, before: str, after: str) -> str:
    """The command that goes on with a job, between `before` and `after`; "" for a job that is not ours."""
    ours = ATTEMPT.fullmatch(job)
    return f"{before}`lt2 resume {ours['workflow']}`{after}" if ours else ""


def _reason(error: Exception) -> str:
    lines = [line for line in str(error).splitlines() if line.strip()]
    return lines[-1].strip() if lines else type(error).__name__
