"""Which implementation each kind of mixer gets on this device, and whether it computes what fp64 does."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import torch

from lt2.analysis.device_parity import check
from lt2.config import mixer_types
from lt2.ops.dispatch import attention_backend, backend_for, startup_problems
from lt2.train.loop import autocast_dtype
from lt2_platform.doctor.finding import Finding
from lt2_platform.wording import one_line

PART = "kernels"
NAMES = {"torch": "PyTorch", "fla": "fla", "flash_attn": "flash-attn", "varlen": "PyTorch's flash attention"}


def chosen(device: torch.device) -> Iterator[Finding]:
    probe = torch.empty(0, device=device, dtype=_dtype(device))
    recurrent, attention = backend_for("recurrences", probe), attention_backend("attention", probe)
    yield Finding(PART, "recurrences", "ok", f"{NAMES[recurrent]} ({_name(device)})")
    yield Finding(PART, "attention", "ok", f"{NAMES[attention]} ({_name(device)})")
    for problem in startup_problems():
        yield Finding(PART, "slower than need be", "note", problem)


def run(device: torch.device, mixers: Sequence[str] = ()) -> Iterator[Finding]:
    """Run a small model of each mixer forward, backward and decoding. On a card the first run compiles for minutes."""
    for mixer in mixers or sorted(mixer_types()):
        yield parity(mixer, device)


def parity(mixer: str, device: torch.device) -> Finding:
    try:
        rows = check(mixer, _dtype(device), 150, device)
    except Exception as error:  # whatever a kernel, its compiler or driver raises is what was looked for
        return Finding(PART, mixer, "PROBLEM", f"does not run: {type(error).__name__}: {one_line(error)[:300]}")
    worst = max(rows, key=lambda row: (not row["ok"], row["error"] / row["limit"]))  # a NaN is greater than nothing
    said = f"{worst['case']}, {worst['what']}: {worst['error']:.1e} of fp64's norm, {worst['limit']:.0e} allowed"
    if not worst["ok"]:
        return Finding(PART, mixer, "PROBLEM", f"differs from fp64 ({said}); do not trust its results here")
    return Finding(PART, mixer, "ok", said)


def _dtype(device: torch.device) -> torch.dtype:
    """The dtype in which training computes on `device` (precision "auto")."""
    return autocast_dtype("auto", device) or torch.float32


def _name(device: torch.device) -> str:
    name = torch.cuda.get_device_name(device) if device.type == "cuda" else "CPU"
    return f"{name}, {'bf16' if _dtype(device) == torch.bfloat16 else 'fp32'}"
