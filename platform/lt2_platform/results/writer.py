"""The writer of one run: its numbers as parts and its latest word, while it trains and at its end."""

from __future__ import annotations

import json
import logging
import threading
from collections.abc import Callable, Mapping
from dataclasses import replace
from typing import Any

from lt2_platform.background import Background
from lt2_platform.json_values import redacted
from lt2_platform.results.curves import encode, rows_table
from lt2_platform.results.index import compact_when_long, write_journal
from lt2_platform.results.parts import part_name, write_curves
from lt2_platform.results.tables import RunInfo
from lt2_platform.storage import Storage
from lt2_platform.storage_errors import STORAGE_ERRORS

log = logging.getLogger(__name__)

FIRST_FLUSH_SECONDS, FLUSH_SECONDS = 2.0, 60.0  # a new run shows up at once, a long one writes few files
FLUSH_ROWS = 50_000
PARTS_PER_CURVE = 16  # readers of a live run open at most this many small files


class RunWriter:
    """Buffers the numbers of one run and writes them as parts. Use as a context manager: an exception marks it failed,
    or what its `run_state` says.

    What `log` has due is written by a thread, so that a store that is slow or away costs the training nothing; what a
    flush could not write stays for the next one. `flush` and `close` write at once, and raise.
    """

    def __init__(self, storage: Storage, run: RunInfo, writer: str, clock: Callable[[], float]):
        self.storage, self.run, self.writer, self.clock = storage, run, writer, clock
        self.rows: list[tuple[int, float, str, float]] = []
        self.sequence = 0
        self.interval = FIRST_FLUSH_SECONDS
        self.next_flush = clock() + self.interval
        self.lock = threading.Lock()  # held by the one who writes
        self.flushing: Background | None = None
        write_journal(storage, run)

    def log(self, step: int, metrics: Mapping[str, float]) -> None:
        """Record numbers at a step (NaN and infinities are kept); begins a flush after a minute or if rows pile up."""
        now = self.clock()
        values = {name: float(value) for name, value in metrics.items()}
        self.rows.extend((int(step), now, name, value) for name, value in values.items())
        last = {**self.run.last, **{name: (int(step), value) for name, value in values.items()}}
        self.run = replace(self.run, step=int(step), updated=now, last=last)
        if self.flushing is not None and self.flushing.done():
            self.flushing.take()  # what it raised is no refusal of the store, and ends the run
            self.flushing = None
        set_back = now < self.next_flush - self.interval  # the clock: without this, silence until it has caught up
        if self.flushing is None and (now >= self.next_flush or set_back or len(self.rows) >= FLUSH_ROWS):
            self.flushing = Background(self._try_flush, "lt2-metrics")
            self.interval = min(2 * self.interval, FLUSH_SECONDS)
            self.next_flush = now + self.interval

    def flush(self) -> None:
        """Write what is buffered. The part's name is new for every writer, so nothing is ever overwritten."""
        with self.lock:
            run, count = self.run, len(self.rows)  # in this order: `log` may add to both meanwhile, to the rows first
            if count:
                path = f"runs/{run.run_id}/metrics/{part_name(self.writer, self.sequence)}"
                self.storage.write_bytes(path, encode(rows_table(self.rows[:count])))
                del self.rows[:count]
                self.sequence += 1
                if self.sequence % PARTS_PER_CURVE == 0:
                    write_curves(self.storage, run.run_id)
            write_journal(self.storage, replace(run, updated=self.clock()))

    def _try_flush(self) -> None:
        try:
            self.flush()
        except STORAGE_ERRORS as error:
            log.warning("%s: metrics not written, kept for the next try (%s)", self.run.run_id, error)

    def close(self, summary: Mapping[str, Any] | None = None, *, state: str = "finished") -> None:
        """Write the rest, the summary and the curves. `state`: finished, failed, or running (to be resumed)."""
        if self.flushing is not None:
            self.flushing.wait()
        summary = json.loads(json.dumps(redacted(dict(summary)))) if summary is not None else None
        self.run = replace(self.run, state=state, summary=summary)
        if summary is not None:
            self.storage.write_json(f"runs/{self.run.run_id}/summary.json", summary)
        self.flush()
        write_curves(self.storage, self.run.run_id)
        compact_when_long(self.storage)

    def __enter__(self) -> RunWriter:
        return self

    def __exit__(self, kind: type[BaseException] | None, *_: object) -> None:
        if kind is not None:
            try:
                self.close(state=getattr(kind, "run_state", "failed"))
            except STORAGE_ERRORS as error:  # what ended the block is what whoever started it must hear of
                log.error("%s: its last metrics are not written (%s)", self.run.run_id, error)
        elif self.run.state == "running":
            self.close()
