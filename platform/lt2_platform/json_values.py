"""JSON values: without the numbers that JSON does not have, without secrets, by their hash. Imports nothing heavy."""

from __future__ import annotations

import hashlib
import json
import math
import re
from collections.abc import Mapping
from typing import Any

_SECRET = re.compile(r"(^|[._-])(password|secret|api_?key|(secret_)?access_key|(auth|hf|bearer)_token)$", re.IGNORECASE)


def finite(value: Any) -> Any:
    """`value`, with None in place of every NaN and infinity."""
    if isinstance(value, float):
        return value if math.isfinite(value) else None
    if isinstance(value, dict):
        return {key: finite(item) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return [finite(item) for item in value]
    return value


def redacted(value: Any, key: str = "") -> Any:
    """`value` with anything under a key that names a secret replaced, at any depth."""
    if _SECRET.search(key) and value is not None:
        return "[redacted]"
    if isinstance(value, Mapping):
        return {str(k): redacted(v, str(k)) for k, v in value.items()}
    if isinstance(value, list | tuple):
        return [redacted(item) for item in value]
    return value


def sha256_of(value: Any) -> str:
    """Hex sha256 of a JSON value, whatever the order of its keys."""
    return hashlib.sha256(json.dumps(value, sort_keys=True).encode()).hexdigest()
