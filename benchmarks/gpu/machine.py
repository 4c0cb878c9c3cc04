"""The card, the versions of what runs on it, and what it can do at most: one row, before the parts."""

from __future__ import annotations

import sys
import time
from collections.abc import Iterator
from importlib import metadata
from typing import Any

from benchmarks.gpu.device import card, copy_bandwidth, matmul_flops

PACKAGES = ("torch", "triton", "flash-linear-attention", "fla-core", "tilelang", "flash-qla", "flash-attn")


def version(package: str) -> str | None:
    try:
        return metadata.version(package)
    except metadata.PackageNotFoundError:
        return None


def part(dry_run: bool, only: set[str] | None, seconds: float) -> Iterator[dict[str, Any]]:
    facts = {"card": card(), "python": sys.version.split()[0], "date": time.strftime("%F")}
    facts |= {package: version(package) for package in PACKAGES}
    yield facts | {"matmul_flops": matmul_flops(dry_run), "copy_bandwidth": copy_bandwidth(dry_run)}
