"""Runs whose last word is that they run, and whose step tells sooner than five minutes of silence that they do not."""

from __future__ import annotations

from lt2_dashboards.queries import Snapshot, Source
from lt2_dashboards.records import Records, is_name
from lt2_dashboards.steps import step_states
from lt2_platform.results.store import FLUSH_SECONDS
from lt2_platform.results.tables import STALE_SECONDS

ENDED = ("failed", "interrupted", "infrastructure", "lost")  # states of an attempt


def ended_unsaid(source: Source, snapshot: Snapshot, now: float) -> list[str]:
    """Of the runs that have been silent for longer than a live one is, those whose step's newest attempt has ended.

    Only these few are looked up, so that a page over many live runs reads no record of a step.
    """
    found = snapshot.query(
        "SELECT run FROM runs WHERE state = 'running' AND ? - updated BETWEEN ? AND ? ORDER BY run",
        [now, FLUSH_SECONDS, STALE_SECONDS],
    )
    states = step_states(Records(source.storage), [run for (run,) in found if is_name(run)], now)
    return [run for run, step in states.items() if step["state"] in ENDED]
