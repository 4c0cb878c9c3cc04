"""What storage answers when it fails, as one line for the person who named the root."""

from __future__ import annotations

import errno
import logging
import re
import tempfile
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import wraps
from typing import Any, TypeVar

from botocore.exceptions import BotoCoreError, ClientError, NoCredentialsError, ParamValidationError, ProfileNotFound

from lt2.config import ConfigError
from lt2_platform.wording import one_line

STORAGE_ERRORS = (OSError, BotoCoreError, ClientError)

PATIENCE_SECONDS = 900.0  # as checkpoints wait for storage (train.save_patience_s)
LONGEST_PAUSE_SECONDS = 60.0
# Then whoever waits is told what for: the S3 client itself gives up after minutes, and says nothing.
SLOW_SECONDS = 20.0

CHOOSE = "choose another with --storage or LT2_STORAGE"
_NOTE = "storage root: "
_KEYS = "AWS_ACCESS_KEY_ID and AWS_SECRET_ACCESS_KEY"
# A mistake of ours, not a state of the store: these keep their traceback.
_BUGS = (FileNotFoundError, FileExistsError, IsADirectoryError)
# Names of what says so (`is_away`).
_CLIENTS = ("botocore", "aiohttp", "fsspec")
_AWAY = {
    "EndpointConnectionError", "ConnectionClosedError", "ConnectTimeoutError", "ReadTimeoutError",
    "ResponseStreamingError", "IncompleteReadError", "ClientPayloadError", "FSTimeoutError",
}  # fmt: skip
# Arrow has a text only: "… AWS Error SLOW_DOWN during …", "… AWS Error UNKNOWN (HTTP status 503) during …".
_ARROW = re.compile(r"AWS Error (?P<name>\w+)(?: \(HTTP status (?P<status>\d+)\))? during")
_AWAY_ARROW = {
    "NETWORK_CONNECTION", "INTERNAL_FAILURE", "SERVICE_UNAVAILABLE", "SLOW_DOWN", "THROTTLING", "REQUEST_TIMEOUT",
}  # fmt: skip

Method = TypeVar("Method", bound=Callable[..., Any])
Answer = TypeVar("Answer")

log = logging.getLogger(__name__)


def patiently(ask: Callable[[], Answer], stop: threading.Event | None = None) -> Answer:
    """What `ask` answers, for whoever leads work that others are at: its end would be theirs.

    A store that refuses (the S3 client has asked it five times by then) is asked again after 1, 2, 4, … at most 60
    seconds, until PATIENCE_SECONDS have passed or `stop` is set; then its refusal is raised. That a file is not there
    is raised at once. `ask` may be called again after it did a part of its work.
    """
    began, pause, stop = time.monotonic(), min(1.0, LONGEST_PAUSE_SECONDS), stop or threading.Event()
    while True:
        try:
            return ask()
        except _BUGS:
            raise
        except STORAGE_ERRORS as error:
            if stop.is_set() or time.monotonic() + pause - began > PATIENCE_SECONDS:
                raise
            log.warning("storage refused (%s); retrying in %.0f s", reason(error), pause)
        stop.wait(pause)
        pause = min(2 * pause, LONGEST_PAUSE_SECONDS)


@contextmanager
def noting(root: str) -> Iterator[None]:
    """Errors of storage that leave the block carry the root as a note: tracebacks show it, `complaint` reads it."""
    try:
        yield
    except STORAGE_ERRORS as error:
        if _root(error) is None:
            error.add_note(_NOTE + root)
        raise


@contextmanager
def telling_if_slow(root: str) -> Iterator[None]:
    """Logs a line if the block, which asks an S3 store at `root`, is not over after SLOW_SECONDS."""
    if not root.startswith("s3://"):
        yield
        return
    said = ("storage root %s: a request has taken %.0f s so far; still waiting", root, SLOW_SECONDS)
    timer = threading.Timer(SLOW_SECONDS, log.warning, said)
    timer.daemon = True
    timer.start()
    try:
        yield
    finally:
        timer.cancel()


def notes_root(method: Method) -> Method:
    """A decorator: the method runs inside `noting(self.root)` and `telling_if_slow(self.root)`."""

    @wraps(method)
    def noted(self: Any, *args: Any, **kwargs: Any) -> Any:
        with noting(self.root), telling_if_slow(self.root):
            return method(self, *args, **kwargs)

    return noted  # type: ignore[return-value]  the same signature


