"""One place that reads and writes: a folder or an S3 bucket behind the same dozen functions.

Every path is relative to the root (a full path that starts with the root, as `join` returns it, is accepted
too). Writes are atomic: a reader sees the old bytes, the new bytes or nothing, never a part. Nothing is cached, so two
processes agree on what exists.
"""

from __future__ import annotations

import json
import os
import tempfile
import uuid
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from glob import escape
from typing import IO, Any

import fsspec

from lt2.config import ConfigError
from lt2_platform.fence import FENCE, OvertakenError
from lt2_platform.local_files import on_disk, remove, sizes, temporary_beside
from lt2_platform.s3_keys import S3, delete_keys, has_key, put_if_absent
from lt2_platform.storage_errors import CHOOSE, STORAGE_ERRORS, notes_root, noting, refusal, telling_if_slow

ARROW_ATTEMPTS = 8


def default_root() -> str:
    """The storage root when none is given: $LT2_STORAGE, else ./lt2-storage."""
    return os.environ.get("LT2_STORAGE") or "./lt2-storage"


def absolute(uri: str) -> str:
    """`uri` in the form every worker understands: `s3://…` unchanged, anything else an absolute local path."""
    if uri.startswith(S3):
        if not uri[len(S3) :].partition("/")[0]:
            raise ConfigError(f"{uri} names no bucket; give s3://bucket/prefix")
        return S3 + uri[len(S3) :].rstrip("/")
    if "://" in uri and not uri.startswith("file://"):
        raise ConfigError(f"{uri}: unsupported storage scheme; use a local path or s3://bucket/prefix")
    return os.path.abspath(os.path.expanduser(uri.removeprefix("file://")))


def filesystem(uri: str) -> Any:
    """The fsspec filesystem that holds `uri`; S3 reads its endpoint and keys from the usual AWS_* variables."""
    if not uri.startswith(S3):
        return fsspec.filesystem("file")
    endpoint = _endpoint()
    return fsspec.filesystem("s3", endpoint_url=endpoint, use_listings_cache=False)


def arrow_filesystem(uri: str) -> tuple[Any, str]:
    """(pyarrow filesystem, path inside it) for `uri`, with the same endpoint rules as `filesystem`."""
    from pyarrow import fs

    uri = absolute(uri)
    if not uri.startswith(S3):
        return fs.LocalFileSystem(), uri
    endpoint = _endpoint()
    region = os.environ.get("AWS_REGION") or os.environ.get("AWS_DEFAULT_REGION")
    # Its own three attempts are over in a second; a store that is away comes back later than that.
    options: dict[str, Any] = {"retry_strategy": fs.AwsStandardS3RetryStrategy(max_attempts=ARROW_ATTEMPTS)}
    if endpoint:
        options["endpoint_override"] = endpoint
    if region or endpoint:
        options["region"] = region or "us-east-1"
    return fs.S3FileSystem(**options), uri[len(S3) :]


def _endpoint() -> str | None:
    """$AWS_ENDPOINT_URL, if it is set. Raises ConfigError for what is no URL: a host alone is easily given."""
    endpoint = os.environ.get("AWS_ENDPOINT_URL")
    if not endpoint:
        return None
    if not endpoint.startswith(("http://", "https://")):
        raise ConfigError(f"AWS_ENDPOINT_URL is {endpoint!r}; give http://host:port or https://host:port")
    # Newer AWS SDKs (botocore and the C++ one inside pyarrow) send checksum trailers that many S3 servers reject.
    os.environ.setdefault("AWS_REQUEST_CHECKSUM_CALCULATION", "when_required")
    os.environ.setdefault("AWS_RESPONSE_CHECKSUM_VALIDATION", "when_required")
    return endpoint


def check_fence() -> None:
    """Raise OvertakenError if another process has taken over. Called last before anything becomes visible, since a
    process may be stopped for hours between any two lines, and knows nothing of it when it goes on.
    """
    fence = os.environ.get(FENCE)
    if fence and Storage(os.path.dirname(fence)).is_file(os.path.basename(fence)):
        raise OvertakenError(f"another process took over ({fence}); this one writes no more")


