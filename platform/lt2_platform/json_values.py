"""JSON values: without the numbers that JSON does not have, and by their hash. Imports nothing heavy."""

from __future__ import annotations

import hashlib
import json
import math
from typing import Any


def finite(value: Any) -> Any:
    """`value`, with None in place of every NaN and infinity."""
    if isinstance(value, float):
        return value if math.isfinite(value) else None
    if isinstance(value, dict):
        return {key: finite(item) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return [finite(item) for item in value]
    return value


def sha256_of(value: Any) -> str:
    """Hex sha256 of a JSON value, whatever the order of its keys."""
    return hashlib.sha256(json.dumps(value, sort_keys=True).encode()).hexdigest()