def complaint(error: BaseException) -> ConfigError | None:
    """The line that names the root and what to do; None for what is no failure of a store."""
    root = _root(error)
    if root is None or (isinstance(error, _BUGS) and _code(error) != "NoSuchBucket"):
        return None
    return refusal(root, "used", error)


def refusal(root: str, what: str, error: BaseException) -> ConfigError:
    """An error that says the root, what it cannot be (read, written, used), why, and what to set or do."""
    return ConfigError(f"storage root {root} cannot be {what} ({reason(error, root)}); {_advice(error, root)}")


def is_of_the_store(error: BaseException) -> bool:
    """Whether a read by arrow failed for the sake of the store or the machine (away, no permission, too many open
    files), which says nothing of the file's content. That it is not there does."""
    if not isinstance(error, OSError) or isinstance(error, FileNotFoundError):
        return False
    return error.errno is not None or "AWS Error" in str(error)  # what arrow decodes has no number


def is_away(error: BaseException) -> bool:
    """Whether S3 said that the trouble is its own (500, 503), or did not answer at all:
    what another attempt may well not meet. Of all three clients: s3fs, the botocore and aiohttp below it, and arrow.
    """
    if (status := http_status(error)) is not None:
        return status >= 500
    if (told := _ARROW.search(str(error))) and isinstance(error, OSError):
        return told["name"] in _AWAY_ARROW or int(told["status"] or 0) >= 500
    # By name: to import aiohttp costs every command a quarter of a second.
    return type(error).__module__.partition(".")[0] in _CLIENTS and type(error).__name__ in _AWAY


def out_of_reach(uri: str, error: BaseException) -> str:
    """The same of an input: its place, why it cannot be read, and what to set or do."""
    return f"{uri} cannot be read ({reason(error, uri)}); {_advice(error, uri, 'give another path')}"


def reason(error: BaseException, root: str = "") -> str:
    """Why the storage failed, in a few words."""
    bucket = root.removeprefix("s3://").partition("/")[0]
    if _code(error) == "NoSuchBucket":
        return f"there is no bucket {bucket}"
    if isinstance(error, ParamValidationError):
        return f"{bucket!r} is not a valid bucket name"
    if _is_full_here(error, root):
        return f"no space is left in {tempfile.gettempdir()}, where uploads are written first"
    if isinstance(error, NotADirectoryError | FileExistsError):
        return "a part of the path is a file"
    if code := _code(error):
        said = _answer(error).get("Message")  # a server need not send one
        return f"{code}: {said}" if said else code
    if isinstance(error, OSError) and error.strerror:
        return error.strerror
    return one_line(error) or type(error).__name__


def _is_full_here(error: BaseException, root: str) -> bool:
    return root.startswith("s3://") and isinstance(error, OSError) and error.errno == errno.ENOSPC


def _advice(error: BaseException, root: str, choose: str = CHOOSE) -> str:
    if _is_full_here(error, root):
        return "free some, or set TMPDIR to another disk"
    if isinstance(error, NoCredentialsError):
        return f"set {_KEYS}"
    if isinstance(error, ProfileNotFound):
        return "set AWS_PROFILE to an existing profile, or unset it"
    if _code(error) == "NoSuchBucket":
        return f"create it, or {choose}"
    if isinstance(error, ParamValidationError):
        return "give s3://bucket/prefix"
    if _code(error) is not None and isinstance(error, PermissionError):
        return f"check {_KEYS} and their rights to the bucket, or {choose}"
    if isinstance(error, BotoCoreError):
        return f"check AWS_ENDPOINT_URL and that its server answers, or {choose}"
    return choose


def _root(error: BaseException) -> str | None:
    notes = (note for note in getattr(error, "__notes__", ()) if note.startswith(_NOTE))
    return next((note.removeprefix(_NOTE) for note in notes), None)


def http_status(error: BaseException) -> int | None:
    """The HTTP status of the S3 server's answer; None where there was none."""
    return _response(error).get("ResponseMetadata", {}).get("HTTPStatusCode")


def _answer(error: BaseException) -> dict[str, Any]:
    """The part of the S3 server's answer that describes the error; empty where there was none."""
    return _response(error).get("Error", {})


def _response(error: BaseException) -> dict[str, Any]:
    """The S3 server's answer: botocore's error has it, which s3fs wraps in an OSError."""
    cause = error if isinstance(error, ClientError) else error.__cause__
    return dict(cause.response) if isinstance(cause, ClientError) else {}


def _code(error: BaseException) -> str | None:
    return _answer(error).get("Code")
