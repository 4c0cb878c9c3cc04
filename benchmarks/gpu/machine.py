"""The card, the versions of what runs on it, and what it can do at most: one row, before the parts."""

from __future__ import annotations

import sys
import time
from collections.abc import Iterator
from typing import Any

from benchmarks.gpu.device import card, copy_bandwidth, device, matmul_flops
from lt2.ops.dispatch import startup_problems
from lt2.packages import version_of

PACKAGES = ("torch", "triton", "flash-linear-attention", "fla-core", "tilelang", "flash-qla", "flash-attn")


def part(dry_run: bool, only: set[str] | None, seconds: float) -> Iterator[dict[str, Any]]:
    facts: dict[str, Any] = {"card": card(), "python": sys.version.split()[0], "date": time.strftime("%F")}
    facts |= {package: version_of(package) for package in PACKAGES}
    facts["problems"] = startup_problems()
    if dry_run or device().type == "cuda":  # on a CPU these take minutes, and the check ends anyway
        facts |= {"matmul_flops": matmul_flops(dry_run), "copy_bandwidth": copy_bandwidth(dry_run)}
    yield facts
