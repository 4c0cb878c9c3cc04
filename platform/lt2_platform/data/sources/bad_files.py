"""Files of a corpus that cannot be used, told all at once: who mends one wants to know of the others."""

from __future__ import annotations

from collections.abc import Sequence

from lt2.config import ConfigError

SHOWN = 20


def refuse(problems: Sequence[str]) -> None:
    """Raise ConfigError if there are any: one as it is, several as a list that is cut after SHOWN."""
    if not problems:
        return
    if len(problems) == 1:
        raise ConfigError(problems[0])
    more = [f"and {len(problems) - SHOWN:,} more"] if len(problems) > SHOWN else []
    lines = [f"{len(problems):,} of the corpus's files and paths cannot be used:", *problems[:SHOWN], *more]
    raise ConfigError("\n  ".join(lines))
