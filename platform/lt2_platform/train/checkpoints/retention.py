"""Which checkpoints stay: the newest ones, every so many steps, and the best by validation loss; the others go.

<folder>/BEST    {"checkpoint", "step", "validation_loss"} of the best checkpoint whose step was evaluated
"""

from __future__ import annotations

import logging
import math
from collections.abc import Collection, Sequence
from dataclasses import dataclass
from typing import Any

from lt2.config import ConfigError
from lt2.train.config import TrainConfig
from lt2_platform.storage import Storage
from lt2_platform.train.checkpoints.integrity import COMPLETE, INFO, all_names, complete, delete, step_of

log = logging.getLogger(__name__)

BEST = "BEST"


@dataclass(frozen=True)
class Keep:
    """The newest `last` (at least 1), those whose step `every` divides, and the best."""

    last: int = 2
    every: int | None = None
    best: bool = True

    @classmethod
    def of_run(cls, config: TrainConfig) -> Keep:
        return cls(config.keep_checkpoints, config.keep_every, config.keep_best)

    @classmethod
    def parse(cls, text: str) -> Keep:
        """From "last=2,every=1000,best"; what is left out is not kept, except the newest."""
        fields: dict[str, Any] = {"last": 1, "best": False}
        parts = [part.strip() for part in text.split(",") if part.strip()]
        if not parts:  # an unset variable, not a wish to lose all but one
            raise ConfigError("the keep policy is empty; give last=N, every=N or best, comma-separated")
        for part in parts:
            name, _, value = part.partition("=")
            if part == "best":
                fields["best"] = True
            elif name in ("last", "every") and value.isdecimal() and int(value) > 0:
                fields[name] = int(value)
            else:
                raise ConfigError(f"keep policy {text!r}: {part!r} is not last=N, every=N or best, with N of 1 or more")
        return cls(**fields)


def kept(names: Sequence[str], policy: Keep, best: str | None = None) -> set[str]:
    """Those of `names` (step-…, oldest first) that `policy` keeps."""
    stay = set(names[-policy.last :])
    if policy.every is not None:
        stay |= {name for name in names if step_of(name) % policy.every == 0}
    return stay | ({best} & set(names) if policy.best and best else set())


def read_best(folder: str) -> dict[str, Any] | None:
    """The pointer, if there is one that can be read."""
    try:
        best = Storage(folder).read_json(BEST)
    except (FileNotFoundError, ValueError):
        return None
    return best if isinstance(best, dict) and {"checkpoint", "validation_loss"} <= best.keys() else None


def note_best(folder: str, name: str, validation_loss: float) -> None:
    """Point at `name`, unless a better checkpoint is there already."""
    if math.isnan(validation_loss):
        return  # nothing would ever be better
    storage, best = Storage(folder), read_best(folder)
    # A run that was rolled back writes checkpoints anew: the same step always replaces itself.
    there = best is not None and best["checkpoint"] != name and storage.exists(f"{best['checkpoint']}/{COMPLETE}")
    if best is None or not there or not validation_loss >= best["validation_loss"]:  # that may be NaN, of an older LT2
        record = {"checkpoint": name, "step": step_of(name), "validation_loss": validation_loss}
        storage.write_json(BEST, record)


def stored_loss(uri: str) -> float | None:
    """The validation loss of a checkpoint whose step was evaluated; None too where its description is damaged."""
    try:
        return Storage(uri).read_json(INFO).get("validation_loss")
    except (FileNotFoundError, ValueError):
        return None


def drop(folder: str, keep: Keep, pinned: Collection[str] = (), *, newest: str | None = None) -> None:
    """Delete the complete checkpoints that neither `keep` nor `pinned` keeps.

    newest: the one just written. Later ones are damaged, since training went on from before them: they count for
    nothing, and stay until their step is made again.
    """
    names = [name for name in complete(folder) if newest is None or step_of(name) <= step_of(newest)]
    stay = kept(names, keep, (read_best(folder) or {}).get("checkpoint")).union(pinned)
    for name in names:
        if name not in stay:
            delete(folder, name)


def clean(folder: str) -> list[str]:
    """Delete what kills left behind (folders without COMPLETE) and return their names. One rank, before training.

    A kill right after COMPLETE left its checkpoint out of the choice of the best; it is made good here.
    """
    storage = Storage(folder)
    whole = complete(folder)
    orphans = sorted(set(all_names(folder)) - set(whole))
    for name in orphans:
        log.warning("deleting the incomplete checkpoint %s", storage.join(name))
        storage.delete(name)
    if whole and (loss := stored_loss(storage.join(whole[-1]))) is not None:
        note_best(folder, whole[-1], loss)
    return orphans