@dataclass(frozen=True, init=False)
class Storage:
    """Files under one root, local or `s3://bucket/prefix`. Cheap to build, compare and pickle.

    Missing files raise FileNotFoundError from the reading functions; other failures are the filesystem's own OSError,
    with a note of the root. Writing and deleting raise OvertakenError behind the fence (`check_fence`).
    """

    root: str

    def __init__(self, root: str | None = None):
        if root is not None and not root.strip():
            raise ConfigError("the storage root is empty; give a folder or s3://bucket/prefix, or leave --storage out")
        object.__setattr__(self, "root", absolute(default_root() if root is None else root))

    @property
    def fs(self) -> Any:
        """The fsspec filesystem of the root, for what has no method here."""
        return filesystem(self.root)

    def join(self, *parts: str) -> str:
        """The full path (or URI) of a path under the root; parts may already be full."""
        path = "/".join(part.strip("/") if index else part.rstrip("/") for index, part in enumerate(parts) if part)
        is_full = path == self.root or path.startswith(self.root.rstrip("/") + "/")
        inside = path[len(self.root) :] if is_full else path
        if ".." in inside.split("/") or (path.startswith(("/", S3)) and not is_full):
            raise ValueError(f"{path} is outside the storage root {self.root}")
        if is_full or not path:
            return path or self.root
        return f"{self.root.rstrip('/')}/{path}"

    def relative(self, full: str) -> str:
        """The inverse of `join`: the path under the root ('' for the root itself)."""
        return self.join(full)[len(self.root) :].lstrip("/")

    # Reading

    @notes_root
    def exists(self, path: str = "") -> bool:
        """True for a file or a non-empty folder."""
        return self.fs.exists(self.join(path))

    @notes_root
    def is_file(self, path: str) -> bool:
        """True for a file; one request, where `exists` takes two to say no."""
        full = self.join(path)
        return has_key(self.fs, full) if full.startswith(S3) else os.path.isfile(full)

    @notes_root
    def read_bytes(self, path: str) -> bytes:
        return self.fs.cat_file(self.join(path))

    def read_json(self, path: str) -> Any:
        return json.loads(self.read_bytes(path))

    @notes_root
    def open(self, path: str) -> IO[bytes]:
        """A seekable binary file for reading (write with `write_bytes` or `writer`)."""
        return self.fs.open(self.join(path), "rb")

    @notes_root
    def list(self, path: str = "") -> list[str]:
        """Sorted names (not paths) of the files and folders directly inside `path`; [] if there is no such folder.

        Hidden ones are left out: of ours they are half-written, others are left by file systems (.nfs…, .DS_Store).
        """
        full = self.join(path)
        try:
            found = self.fs.ls(full, detail=False)
        except (FileNotFoundError, NotADirectoryError):
            return []
        names = {name.rstrip("/").rsplit("/", 1)[-1] for name in found if name.rstrip("/") != full.removeprefix(S3)}
        return sorted(name for name in names if not name.startswith("."))

    @notes_root
    def glob(self, pattern: str) -> list[str]:
        """Sorted paths, relative to the root, that match `pattern` (`*`, `**`, `?`)."""
        prefix = self.root.removeprefix(S3).rstrip("/") + "/"
        # Only `pattern` has wildcards: a root may be called "exp[1]".
        full = escape(self.root) + self.join(pattern).removeprefix(self.root)
        found = (str(name).removeprefix(prefix) for name in self.fs.glob(full))
        return sorted(name for name in found if not name.rsplit("/", 1)[-1].startswith(".tmp-"))

    @notes_root
    def sizes(self, path: str = "") -> dict[str, int]:
        """Bytes of every file under `path`, by its path relative to the root; {} if there is no such folder."""
        full = self.join(path)
        if not full.startswith(S3):
            return {self.relative(name): size for name, size in sizes(full).items()}
        return {self.relative(S3 + name): info["size"] for name, info in self.fs.find(full, detail=True).items()}

    def arrow_fs(self, path: str = "") -> tuple[Any, str]:
        """(pyarrow filesystem, path inside it), for parquet readers and Ray Data."""
        return arrow_filesystem(self.join(path))

    # Writing

    @notes_root
    def write_bytes(self, path: str, data: bytes) -> None:
        """Replace `path` atomically, creating its folders."""
        full = self.join(path)
        if full.startswith(S3):  # without a temporary file: records are written also while the disk here is full
            check_fence()
            self.fs.pipe_file(full, data)
            return
        with self.writer(path) as file:
            file.write(data)

    def write_json(self, path: str, value: Any) -> None:
        self.write_bytes(path, _json_bytes(value))

    @contextmanager
    def writer(self, path: str) -> Iterator[IO[bytes]]:
        """A binary file that becomes `path` when the block ends, and disappears if the block raises."""
        with noting(self.root), self._writing(self.join(path)) as file:
            yield file

    @contextmanager
    def _writing(self, full: str) -> Iterator[IO[bytes]]:
        if full.startswith(S3):
            # Not `fs.open(…, "wb")`: closing an S3 file after an exception publishes the part written so far.
            with tempfile.NamedTemporaryFile() as file:
                yield file
                file.flush()
                check_fence()
                self.fs.put_file(file.name, full)
            return
        with temporary_beside(full) as temporary:
            with on_disk(temporary) as file:
                yield file
            check_fence()
            os.replace(temporary, full)

    @notes_root
    def create_exclusive(self, path: str, data: bytes) -> bool:
        """Create `path` with `data` unless it exists; True for exactly one of any number of concurrent callers."""
        full = self.join(path)
        if full.startswith(S3):
            check_fence()
            return put_if_absent(self.fs, full, data)
        with temporary_beside(full) as temporary:
            with on_disk(temporary) as file:
                file.write(data)
            check_fence()
            try:
                os.link(temporary, full)
                return True
            except FileExistsError:
                # NFS sends a request again whose answer was lost, and then meets the link it made itself.
                return os.stat(temporary).st_nlink > 1

    @notes_root
    def delete(self, path: str) -> None:
        """Remove a file, a link or a whole folder; a missing one is fine. The root itself is refused."""
        full = self.join(path)
        if full == self.root:
            raise ValueError(f"refusing to delete the storage root {self.root}")
        check_fence()
        if full.startswith(S3):
            delete_keys(self.fs, full)
            return
        remove(full)

    # Looking before work begins

    def check_readable(self, *, new: bool = False) -> None:
        """See that the root is there and can be listed. new: a local folder may come later. Raises ConfigError."""
        try:
            if self.root.startswith(S3):
                bucket, _, prefix = self.root[len(S3) :].partition("/")
                with telling_if_slow(self.root):
                    self.fs.call_s3("list_objects_v2", Bucket=bucket, Prefix=prefix, MaxKeys=1)
            elif os.path.exists(self.root):
                os.scandir(self.root).close()
            elif not new:
                raise ConfigError(f"folder {self.root} does not exist; {CHOOSE}")
        except STORAGE_ERRORS as error:
            raise refusal(self.root, "read", error) from error

    def check_writable(self) -> None:
        """Write and remove a probe file, so that a bad root fails before any work. Raises ConfigError."""
        probe = f".tmp-probe-{uuid.uuid4().hex}"
        try:
            self.write_bytes(probe, b"")
            self.delete(probe)
        except STORAGE_ERRORS as error:
            raise refusal(self.root, "written", error) from error


def _json_bytes(value: Any) -> bytes:
    text = json.dumps(value, indent=2, ensure_ascii=False, sort_keys=True) + "\n"
    return text.encode(errors="backslashreplace")  # lone surrogates, of names that are no UTF-8: as JSON escapes them
