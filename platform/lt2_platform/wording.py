"""Words for messages, which are one line that every terminal and file can hold. Imports nothing heavy."""

from __future__ import annotations

import difflib
from collections.abc import Sequence
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


def amount(value: float) -> str:
    """A count in three digits: '982', '1.53M', '2.1e+21' becomes '2.10e21'."""
    for limit, suffix in ((1e3, ""), (1e6, "k"), (1e9, "M"), (1e12, "B"), (1e15, "T")):
        shown = f"{value / (limit / 1e3):.3g}"
        if abs(float(shown)) < 1000:  # 999,999 is 1M
            return f"{shown}{suffix}"
    return f"{value:.2e}".replace("e+", "e")


def size(bytes_: float) -> str:
    """Bytes in three digits: '982B', '716kB', '1.2GB'."""
    return f"{amount(bytes_).replace('B', 'G')}B"


def first_of(names: Sequence[str], count: int = 5) -> str:
    """The first of some names: 'a, b and 3 more'."""
    return ", ".join(names[:count]) + f" and {len(names) - count} more" * (len(names) > count)
