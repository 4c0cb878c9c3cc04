"""Which code and packages ran a step: recorded with every attempt, compared when a finished step is reused."""

from __future__ import annotations

import hashlib
import json
import platform
import subprocess
from collections.abc import Mapping
from functools import cache
from pathlib import Path
from typing import TYPE_CHECKING, Any

from lt2.packages import version_of

if TYPE_CHECKING:
    from lt2_platform.storage import Storage

PACKAGES = (
    "lt2",
    "torch",
    "triton",
    "ray",
    "numpy",
    "pyarrow",
    "transformers",
    "tokenizers",
    "tiktoken",
    "lm-eval",
    "flash-linear-attention",
    "fla-core",
    "flash-attn",
    "tilelang",
)
"""Those whose version can change what a step computes, by the names they are installed under."""

SNAPSHOT = "snapshot.json"
"""Beside this file in the code shipped with a job: {"git", "dirty"} of the checkout it was taken from."""


@cache
def provenance() -> dict[str, Any]:
    """{"git": sha or None, "dirty": hash of uncommitted changes or None, "python", "packages": {name: version}}.

    Git describes the checkout that this package is imported from, or the snapshot was; an installed wheel has none.
    """
    return {
        **_checkout(),
        "python": platform.python_version(),
        "packages": {name: version for name in PACKAGES if (version := version_of(name))},
    }


def log_evaluations(
    storage: Storage, run: str, model: str, evaluations: Mapping[str, list[dict[str, Any]]], **made_in: str
) -> None:
    """Add evaluations, by name, to a run of the results store. A model that no training made gets one for them, with
    the `workflow` and the `step` it was made in, if any."""
    from lt2_platform.results.store import ResultsStore

    log_model(storage, run, {"evaluated": model}, **made_in)
    for name, rows in evaluations.items():
        ResultsStore(storage).log_eval(run, name, rows)


def log_model(storage: Storage, run: str, config: Mapping[str, Any], **info: str) -> None:
    """Give a model that was not trained a run in the results store, with these settings, unless there is one.

    info: what is no setting.
    """
    from lt2_platform.results.store import ResultsStore

    if not storage.exists(f"runs/{run}/run.json"):
        ResultsStore(storage).create_run(run, {"config": config, **info, **provenance()}).close()


def drift(before: dict[str, Any], now: dict[str, Any]) -> list[str]:
    """What differs between two provenances, e.g. ["torch 2.11.0 -> 2.13.0"]; empty when nothing does."""
    changes = []
    if (before["git"], before["dirty"]) != (now["git"], now["dirty"]):
        changes.append(f"code {_code(before)} -> {_code(now)}")
    if before["python"] != now["python"]:
        changes.append(f"python {before['python']} -> {now['python']}")
    for name in sorted(before["packages"] | now["packages"]):
        old, new = before["packages"].get(name, "absent"), now["packages"].get(name, "absent")
        if old != new:
            changes.append(f"{name} {old} -> {new}")
    return changes


def _checkout() -> dict[str, str | None]:
    snapshot = Path(__file__).with_name(SNAPSHOT)
    if snapshot.is_file():
        return json.loads(snapshot.read_text())
    # A wheel may be installed inside a repository of somebody else's, as .venv is, whose commits are not our code's.
    ours = _git("ls-files", "--error-unmatch", Path(__file__).name)
    sha = _git("rev-parse", "HEAD") if ours else None
    changes = _git("diff", "HEAD") if sha else None
    return {"git": sha, "dirty": hashlib.sha256(changes.encode()).hexdigest()[:12] if changes else None}


def _code(record: dict[str, Any]) -> str:
    sha = (record["git"] or "no git")[:8]
    return f"{sha}+{record['dirty'][:6]}" if record["dirty"] else sha


def _git(*arguments: str) -> str | None:
    try:
        done = subprocess.run(
            ["git", "-C", str(Path(__file__).parent), *arguments],
            capture_output=True,
            encoding="utf-8",
            errors="replace",  # a changed file may have any encoding
            timeout=20,
        )
    except (OSError, subprocess.TimeoutExpired):
        return None
    return done.stdout.strip() if done.returncode == 0 else None
