"""Errors on their way from one process to another, in which not every class can be made again."""

from __future__ import annotations

import pickle
import traceback
from dataclasses import dataclass


@dataclass(frozen=True)
class Failure:
    """An error for another process, as bytes and, where these do not do, as text."""

    pickled: bytes
    said: str
    trace: str

    @classmethod
    def of(cls, error: Exception) -> Failure:
        try:
            pickled = pickle.dumps(error)
        except Exception:  # noqa: BLE001  it may hold anything, a lock or a file
            pickled = b""
        return cls(pickled, f"{type(error).__name__}: {error}", "".join(traceback.format_exception(error)))

    def error(self) -> Exception:
        """The error with its traceback as a note; a RuntimeError that says the same where its class needs more than its
        message to be made, or is of a file that is not loaded here."""
        try:
            error = pickle.loads(self.pickled)
        except Exception:  # noqa: BLE001  whatever its class raises
            error = RuntimeError(self.said)
        error.add_note(self.trace)
        return error
