"""Which code an answer of a model comes from: kept answers of other code are not taken for ours."""

from __future__ import annotations

import hashlib
import json
from functools import cache
from pathlib import Path

import lt2
from lt2.config import ModelConfig
from lt2.packages import version_of
from lt2_platform.json_values import sha256_of
from lt2_platform.source_files import python_sources

_PLATFORM = Path(__file__).parents[2]
ROOTS = (
    Path(lt2.__file__).parent,
    _PLATFORM / "evaluate",
    _PLATFORM / "data" / "tokenizers",
    _PLATFORM / "train" / "checkpoints",
)
"""Files and folders whose Python can change what weights are read, what a model answers to given tokens, or how that is
read."""

PACKAGES = ("torch", "triton", "flash-linear-attention", "flash-attn", "transformers", "tokenizers", "tiktoken")


def code_sha256(model: ModelConfig | None = None) -> str:
    """A hash of our code, the versions of the packages that compute, and the user's own files that `model` names."""
    own = [] if model is None else sorted({*python_sources(model.model_dump(mode="json"))})
    files = [hashlib.sha256(Path(path).expanduser().read_bytes()).hexdigest() for path in own]
    return sha256_of([_ours(), files])


@cache
def _ours() -> str:
    digest = hashlib.sha256(json.dumps([(name, version_of(name)) for name in PACKAGES]).encode())
    for root in ROOTS:
        for path in [root] if root.is_file() else sorted(root.rglob("*.py")):
            digest.update(f"\0{path.relative_to(root.parent).as_posix()}\0".encode())
            digest.update(path.read_bytes())
    return digest.hexdigest()
