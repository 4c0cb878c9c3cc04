"""Words for messages, which are one line that every terminal and file can hold. Imports nothing."""

from __future__ import annotations


def one_line(error: BaseException) -> str:
    """What it says, without line breaks; "" if it says nothing."""
    return " ".join(str(error).split())


def printable(text: str) -> str:
    """`text` with lone surrogates, of names and arguments that are no UTF-8, as escapes."""
    return text.encode(errors="backslashreplace").decode()
