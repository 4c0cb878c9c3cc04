"""What every benchmark here shares: ours and a peer timed in turns on the same work, and rows printed or written.

A row is {work, size, ours, peer_name, peer, ratio, unit, better, machine, date}; ratio > 1 means ours is better.
"""

from __future__ import annotations

import datetime
import json
import os
import platform
import statistics
import time
from collections.abc import Callable, Mapping
from pathlib import Path

import torch

TURN_S, TURN_CALLS = 0.1, 8


def interleaved(
    calls: Mapping[str, Callable[[], object]], *, repeats: int = 7, seconds: float = 6.0
) -> dict[str, float]:
    """Median milliseconds of each call, run in turns after one warm-up round.

    Stops after `repeats` rounds, or earlier (from the second round on) once `seconds` have passed. A turn is one call,
    or several that take TURN_S together: then the first does not count, because it pays the page faults for memory that
    the other's turn made the allocator give back.
    """
    times: dict[str, list[float]] = {name: [] for name in calls}
    for call in calls.values():
        call()
    start = time.perf_counter()
    for round_ in range(repeats):
        if round_ >= 2 and time.perf_counter() - start > seconds:
            break
        for name, call in calls.items():
            times[name] += _turn(call)
    return {name: statistics.median(values) for name, values in times.items()}


def _turn(call: Callable[[], object]) -> list[float]:
    """Milliseconds of the calls of a turn that count."""
    times, start = [], time.perf_counter()
    while not times or (time.perf_counter() - start < TURN_S and len(times) <= TURN_CALLS):
        begun = time.perf_counter()
        call()
        times.append(1e3 * (time.perf_counter() - begun))
    return times[1:] or times


def row(work: str, size: str, ours: float, peer_name: str, peer: float, unit: str, better: str = "lower") -> dict:
    """One comparison; better is "lower" or "higher", and says which way `ours` and `peer` count."""
    return {
        "work": work,
        "size": size,
        "ours": round(ours, 3),
        "peer_name": peer_name,
        "peer": round(peer, 3),
        "ratio": round(peer / ours if better == "lower" else ours / peer, 3),
        "unit": unit,
        "better": better,
        "machine": machine(),
        "date": datetime.date.today().isoformat(),
    }


def machine() -> str:
    """The device the figures are from, the torch that made them, and how busy the machine was meanwhile."""
    name = torch.cuda.get_device_name() if torch.cuda.is_available() else _cpu_name()
    load = f"load {os.getloadavg()[0]:.1f} on {os.cpu_count()} cores"
    return f"{name}, {torch.get_num_threads()} thread(s), torch {torch.__version__}, {load}"


def print_rows(rows: list[dict]) -> None:
    """Rows as a table on standard output."""
    columns = ("work", "size", "ours", "peer", "ratio", "unit", "peer_name")
    cells = [columns, *(tuple(str(r[c]) for c in columns) for r in rows)]
    widths = [max(len(line[i]) for line in cells) for i in range(len(columns))]
    for line in cells:
        print("  ".join(cell.ljust(width) for cell, width in zip(line, widths)).rstrip())


def write_rows(rows: list[dict], path: str | None) -> None:
    """Rows as a JSON array, if a path was asked for."""
    if path is not None:
        Path(path).write_text(json.dumps(rows, indent=1) + "\n")


def _cpu_name() -> str:
    info = Path("/proc/cpuinfo")
    if info.exists():
        for line in info.read_text().splitlines():
            if line.startswith("model name"):
                return line.split(":", 1)[1].strip()
    return platform.processor() or platform.machine()
