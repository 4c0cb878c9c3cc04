"""Training data from a packed dataset: a deterministic endless order with one integer as its position.

The sequence at a global position depends on (seed, manifest) only: position p is the (p mod n)-th sequence of epoch
p // n. Step s of global batch G takes positions [s·G, (s+1)·G) and rank r its contiguous share of them, so a run can
stop at any position and go on with any number of ranks: nothing is repeated, nothing is skipped.
"""

from __future__ import annotations

import functools
import hashlib
import queue
import threading
from collections import OrderedDict
from collections.abc import Iterator, Sequence
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq

from lt2.config import ConfigError
from lt2_platform.data.manifest import MANIFEST, SCHEMA_VERSION
from lt2_platform.data.units import ROW_GROUP
from lt2_platform.remake import remaking
from lt2_platform.storage import Storage
from lt2_platform.storage_errors import is_of_the_store
from lt2_platform.wording import one_line

WINDOW_BLOCKS = 64  # sequences are shuffled among 64 blocks of 64, which themselves come from anywhere in the corpus
CACHE_BYTES = 512 * 2**20
OPEN_FILES = 128
_DTYPES = {"tokens": np.int64, "doc_ids": np.int32, "loss_mask": np.bool_}  # as handed out
_BYTES = {"tokens": 4, "doc_ids": 4, "loss_mask": 1}  # as cached


def order(seed: int, epoch: int, n: int, start: int = 0, stop: int | None = None) -> np.ndarray:
    """Entries [start, stop) of epoch `epoch`'s permutation of range(n), int64; a pure function of its arguments.

    Up to 4,096 sequences it is a plain shuffle. Beyond, blocks of 64 consecutive sequences (one parquet row group) are
    shuffled over the whole corpus and then sequences within every 64 blocks, so that a reader touches each
    row group about once per epoch.
    """
    stop = n if stop is None else stop
    blocks, offsets = _block_order(seed, epoch, n)
    parts = [np.empty(0, dtype=np.int64)]
    for window in range(*_windows_of(offsets, start, stop)):
        chosen = blocks[window * WINDOW_BLOCKS : (window + 1) * WINDOW_BLOCKS]
        inside = (chosen[:, None] * ROW_GROUP + np.arange(ROW_GROUP)).reshape(-1)
        inside = inside[inside < n]
        inside = inside[shuffled(len(inside), seed, epoch, window + 1)]
        first = int(offsets[window])
        parts.append(inside[max(start - first, 0) : stop - first])
    return np.concatenate(parts)


