"""Errors on their way to another process, which cannot make every class again; Ray then says that of the sender."""

from __future__ import annotations

import pickle
import traceback
from collections.abc import Callable
from contextlib import suppress
from functools import wraps
from typing import Any, TypeVar

from lt2.config import ConfigError
from lt2.extension import THEIRS
from lt2_platform.storage_errors import is_away, reason

Function = TypeVar("Function", bound=Callable[..., Any])


def portable(error: Exception, dumps: Callable[[Any], bytes] = pickle.dumps) -> Exception:
    """`error`, or one that says the same where its class is of a user's file, needs more than its message to be made
    again, or holds what cannot travel. The server's answer that an error of storage came from stays behind: one that
    says that the store is away becomes a ConnectionError. dumps: how it travels.
    """
    if not type(error).__module__.startswith(THEIRS):
        with suppress(Exception):  # whatever its class raises
            if is_away(pickle.loads(dumps(error))) == is_away(error):
                return error
    told: Exception = RuntimeError(f"{type(error).__name__}: {error}")
    if isinstance(error, ConfigError):
        told = ConfigError(str(error))
    elif is_away(error):
        told = ConnectionError(reason(error))
    for note in getattr(error, "__notes__", ()):
        told.add_note(note)
    return told


def as_value(error: Exception) -> Exception:
    """`portable(error)`, for what Ray Data runs, with where it was raised as a note. It travels as a value: raised
    there it would come back wrapped, its type lost in a text.
    """
    error.add_note("".join(traceback.format_exception(error)))
    return portable(error)


def portably(function: Function) -> Function:
    """A decorator of what Ray runs: what the function raises is `portable`."""

    @wraps(function)
    def called(*args: Any, **kwargs: Any) -> Any:
        try:
            return function(*args, **kwargs)
        except Exception as error:
            from ray import cloudpickle

            dumps = cloudpickle.dumps  # pyright: ignore[reportPrivateImportUsage, reportAttributeAccessIssue]
            if (told := portable(error, dumps)) is error:
                raise
            raise told from error

    return called  # type: ignore[return-value]  the same signature
