"""Numbers that JSON does not have, in what others read. Imports nothing heavy."""

from __future__ import annotations

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
