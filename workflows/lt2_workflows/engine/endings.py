"""How an attempt at a step ends: when it is told to, by which exit code of its process, and what a failure says."""

from __future__ import annotations

import signal
from collections.abc import Iterator

from lt2.config import ConfigError
from lt2_platform.storage_errors import complaint, is_away
from lt2_platform.wording import first_of

AT_ONCE = signal.SIGUSR1
"""What the driver sends when it has waited long enough for a step that saves before it stops, or may not wait."""

DONE, FAILED, BAD_INPUT, BUSY, INTERRUPTED, INFRASTRUCTURE = 0, 1, 2, 3, 4, 75
STATES = {
    DONE: "done",
    FAILED: "failed",
    BAD_INPUT: "failed",
    INTERRUPTED: "interrupted",
    INFRASTRUCTURE: "infrastructure",
}

# By name, so that a step that never touches Ray does not import it to classify its error.
INFRASTRUCTURE_ERRORS = {
    "ActorDiedError", "ActorUnavailableError", "ActorUnschedulableError", "LocalRayletDiedError", "NodeDiedError",
    "ObjectLostError", "OutOfMemoryError", "OwnerDiedError", "PreemptionError", "RaySystemError", "RpcError",
    "TaskUnschedulableError", "WorkerCrashedError", "WorkerGroupStartupFailedError", "WorkerGroupStartupTimeoutError",
    "WorkerHealthCheckFailedError", "WorkerHealthCheckTimeoutError",
}  # fmt: skip


def said(failure: BaseException, code: int) -> str:
    """The one line that the user is told about a failure."""
    causes = list(_causes(failure))
    if code == BAD_INPUT:
        # The innermost: Ray's wrapper is a ConfigError too, but its message is a traceback.
        return str([error for error in causes if _is_mistake(error)][-1])
    told = next(filter(None, map(complaint, causes)), None)  # of a store: which one, why, and what to do
    if told is not None:
        return str(told)
    # A group of workers says pieces of their tracebacks, which are in the log whole.
    ranks = [getattr(error, "_base_exc", error) for error in (getattr(failure, "worker_failures", None) or {}).values()]
    return first_of([*dict.fromkeys(f"{type(error).__name__}: {error}" for error in ranks or [failure])], 2)


def classify(failure: BaseException) -> int:
    """BAD_INPUT for a user's mistake, INFRASTRUCTURE for a lost worker, node or connection, else FAILED.

    Training that diverges has gone back as often as it may: with the same settings another attempt does the same.
    """
    causes = list(_causes(failure))
    if any(_is_mistake(error) for error in causes):
        return BAD_INPUT
    return INFRASTRUCTURE if any(_is_infrastructure(error) for error in causes) else FAILED


def _is_mistake(error: BaseException) -> bool:
    # By name: its module imports torch, which an attempt need not.
    return isinstance(error, ConfigError) or type(error).__name__ == "NonFiniteLossError"


def _is_infrastructure(error: BaseException) -> bool:
    if isinstance(error, ConnectionError) or is_away(error):
        return True
    # The module too: torch has an OutOfMemoryError of its own, which a retry does not cure.
    return type(error).__module__.partition(".")[0] == "ray" and type(error).__name__ in INFRASTRUCTURE_ERRORS


def _causes(failure: BaseException) -> Iterator[BaseException]:
    """`failure` and what it was raised from, inside Ray's and Ray Train's wrappers too."""
    pending, seen = [failure], set()
    while pending:
        error = pending.pop()
        if not isinstance(error, BaseException) or id(error) in seen:
            continue
        seen.add(id(error))
        yield error
        wrapped = [getattr(error, name, None) for name in ("__cause__", "cause", "controller_failure", "_base_exc")]
        pending += [*wrapped, *(getattr(error, "worker_failures", None) or {}).values()]
