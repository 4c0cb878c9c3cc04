"""Which runs are stalled: their last record says that they run, but they have been silent, or their step has ended."""

from __future__ import annotations

from dataclasses import dataclass

from lt2_dashboards.queries import Snapshot, Source
from lt2_dashboards.workflows.records import Records, is_name
from lt2_dashboards.workflows.steps import step_states
from lt2_platform.results.store import RunInfo
from lt2_platform.results.tables import STALE_SECONDS
from lt2_platform.results.writer import FLUSH_SECONDS

ENDED = ("failed", "interrupted", "infrastructure", "lost")  # states of an attempt
PAUSE = 15  # seconds that a moment lasts, so that pages which poll share an answer
# SQL of the status of a row of `runs`; takes what Moment.bound says.
STATUS = (
    f"CASE WHEN state = 'running' AND (? - updated > {STALE_SECONDS} OR list_contains(?::VARCHAR[], run)) "
    "THEN 'stalled' ELSE state END"
)


@dataclass(frozen=True)
class Moment:
    """A time, and the runs that are known to be over then although they have not said so."""

    now: float
    ended: tuple[str, ...] = ()

    @property
    def bound(self) -> list[float | list[str]]:
        return [self.now, list(self.ended)]

    def status(self, run: RunInfo) -> str:
        """The same as STATUS, of one run."""
        return "stalled" if run.run_id in self.ended else run.status(self.now)


def moment(source: Source) -> Moment:
    """Now, to the quarter of a minute."""
    now = source.clock() // PAUSE * PAUSE
    ended = source.remembered(("ended", now), lambda snapshot: _ended_unsaid(source, snapshot, now))
    return Moment(now, tuple(ended))


def _ended_unsaid(source: Source, snapshot: Snapshot, now: float) -> list[str]:
    """Of the runs that have been silent for longer than a live one is, those whose step's newest attempt has ended.

    Only these few are looked up, so that a page over many live runs reads no record of a step.
    """
    found = snapshot.query(
        "SELECT run FROM runs WHERE state = 'running' AND ? - updated BETWEEN ? AND ? ORDER BY run",
        [now, FLUSH_SECONDS, STALE_SECONDS],
    )
    states = step_states(Records(source.storage), [run for (run,) in found if is_name(run)], now)
    return [run for run, step in states.items() if step["state"] in ENDED]
