"""What all readers of the workflow engine's records agree on: which are damaged, and whose holder looks lost.

The engine itself (lt2_workflows.engine.records) says what the records are and where they lie.
"""

from __future__ import annotations

import json
import os
import socket
import time
from collections.abc import Mapping
from contextlib import suppress
from pathlib import Path
from typing import Any

Kinds = Mapping[str, type | tuple[type, ...]]
NUMBER = (int, float)
LEASE: Kinds = {"released": bool, "beat": int, "time": NUMBER, "ttl_s": NUMBER, "host": str, "pid": int}
"""What every lease.json holds."""

# Ray workers outlive a killed driver by about two seconds and could still write into the step's folder.
ORPHAN_GRACE_S = 5.0
# By so much clocks of two machines may well differ. It matters only for what is shown: to take a step over, its silence
# must have been observed, by one clock.
CLOCK_SKEW_S = 300.0


def parse(data: bytes, required: Kinds) -> dict[str, Any]:
    """The record in `data`. Raises ValueError, saying what is wrong, unless it is an object with `required` fields."""
    if not data.strip():
        raise ValueError("it is empty")
    try:
        record = json.loads(data)
    except ValueError:
        raise ValueError("it is not JSON") from None
    if not isinstance(record, dict):
        raise ValueError("it is not a JSON object")
    for name, kind in required.items():
        if not isinstance(record.get(name), kind):
            raise ValueError(f"its {name!r} is missing or damaged")
    return record


def attempt_state(state: Mapping[str, Any] | None, lease: Mapping[str, Any] | None, now: float) -> str:
    """How an attempt with these records (None: there is none) is shown at time `now`.

    "lost" is one whose process ended without a word: the next run takes the step over.
    """
    name = state["state"] if state else "running"
    if name == "running" and (lease is None or lease["released"] or looks_lost(lease, now)):
        return "lost"
    return name


def looks_lost(lease: Mapping[str, Any], now: float) -> bool:
    """What a single look at a lease can tell; another machine's clock is allowed to be wrong by CLOCK_SKEW_S."""
    here = _machine()
    skew = 0.0 if here is not None and lease.get("machine") == here else CLOCK_SKEW_S
    return is_stale(lease, now=now) or now - lease["time"] > 2 * lease["ttl_s"] + skew


def is_stale(lease: Mapping[str, Any], silent_s: float = 0.0, now: float | None = None) -> bool:
    """True if the holder of `lease` is gone, given that we saw no heartbeat for `silent_s` by our own clock.

    The time in a lease is its holder's: however old it looks, on another machine that may be a slow clock.
    """
    age = (time.time() if now is None else now) - lease["time"]
    return silent_s > lease["ttl_s"] or (max(silent_s, age) > min(ORPHAN_GRACE_S, lease["ttl_s"]) and died_here(lease))


def this_process() -> dict[str, Any]:
    """What `died_here` needs to tell, later and from another process, whether this one still lives."""
    return {"host": socket.gethostname(), "pid": os.getpid(), "start": _start_time(os.getpid()), "machine": _machine()}


def died_here(process: Mapping[str, Any]) -> bool:
    """True if `process` (of `this_process`) ran on this machine and has ended; False also when we cannot know."""
    here = _machine()
    ran_here = here is not None and process.get("machine") == here
    return ran_here and _start_time(process["pid"]) != process.get("start")


def _machine() -> str | None:
    """Identifies boot and process-id namespace, so that a process id is only looked up where it means something."""
    with suppress(OSError):
        boot = Path("/proc/sys/kernel/random/boot_id").read_text().strip()
        return f"{socket.gethostname()}/{boot}/{os.readlink('/proc/self/ns/pid')}"
    return None


def _start_time(pid: int) -> str | None:
    """When a living process started, in clock ticks since boot; None if there is none (a zombie does no work)."""
    with suppress(OSError):
        fields = Path(f"/proc/{pid}/stat").read_text().rsplit(")", 1)[1].split()
        return None if fields[0] in "ZX" else fields[19]
    return None
