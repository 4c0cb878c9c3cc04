"""A corpus that is tokenised while training: what a training worker opens, and the process that works beside it.

One process per worker makes half a million to two million tokens a second, more than a worker on a GPU learns from. It
needs no Ray, so the torchrun script runs it too. It never answers signals: whoever stops a job stops the worker first,
which still wants the batches up to its checkpoint; without a worker the process ends by itself.
"""

from __future__ import annotations

import json
import logging
import multiprocessing
import signal
from collections import OrderedDict
from collections.abc import Generator, Iterator
from multiprocessing.connection import Connection
from typing import Any

import numpy as np

from lt2.config import ConfigError
from lt2_platform.data.live.lanes import Cursor, Cursors, LivePlan, live_batches
from lt2_platform.data.live.on_the_fly import KEY, live_plan
from lt2_platform.data.prepare import PrepareConfig
from lt2_platform.data.stream import load_manifest, read_ahead, share_of
from lt2_platform.failures import portable
from lt2_platform.storage import Storage

log = logging.getLogger(__name__)

CURSORS = "cursors.json"
DEPTH = 8  # batches that lie ready: lanes that need new documents at the same step make that batch late
_REMEMBERED = 16


class LiveDataset:
    """The training split of a dataset prepared with tokenize "on_the_fly".

    `batches` is as PackedDataset's; what it has given so far is remembered by position, for `cursors`.
    Raises ConfigError if `uri` is not such a dataset.
    """

    def __init__(self, uri: str):
        self.manifest = load_manifest(uri)
        if KEY not in self.manifest:
            raise ConfigError(f"dataset {uri} has packed training shards; it is not tokenised on the fly")
        self.uri = Storage(uri).root
        self.seq_len: int = self.manifest["seq_len"]
        self._given: OrderedDict[int, dict[str, Cursor]] = OrderedDict()

    def batches(
        self,
        *,
        position: int,
        global_batch_size: int,
        rank: int = 0,
        world_size: int = 1,
        seed: int = 0,
        prefetch: int = DEPTH,
        cursors: bytes | None = None,
        quarantine: str | None = None,
    ) -> Generator[dict[str, np.ndarray], None, None]:
        """This rank's share of every global batch from `position`, without end. Close it to end its process.

        cursors: the file CURSORS of the checkpoint at `position`, unless that is 0.
        """
        first, last = share_of(global_batch_size, rank, world_size)
        saved = read_cursors(cursors, position, global_batch_size)
        own = {name: cursor for name, cursor in saved.items() if first <= int(name.split("/")[0]) < last}
        self._given = OrderedDict({position: {name: Cursor(*cursor) for name, cursor in own.items()}})
        config = PrepareConfig.model_validate(self.manifest["config"])
        plan = live_plan(self.uri, self.manifest, config, seed=seed, quarantine=quarantine)
        few = [len(units) for units in plan.units if len(units) < global_batch_size]
        if few and not position and not rank:
            log.warning(
                "the corpus has %d units for %d sequences in a batch: passes over it overlap; prepare it ahead instead",
                min(few), global_batch_size,
            )  # fmt: skip
        arguments = {
            "position": position,
            "global_batch_size": global_batch_size,
            "first": first,
            "last": last,
            "cursors": own,
        }
        made = read_ahead(_received(plan, arguments), max(1, prefetch))
        return self._remembering(made, position, global_batch_size)

    def _remembering(self, made: Any, position: int, size: int) -> Generator[dict[str, np.ndarray], None, None]:
        try:
            for batch, cursors in made:
                position += size
                self._given[position] = cursors
                if len(self._given) > _REMEMBERED:
                    self._given.popitem(last=False)
                yield batch
        finally:
            made.close()

    def cursors(self, position: int) -> dict[str, Cursor]:
        """Where this rank's lanes stand at `position`, which must be one of the last batches' ends."""
        return self._given[position]


def write_cursors(position: int, lanes: int, parts: list[dict[str, Cursor]]) -> bytes:
    """The contents of the file CURSORS: every rank's cursors at `position`."""
    merged = {name: list(cursor) for part in parts for name, cursor in part.items()}
    return json.dumps({"position": position, "lanes": lanes, "cursors": merged}, sort_keys=True).encode()


def read_cursors(content: bytes | None, position: int, lanes: int) -> Cursors:
    """The cursors at `position`. Raises ConfigError for a file that is missing or of another place or batch size."""
    if content is None:
        if position:
            raise ConfigError(f"the checkpoint has no {CURSORS}: its run read packed shards; use another output folder")
        return {}
    saved = json.loads(content)
    for name, expected in {"position": position, "lanes": lanes}.items():
        if saved[name] != expected:
            raise ConfigError(f"{CURSORS} is for {name} {saved[name]}, the run is at {expected}; damaged checkpoint")
    return saved["cursors"]


def _received(plan: LivePlan, arguments: dict[str, Any]) -> Iterator[Any]:
    # Not forked: this process may hold CUDA, Ray and their threads.
    context = multiprocessing.get_context("spawn")
    here, there = context.Pipe(duplex=False)
    process = context.Process(target=_produce, args=(there, plan, arguments), name="lt2-tokenise", daemon=True)
    process.start()
    there.close()
    try:
        while True:
            try:
                made, error = here.recv()
            except EOFError:
                process.join()
                raise RuntimeError(f"the tokenising process died (exit code {process.exitcode})") from None
            if error is not None:
                raise error
            yield made
    finally:
        here.close()
        process.kill()
        process.join()


def _produce(connection: Connection, plan: LivePlan, arguments: dict[str, Any]) -> None:
    for number in (signal.SIGINT, signal.SIGTERM):
        signal.signal(number, signal.SIG_IGN)
    try:
        for made in live_batches(plan, **arguments):
            connection.send((made, None))
    except BrokenPipeError:
        return  # the worker has gone
    except Exception as error:  # whatever it is, it belongs to the worker
        connection.send((None, portable(error)))
