"""Words for messages, which are one line that every terminal and file can hold. Imports nothing heavy."""

from __future__ import annotations

import difflib
from typing import Any


def one_line(error: BaseException) -> str:
    """The error's message without line breaks; "" if it has none."""
    return " ".join(str(error).split())


def printable(text: str) -> str:
    """`text` with lone surrogates, of names and arguments that are no UTF-8, as escapes."""
    return text.encode(errors="backslashreplace").decode()


def nearest(name: Any, known: Any) -> str:
    """What to add to a message about an unknown name: the one of `known` that may have been meant, or all of them."""
    near = difflib.get_close_matches(str(name), [str(item) for item in known], n=1)
    return f"; did you mean {near[0]!r}?" if near else f" (known: {', '.join(sorted(str(item) for item in known))})"
