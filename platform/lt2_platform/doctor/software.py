"""Packages: what LT2 asks for beside what is installed, and whether torch can use the card that is there."""

from __future__ import annotations

import platform
from collections.abc import Iterator, Sequence
from importlib import metadata
from pathlib import Path

import torch
from packaging.requirements import Requirement  # transformers brings it along

from lt2.packages import version_of
from lt2_platform.doctor.finding import Finding

PART = "software"
NAMED = ("lt2", "torch", "ray", "transformers", "lm-eval", "pyarrow")
ON_CUDA = ("triton", "flash-linear-attention", "tilelang", "flash-qla", "flash-attn")
CARD = Path("/dev/nvidia0")


def software() -> Iterator[Finding]:
    yield Finding(PART, "python", "ok", f"{platform.python_version()} on {platform.platform()}")
    yield packages(_requirements())
    yield torch_and_card(torch.cuda.is_available(), torch.version.cuda, CARD.exists())


def packages(required: Sequence[str] | None) -> Finding:
    """required: as in a package's metadata, e.g. 'torch<2.14,>=2.11'; None where LT2 is not installed."""
    names = (*NAMED, *ON_CUDA) if torch.cuda.is_available() else NAMED
    listed = ", ".join(f"{name} {version}" for name in names if (version := version_of(name)))
    if required is None:
        return Finding(PART, "packages", "note", f"{listed}; LT2 is not installed, so versions are not compared")
    off = [said for text in required if (said := _unmet(Requirement(text)))]
    if off:
        said = f"{', '.join(off)}; pip install -c constraints.txt . (on CUDA: pip install '.[fla]')"
        return Finding(PART, "packages", "PROBLEM", said)
    return Finding(PART, "packages", "ok", listed)


def _unmet(one: Requirement) -> str:
    """What is wrong with an installed package, or with a missing one that no extra asks for; else empty."""
    installed, asked = version_of(one.name), f"{one.name}{one.specifier}"
    always, on_cuda = (one.marker is None or one.marker.evaluate({"extra": extra}) for extra in ("", "cuda"))
    if installed is None:
        return f"{asked} is missing" if always else ""
    if not on_cuda:  # and so not always
        return ""
    return "" if one.specifier.contains(installed, prereleases=True) else f"{asked} is needed, {installed} installed"


def torch_and_card(available: bool, built_for: str | None, there: bool) -> Finding:
    """available: torch sees a card; built_for: CUDA's version, None for a build without; there: the machine has one."""
    if available:
        return Finding(PART, "cuda", "ok", f"torch {torch.__version__} for CUDA {built_for}")
    if not there:
        return Finding(PART, "cuda", "ok", "no NVIDIA card here: everything runs on the CPU")
    if built_for is None:
        said = f"an NVIDIA card is here, and torch {torch.__version__} is built for CPUs; install torch's CUDA build"
    else:
        said = (
            f"an NVIDIA card is here, and torch {torch.__version__} cannot use it; check that its driver supports "
            f"CUDA {built_for} (nvidia-smi) and CUDA_VISIBLE_DEVICES shows it"
        )
    return Finding(PART, "cuda", "PROBLEM", said)


def _requirements() -> list[str] | None:
    try:
        return metadata.requires("lt2")
    except metadata.PackageNotFoundError:
        return None
