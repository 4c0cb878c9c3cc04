"""What an attempt is called where Ray Train and Ray Tune keep theirs. Imports neither, nor torch."""

from __future__ import annotations

from collections.abc import Iterable


def new_name(taken: Iterable[str]) -> str:
    """attempt-0001 and so on, after the last of `taken`: by a name that it knows, Ray would resume on its own."""
    numbers = (name.removeprefix("attempt-") for name in taken)
    return f"attempt-{max((int(number) for number in numbers if number.isdecimal()), default=0) + 1:04d}"
