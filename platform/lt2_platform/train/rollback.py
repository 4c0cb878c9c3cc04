"""Rolling back: a batch that gives NaN is recorded in the run's folder and passed over when its steps are made again.

    <out>/rollbacks.json    one record per rollback, oldest first; written before anything is repeated

The record outlives the process, so a kill in between changes neither what is skipped nor how often it may happen.
"""

from __future__ import annotations

import logging
import time
from dataclasses import asdict, dataclass
from typing import Any

from lt2.train.guard import NonFiniteLossError
from lt2_platform.results.store import ResultsStore
from lt2_platform.storage import Storage
from lt2_platform.train import ranks
from lt2_platform.train.checkpoints import integrity

log = logging.getLogger(__name__)

ROLLBACKS = "rollbacks.json"


@dataclass(frozen=True)
class Rollbacks:
    """The rollbacks of one run. Build it on every rank; only rank 0 touches storage."""

    out: str
    results: str
    run_id: str
    limit: int

    def positions(self) -> frozenset[int]:
        """Where the batches to skip begin in the global order. Collective."""
        return frozenset(ranks.from_rank_zero([record["position"] for record in self._read()]))

    def record(self, error: NonFiniteLossError) -> None:
        """Note that `error` is to be rolled back, or raise it if that has happened too often. Collective."""
        count = len(self.positions())
        if count >= self.limit:
            raise NonFiniteLossError(
                f"{error}; rolled back {count} of {self.limit} times (train.rollbacks) before: change train.lr, "
                "train.warmup_steps or train.rollbacks and run again",
                step=error.step,
                position=error.position,
                origin=error.origin,
            )
        if ranks.is_rank_zero():
            self._write(error)
        ranks.from_rank_zero(None)  # nobody repeats anything before it is written

    def _read(self) -> list[dict[str, Any]]:
        storage = Storage(self.out)
        return storage.read_json(ROLLBACKS) if ranks.is_rank_zero() and storage.exists(ROLLBACKS) else []

    def _write(self, error: NonFiniteLossError) -> None:
        saved = integrity.complete(Storage(self.out).join("checkpoints"))
        record = {
            "step": error.step,
            "position": error.position,
            "to": saved[-1] if saved else None,
            "origin": asdict(error.origin) if error.origin else None,
            "message": str(error),
            "time": time.time(),
        }
        records = [*self._read(), record]
        log.error(
            "%s. ROLLBACK %d of %d: going back to %s; the sequences from position %d are skipped this time",
            error, len(records), self.limit, record["to"] or "the start", error.position,
        )  # fmt: skip
        Storage(self.out).write_json(ROLLBACKS, records)
        ResultsStore(Storage(self.results)).log_event(self.run_id, "rollback", record)