@functools.lru_cache(maxsize=4)  # asked for at every step
def _block_order(seed: int, epoch: int, n: int) -> tuple[np.ndarray, np.ndarray]:
    """(blocks in shuffled order, offset of every window of them and the end); the corpus's last block may be short."""
    blocks = shuffled(-(-n // ROW_GROUP), seed, epoch, 0)
    sizes = np.where(blocks == len(blocks) - 1, n - (len(blocks) - 1) * ROW_GROUP, ROW_GROUP)
    ends = np.cumsum(sizes)[WINDOW_BLOCKS - 1 :: WINDOW_BLOCKS]
    whole = len(blocks) % WINDOW_BLOCKS == 0
    return blocks, np.concatenate([[0], ends, [] if whole else [n]]).astype(np.int64)


def _windows_of(offsets: np.ndarray, start: int, stop: int) -> tuple[int, int]:
    if start >= stop:
        return 0, 0
    return int(np.searchsorted(offsets, start, "right")) - 1, int(np.searchsorted(offsets, stop, "left"))


def shuffled(n: int, *key: int) -> np.ndarray:
    """A permutation of range(n) from the integers `key`; ours, because NumPy may change its generators' streams."""
    state = np.uint64(0)
    with np.errstate(over="ignore"):
        for part in key:
            state = _splitmix64(np.array([state ^ np.uint64(part % 2**64)], dtype=np.uint64))[0]
        draws = _splitmix64(state + np.arange(n, dtype=np.uint64) * np.uint64(0x9E3779B97F4A7C15))
    return np.argsort(draws, kind="stable")


def _splitmix64(x: np.ndarray) -> np.ndarray:
    # Steele, Lea & Flood, "Fast splittable pseudorandom number generators" (2014): the output mix.
    x = x + np.uint64(0x9E3779B97F4A7C15)
    x = (x ^ (x >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
    x = (x ^ (x >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    return x ^ (x >> np.uint64(31))


def indices_at(seed: int, n: int, start: int, stop: int) -> np.ndarray:
    """Sequence numbers at global positions [start, stop), across epoch ends, int64."""
    parts = []
    while start < stop:
        epoch, first = divmod(start, n)
        last = min(n, first + stop - start)
        parts.append(order(seed, epoch, n, first, last))
        start += last - first
    return np.concatenate(parts) if parts else np.empty(0, dtype=np.int64)


class PackedDataset:
    """One split of a folder written by `prepare`, read by row group with a bounded cache. Not for sharing by threads.

    Raises ConfigError if `uri` holds no finished dataset of this version or no such split.
    """

    def __init__(self, uri: str, split: str = "train", *, cache_bytes: int = CACHE_BYTES):
        self.storage = Storage(uri)
        self.split = split
        self.manifest = load_manifest(uri)
        if split not in self.manifest["splits"]:
            raise ConfigError(f"dataset {uri} has no split '{split}'; use {' or '.join(self.manifest['splits'])}")
        if self.manifest["splits"][split]["sequences"] is None:
            raise ConfigError(f"dataset {uri} has no packed {split} split: it is tokenised while training")
        files = self.manifest["splits"][split]["files"]
        self.paths: list[str] = [file["path"] for file in files]
        self.n_sequences: int = self.manifest["splits"][split]["sequences"]
        self.uri = self.storage.root
        self.columns = ("tokens", "doc_ids", *(["loss_mask"] if self.manifest.get("loss_mask") else []))
        self.vocab_size: int = self.manifest["tokenizer"]["vocab_size"]
        self.seq_len: int = self.manifest["seq_len"]
        self._firsts = np.cumsum([0, *(file["sequences"] for file in files)])
        self._open: OrderedDict[int, pq.ParquetFile] = OrderedDict()
        self._groups: OrderedDict[tuple[int, int], dict[str, np.ndarray]] = OrderedDict()
        group_bytes = ROW_GROUP * (self.seq_len + 1) * sum(_BYTES[name] for name in self.columns)
        self._max_groups = max(1, cache_bytes // group_bytes)

    def batch(self, indices: Sequence[int] | np.ndarray) -> dict[str, np.ndarray]:
        """Sequences by number: tokens int64 and doc_ids int32, both (B, seq_len + 1), and ids int64 (B,).

        doc_ids counts documents within a row from 0; -1 marks padding (validation's last row only). Where a source
        excludes tokens from the loss, loss_mask bool (B, seq_len + 1) is true on those that are learned.
        """
        ids = np.asarray(indices, dtype=np.int64)
        outside = ids[(ids < 0) | (ids >= self.n_sequences)]
        if len(outside):
            raise IndexError(f"sequence {outside[0]} of {self.n_sequences} in {self.storage.root}/{self.split}")
        files = np.searchsorted(self._firsts, ids, side="right") - 1
        rows = ids - self._firsts[files]
        width = self.seq_len + 1
        found = {name: np.empty((len(ids), width), dtype=_DTYPES[name]) for name in self.columns}
        for place, (file, row) in enumerate(zip(files.tolist(), rows.tolist(), strict=True)):
            group = self._group(file, row // ROW_GROUP)
            for name, values in group.items():
                found[name][place] = values[row % ROW_GROUP]
        return {**found, "ids": ids}

    def batches(
        self,
        *,
        position: int,
        global_batch_size: int,
        rank: int = 0,
        world_size: int = 1,
        seed: int = 0,
        prefetch: int = 2,
    ) -> Iterator[dict[str, np.ndarray]]:
        """This rank's share of every global batch from `position` (sequences consumed by all ranks), without end.

        `prefetch` batches are read ahead by a thread (0: none), which ends when the iterator is closed or collected.
        """
        check_not_empty(self)
        first, last = share_of(global_batch_size, rank, world_size)
        return read_ahead(self._own_batches(position, global_batch_size, first, last, seed), prefetch)

    def _own_batches(self, position: int, size: int, first: int, last: int, seed: int) -> Iterator[dict]:
        while True:
            yield self.batch(indices_at(seed, self.n_sequences, position + first, position + last))
            position += size

    def _group(self, file: int, group: int) -> dict[str, np.ndarray]:
        key = (file, group)
        if key in self._groups:
            self._groups.move_to_end(key)
            return self._groups[key]
        try:
            table = self._parquet(file).read_row_group(group, columns=list(self.columns))
        except (OSError, pa.ArrowException) as error:
            if is_of_the_store(error):
                raise
            raise self._damaged(file, one_line(error)) from error
        width = self.seq_len + 1
        self._groups[key] = {
            name: table[name].combine_chunks().flatten().to_numpy(zero_copy_only=False).reshape(-1, width)
            for name in self.columns
        }
        if len(self._groups) > self._max_groups:
            self._groups.popitem(last=False)
        return self._groups[key]

    def _parquet(self, file: int) -> pq.ParquetFile:
        if file in self._open:
            self._open.move_to_end(file)
            return self._open[file]
        fs, path = self.storage.arrow_fs(self.paths[file])
        opened = pq.ParquetFile(path, filesystem=fs, page_checksum_verification=True)
        expected = int(self._firsts[file + 1] - self._firsts[file])
        if opened.metadata.num_rows != expected:
            raise self._damaged(file, f"{opened.metadata.num_rows:,} rows, the manifest says {expected:,}")
        self._open[file] = opened
        if len(self._open) > OPEN_FILES:
            self._open.popitem(last=False)[1].close()
        return opened

    def _damaged(self, file: int, what: str) -> ConfigError:
        path = self.storage.join(self.paths[file])
        advice = remaking(self.storage.root, "delete the dataset and prepare it again")
        return ConfigError(f"{path} is damaged ({what}); {advice}")

    def verify(self) -> None:
        """Read every shard of the split and compare its sha256 with the manifest's; ConfigError names a bad one."""
        for index, file in enumerate(self.manifest["splits"][self.split]["files"]):
            try:
                content = self.storage.read_bytes(file["path"])
            except FileNotFoundError as error:
                raise self._damaged(index, "the file is missing") from error
            if hashlib.sha256(content).hexdigest() != file["sha256"]:
                raise self._damaged(index, "its sha256 is not the manifest's")


def check_not_empty(dataset: PackedDataset) -> None:
    """Raise ConfigError for a split without sequences."""
    if not dataset.n_sequences:
        raise ConfigError(f"dataset {dataset.storage.root} has no {dataset.split} sequence; prepare more text")


def share_of(global_batch_size: int, rank: int, world_size: int) -> tuple[int, int]:
    """Which entries of every global batch are this rank's: [first, last) = [G·r/W, G·(r+1)/W).

    Raises ConfigError for more workers than sequences in a batch.
    """
    if world_size > global_batch_size:
        raise ConfigError(f"global_batch_size {global_batch_size} is smaller than {world_size} workers; raise it")
    return global_batch_size * rank // world_size, global_batch_size * (rank + 1) // world_size


def load_manifest(uri: str) -> dict[str, Any]:
    """The manifest of a finished dataset. Raises ConfigError if there is none or it is of another version."""
    storage = Storage(uri)
    try:
        manifest = storage.read_json(MANIFEST)
    except (FileNotFoundError, NotADirectoryError) as error:
        otherwise = "run prepare with this folder as out, or give a dataset (steps/NAME-…/out under the storage)"
        advice = remaking(uri, otherwise, made_by=("prepare",))
        if storage.exists(f"out/{MANIFEST}"):
            advice = f"give {storage.join('out')}"
        raise ConfigError(f"{uri} is not a finished dataset (no {MANIFEST}); {advice}") from error
    except ValueError as error:
        advice = remaking(uri, "prepare it again in another folder")
        raise ConfigError(f"{storage.join(MANIFEST)} is damaged (no JSON: {error}); {advice}") from error
    if manifest.get("schema_version") != SCHEMA_VERSION:
        found = manifest.get("schema_version")
        advice = remaking(uri, "prepare it again")
        raise ConfigError(f"dataset {uri} has schema version {found}, this LT2 reads {SCHEMA_VERSION}; {advice}")
    return manifest


_END = object()


def read_ahead(source: Iterator[Any], depth: int) -> Iterator[Any]:
    """`source`, produced up to `depth` (0: none) items ahead by a thread; its exceptions are raised here, in place."""
    if not depth:
        return source
    items: queue.Queue[tuple[Any, BaseException | None]] = queue.Queue(maxsize=depth)
    stopped = threading.Event()

    def put(item: tuple[Any, BaseException | None]) -> bool:
        while not stopped.is_set():
            try:
                items.put(item, timeout=0.1)
                return True
            except queue.Full:
                continue
        return False

    def produce() -> None:
        try:
            for item in source:
                if not put((item, None)):
                    return
            put((_END, None))
        except BaseException as error:  # also a panic of the tokenizer, which is no Exception: the consumer would wait
            put((_END, error))

    def consume() -> Iterator[Any]:
        thread = threading.Thread(target=produce, name="lt2-read-ahead", daemon=True)
        thread.start()
        try:
            while True:
                item, error = items.get()
                if error is not None:
                    raise error
                if item is _END:
                    return
                yield item
        finally:
            stopped.set()
            thread.join()
            if (close := getattr(source, "close", None)) is not None:
                close()

    return consume()
