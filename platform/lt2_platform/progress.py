"""How long work says how far it is. Imports nothing heavy."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

Progress = Callable[[dict[str, Any]], None]
"""Called now and then with what there is to show, such as {"message": "arc_easy", "step": 3, "steps": 10}."""


def silent(values: dict[str, Any]) -> None:
    """Shows nothing."""
