"""Errors on their way to another process, which cannot make every class again; Ray then says that of the sender."""

from __future__ import annotations

import pickle
from collections.abc import Callable
from contextlib import suppress
from functools import wraps
from typing import Any, TypeVar

from lt2.config import ConfigError
from lt2.extension import THEIRS

Function = TypeVar("Function", bound=Callable[..., Any])


def portable(error: Exception) -> Exception:
    """`error`, or one that says the same where its class is of a user's file, needs more than its message to be made
    again, or holds what cannot travel."""
    if not type(error).__module__.startswith(THEIRS):
        with suppress(Exception):  # whatever its class raises
            pickle.loads(pickle.dumps(error))
            return error
    mistake = isinstance(error, ConfigError)
    told = ConfigError(str(error)) if mistake else RuntimeError(f"{type(error).__name__}: {error}")
    for note in getattr(error, "__notes__", ()):
        told.add_note(note)
    return told


def portably(function: Function) -> Function:
    """A decorator: what the function raises is `portable`."""

    @wraps(function)
    def called(*args: Any, **kwargs: Any) -> Any:
        try:
            return function(*args, **kwargs)
        except Exception as error:
            if (told := portable(error)) is error:
                raise
            raise told from error

    return called  # type: ignore[return-value]  the same signature
