"""Which checkpoints of a run are still to be evaluated while it trains. Knows nothing of Ray.

    <out>/evaluations/step-….json     {"state": waiting | running | done | failed | skipped, "time", …}

A checkpoint whose evaluation is wanted and not over is not pruned.
"""

from __future__ import annotations

import time
from typing import Any

from lt2_platform.storage import Storage
from lt2_platform.train.checkpoints.integrity import COMPLETE, all_names, step_of

OVER = ("done", "failed", "skipped")


def record(out: str, name: str) -> dict[str, Any]:
    """What is known of the evaluation of checkpoint `name`; {} before it was asked for."""
    try:
        return Storage(out).read_json(f"evaluations/{name}.json")
    except (FileNotFoundError, ValueError):
        return {}


def note(out: str, name: str, state: str, **more: Any) -> None:
    Storage(out).write_json(f"evaluations/{name}.json", {"state": state, "time": time.time(), **more})


def wanted(out: str, every: int, over: set[str] | None = None) -> list[str]:
    """Complete checkpoints of steps that `every` divides whose evaluation is not over, oldest first.

    over: names known to be over, which are not asked for again; those that turn out to be are added.
    """
    storage, known = Storage(out), set() if over is None else over
    names = [name for name in all_names(storage.join("checkpoints")) if step_of(name) % every == 0]
    found = []
    for name in names:
        if name in known or not storage.exists(f"checkpoints/{name}/{COMPLETE}"):
            continue
        if record(out, name).get("state") in OVER:
            known.add(name)
        else:
            found.append(name)
    return found
