"""torch.distributed.checkpoint over our Storage, hashing every file while it is written."""

from __future__ import annotations

import hashlib
import io
import os
import warnings
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import fsspec
import torch
import torch.distributed as dist
from torch.distributed.checkpoint._fsspec_filesystem import FileSystem, FsspecReader, FsspecWriter
from torch.distributed.checkpoint.api import CheckpointException
from torch.distributed.checkpoint.staging import DefaultStager, StagingOptions
from torch.distributed.checkpoint.state_dict_loader import load
from torch.distributed.checkpoint.state_dict_saver import save

from lt2_platform.storage import Storage, check_fence
from lt2_platform.storage_errors import STORAGE_ERRORS


class StorageRefusedError(OSError):
    """Storage did not take a checkpoint on some rank; raised on all of them."""


class _HashingStream(io.RawIOBase):
    """Passes writes on and keeps their count and sha256; the file never has to be read back.

    `refused` is what storage raised, whatever the writer above makes of it.
    """

    def __init__(self, raw: Any):
        self.raw, self.digest, self.size = raw, hashlib.sha256(), 0
        self.refused: Exception | None = None

    def writable(self) -> bool:
        return True

    def write(self, data: Any) -> int:
        with self._noting():
            self.raw.write(data)
        view = memoryview(data)
        self.digest.update(view)
        self.size += view.nbytes
        return view.nbytes

    def tell(self) -> int:
        return self.size

    def flush(self) -> None:
        with self._noting():
            self.raw.flush()

    @contextmanager
    def _noting(self) -> Iterator[None]:
        try:
            yield
        except STORAGE_ERRORS as error:
            self.refused = error
            raise

    def fileno(self) -> int:
        return self.raw.fileno()


class HashingFileSystem(FileSystem):
    """DCP's view of an fsspec filesystem; `written` maps file names to {"bytes", "sha256"}."""

    def __init__(self, fs: fsspec.AbstractFileSystem):
        super().__init__()
        self.fs = fs
        self.written: dict[str, dict[str, Any]] = {}

    @contextmanager
    def create_stream(self, path: str | os.PathLike, mode: str) -> Iterator[Any]:
        with super().create_stream(path, mode) as raw:
            if "r" in mode:
                yield raw
                return
            check_fence()
            stream = _HashingStream(raw)
            try:
                yield stream
            except Exception as error:
                if stream.refused is None or error is stream.refused:
                    raise
                raise stream.refused from error  # torch.save's zip file ends in a RuntimeError of its own
        self.written[os.path.basename(path)] = {"bytes": stream.size, "sha256": stream.digest.hexdigest()}

    def rename(self, path: str | os.PathLike, new_path: str | os.PathLike) -> None:
        check_fence()
        super().rename(path, new_path)
        self.written[os.path.basename(new_path)] = self.written.pop(os.path.basename(path))


def stage(stager: DefaultStager, tensors: dict[str, Any]) -> dict[str, Any]:
    """A copy of `tensors` in main memory, in buffers that the stager uses again. Returns when it is made."""
    return stager.stage(tensors)  # type: ignore[return-value]  a future only where staging is asynchronous


def new_stager() -> DefaultStager:
    """Makes copies in main memory, pinned where there is a GPU."""
    cuda = torch.cuda.is_available()
    return DefaultStager(StagingOptions(use_pinned_memory=cuda, use_shared_memory=False, use_async_staging=False,
                                        use_non_blocking_copy=cuda))  # fmt: skip


def save_shards(
    tensors: dict[str, Any], storage: Storage, name: str, group: dist.ProcessGroup | None = None
) -> dict[str, dict[str, Any]]:
    """Write this rank's part of `tensors` to `<storage>/<name>`; {its file: {"bytes", "sha256"}}. Collective.

    Raises StorageRefusedError on every rank when any of them could not write.
    """
    path = storage.join(name)
    # On S3 there is no file to fsync, and DCP's fallback is os.sync(): every disk of the machine.
    sink = FsspecWriter(path, sync_files=not path.startswith("s3://"))
    sink.fs = files = HashingFileSystem(storage.fs)
    try:
        with _one_process_is_fine():
            save(tensors, storage_writer=sink, process_group=group)
    except CheckpointException as error:
        causes = {rank: cause for rank, (cause, _) in error.failures.items()}
        if not all(isinstance(cause, STORAGE_ERRORS) for cause in causes.values()):
            raise _cause(error)  # noqa: B904  it has a cause of its own
        raise StorageRefusedError("; ".join(f"rank {rank}: {cause}" for rank, cause in causes.items())) from error
    return files.written


def load_shards(tensors: dict[str, Any], storage: Storage, *, alone: bool = False) -> None:
    """Fill `tensors` in place from the checkpoint at the storage's root. Collective unless `alone`."""
    try:
        with _one_process_is_fine():
            load(tensors, storage_reader=_reader(storage), no_dist=alone)
    except CheckpointException as error:
        raise _cause(error)  # noqa: B904  it has a cause of its own


def _cause(error: CheckpointException) -> BaseException:
    """One rank's error, to raise in place of `error`, which is no Exception; of storage only if all ranks' are.

    Raise it without `from`: its own `__cause__` is what the S3 server said.
    """
    causes = [cause for cause, _ in error.failures.values()]
    return next((cause for cause in causes if not isinstance(cause, STORAGE_ERRORS)), causes[0])


def saved_names(storage: Storage) -> set[str]:
    """Names of the tensors in the checkpoint at the storage's root."""
    return set(_reader(storage).read_metadata().state_dict_metadata)


def _reader(storage: Storage) -> FsspecReader:
    source = FsspecReader(storage.root)
    source.fs = HashingFileSystem(storage.fs)
    return source


@contextmanager
def _one_process_is_fine() -> Iterator[None]:
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", message="torch.distributed is disabled")
        yield
