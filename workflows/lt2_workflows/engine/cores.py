"""How many steps of a workflow may run side by side, and so share this machine's cores (lt2_platform.machine.cores)."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Protocol


class Needing(Protocol):
    @property
    def needs(self) -> tuple[str, ...]: ...


def side_by_side(steps: Mapping[str, Needing]) -> dict[str, int]:
    """For each step, how many may run at the same time, itself included. It depends on the graph alone, so that a step
    has the same threads, and thus the same sums, however it is run. `steps` are in an order in which they can run."""
    before: dict[str, set[str]] = {}
    for name, step in steps.items():
        known = [need for need in step.needs if need in steps]
        before[name] = {*known}.union(*(before[need] for need in known))
    return {
        name: 1 + _widest({n for n in steps if n != name and n not in before[name] and name not in before[n]}, before)
        for name in steps
    }


def _widest(names: set[str], before: Mapping[str, set[str]]) -> int:
    """Size of the largest set of `names` without an order between them: all, less the most that can be chained to a
    successor of their own (Dilworth)."""
    chained_to: dict[str, str] = {}

    def chain(name: str, tried: set[str]) -> bool:
        for successor in names - tried:
            if name in before[successor]:
                tried.add(successor)
                if successor not in chained_to or chain(chained_to[successor], tried):
                    chained_to[successor] = name
                    return True
        return False

    return len(names) - sum(chain(name, set()) for name in names)
