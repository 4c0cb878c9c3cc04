"""The training order read by Ray Data: tasks of the cluster read ahead of each worker, in exactly the planned order.

The order is `stream.order`'s, so position, resume and batches are those of `PackedDataset.batches`, bit for bit. A
task reads one chunk of this rank's share: consecutive steps, about one shuffle window of them, so that a row group is
decoded about once. Chunks are stateless; one whose process or node dies is read again.
"""

from __future__ import annotations

import functools
import pickle
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import numpy as np

from lt2_platform.data.stream import WINDOW_BLOCKS, PackedDataset, check_not_empty, indices_at, read_ahead, share_of
from lt2_platform.data.units import ROW_GROUP
from lt2_platform.failures import as_value

CHUNK_BYTES = 32 * 2**20
SEGMENT = 256  # chunks of one execution: planning all of a long run at once would take seconds
TASKS = 2  # chunks being read at once, per rank


@dataclass(frozen=True)
class Share:
    """One rank's part of the order: batches of `size` from `position`, of which it takes entries [first, last)."""

    uri: str
    fingerprint: str | None  # of the dataset: processes that read remember what they read
    seed: int
    n_sequences: int
    position: int
    size: int
    first: int
    last: int
    chunk: int  # steps per chunk

    def indices(self, step: int, steps: int) -> np.ndarray:
        """Sequence numbers of `steps` batches from the `step`-th one on."""
        starts = range(self.position + step * self.size, self.position + (step + steps) * self.size, self.size)
        parts = [indices_at(self.seed, self.n_sequences, at + self.first, at + self.last) for at in starts]
        return np.concatenate(parts)


def ray_batches(
    dataset: PackedDataset,
    *,
    position: int,
    global_batch_size: int,
    limit: int,
    rank: int = 0,
    world_size: int = 1,
    seed: int = 0,
    prefetch: int = 2,
) -> Iterator[dict[str, np.ndarray]]:
    """The next `limit` batches that `dataset.batches` would give, read by tasks of the running Ray.

    Two tasks a rank read ahead; `prefetch` batches lie ready in this process (0: none). The tasks ask for no CPU:
    workers that hold all of them would otherwise wait for ever for data that no task may read.
    """
    check_not_empty(dataset)
    first, last = share_of(global_batch_size, rank, world_size)
    step_bytes = (last - first) * (dataset.seq_len + 1) * 8
    steps = max(1, min(WINDOW_BLOCKS * ROW_GROUP // global_batch_size, CHUNK_BYTES // step_bytes, limit))
    share = Share(
        dataset.uri,
        dataset.manifest.get("fingerprint"),
        seed,
        dataset.n_sequences,
        position,
        global_batch_size,
        first,
        last,
        steps,
    )
    return read_ahead(_batches(share, limit, steps * step_bytes), prefetch)


def _batches(share: Share, limit: int, chunk_bytes: int) -> Iterator[dict[str, np.ndarray]]:
    rows = share.last - share.first
    chunks = -(-limit // share.chunk)
    left = limit
    for begin in range(0, chunks, SEGMENT):
        for block in _blocks(share, begin, min(begin + SEGMENT, chunks), chunk_bytes):
            if "error" in block:
                raise pickle.loads(block["error"][0])
            for at in range(0, min(len(block["ids"]), left * rows), rows):
                batch = {name: values[at : at + rows] for name, values in block.items()}
                # A copy: the block is memory that tasks share and nobody may write to.
                yield {name: values.astype(_HANDED.get(name, values.dtype)) for name, values in batch.items()}
            left -= share.chunk


_HANDED = {"tokens": np.int64}  # travels as int32


def _blocks(share: Share, begin: int, end: int, chunk_bytes: int) -> Iterator[Any]:
    import ray.data
    from ray.data import ExecutionResources

    from lt2_platform.data.spread import quiet

    with quiet():
        # Not ray.data.range: its own read tasks would each ask for a CPU.
        numbers = [{"chunk": number} for number in range(begin, end)]
        data = ray.data.from_items(numbers, override_num_blocks=len(numbers))
        data.context.enable_progress_bars = False
        data.context.execution_options.preserve_order = True
        data.context.op_resource_reservation_enabled = False
        # Every rank runs an execution of its own, and each would otherwise think that the object store is all its.
        data.context.execution_options.resource_limits = ExecutionResources(object_store_memory=4 * TASKS * chunk_bytes)
        read: Any = functools.partial(_read, share)
        data = data.map_batches(
            read,
            batch_size=None,
            num_cpus=0,
            compute=ray.data.TaskPoolStrategy(size=min(TASKS, end - begin)),
            zero_copy_batch=True,
        )
        yield from data.iter_batches(batch_size=None, prefetch_batches=1)


@functools.lru_cache(maxsize=2)  # a process that reads chunk after chunk keeps its row groups
def _dataset(uri: str, fingerprint: str | None) -> PackedDataset:
    return PackedDataset(uri)


def _read(share: Share, chunk: dict[str, np.ndarray]) -> dict[str, Any]:
    (number,) = chunk["chunk"]
    try:
        found = _dataset(share.uri, share.fingerprint).batch(share.indices(int(number) * share.chunk, share.chunk))
    except Exception as error:  # noqa: BLE001  raised again by the worker
        return {"error": np.array([pickle.dumps(as_value(error))], dtype=object)}
    return {**found, "tokens": found["tokens"].astype(np.int32)}
