"""Which code an answer of a model comes from: kept answers of other code are not taken for ours."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterator
from functools import cache
from importlib import metadata
from pathlib import Path
from typing import Any

import lt2
from lt2.config import ModelConfig

_PLATFORM = Path(__file__).parents[2]
ROOTS = (Path(lt2.__file__).parent, _PLATFORM / "evaluate", _PLATFORM / "data" / "tokenize.py")
"""Files and folders whose Python can change what a model answers to given tokens, or how that is read."""

PACKAGES = ("torch", "triton", "flash-linear-attention", "flash-attn", "transformers", "tokenizers", "tiktoken")


def code_sha256(model: ModelConfig | None = None) -> str:
    """Of our code, of the versions of the packages that compute, and of the user's own files that `model` names."""
    own = [] if model is None else sorted({*_own_files(json.loads(model.model_dump_json()))})
    files = [hashlib.sha256(Path(path).expanduser().read_bytes()).hexdigest() for path in own]
    return hashlib.sha256(json.dumps([_ours(), files]).encode()).hexdigest()


@cache
def _ours() -> str:
    digest = hashlib.sha256(json.dumps([(name, _version(name)) for name in PACKAGES]).encode())
    for root in ROOTS:
        for path in [root] if root.is_file() else sorted(root.rglob("*.py")):
            digest.update(f"\0{path.relative_to(root.parent).as_posix()}\0".encode())
            digest.update(path.read_bytes())
    return digest.hexdigest()


def _own_files(config: Any) -> Iterator[str]:
    """The `source` of every mixer and layout in a config's JSON."""
    if isinstance(config, list):
        for item in config:
            yield from _own_files(item)
    if isinstance(config, dict):
        if config.get("source"):
            yield config["source"]
        for item in config.values():
            yield from _own_files(item)


def _version(package: str) -> str | None:
    try:
        return metadata.version(package)
    except metadata.PackageNotFoundError:
        return None
