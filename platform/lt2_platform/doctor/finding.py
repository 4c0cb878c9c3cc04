"""What was looked at, how it stands and what to do."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

State = Literal["ok", "note", "PROBLEM"]


@dataclass(frozen=True)
class Finding:
    """One line of `lt2 doctor`. A note is slower or less than could be; a PROBLEM is what work will fail of.

    `said` holds what is there and, unless it is ok, what to do.
    """

    part: str
    name: str
    state: State
    said: str
