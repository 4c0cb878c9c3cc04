"""Which runs of an ablation repeat each other: their models and training differ in seeds only."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import zip_longest
from typing import Any

from lt2.train.config import SEEDS
from lt2_dashboards.figures.parts.names import MAX_TOLD, in_words
from lt2_dashboards.figures.parts.store import Evaluated
from lt2_platform.evaluate.student import mean_std
from lt2_platform.results.store import differences
from lt2_platform.results.tables import flatten
from lt2_platform.wording import amount

VARIED = {"layout", "ffn_hidden"}
Known = tuple[Evaluated, str, float]  # a run, its place in the ablation, its quality


@dataclass(frozen=True)
class Mean:
    """Of the runs at one place that repeat each other; the standard deviation is the sample's, None of a single run."""

    label: str
    value: float
    deviation: float | None
    n: int


@dataclass(frozen=True)
class Line:
    """Models that differ in the ablation only, through its places: never two depths or sizes at one place."""

    label: str
    runs: frozenset[str]
    means: dict[str, Mean]

    @property
    def is_repeated(self) -> bool:
        return any(mean.n > 1 for mean in self.means.values())


def lines(known: Sequence[Known]) -> list[Line]:
    """The runs as lines, each with a label of its own. Runs that are no repeats share a place on different lines."""
    families: dict[str, dict[str, dict[str, list[Known]]]] = {}
    for run, place, value in known:
        family, exact = _key(surroundings(run.config)), _key(settings(run.config))
        families.setdefault(family, {}).setdefault(place, {}).setdefault(exact, []).append((run, place, value))
    found: list[list[list[Known]]] = []
    for places in families.values():
        # Where a place has several, e.g. of other FFN widths, a line is through the smallest of each, the next, …
        ordered = [sorted(exact.values(), key=lambda each: each[0][0].parameters or 0) for exact in places.values()]
        found += [[group for group in row if group] for row in zip_longest(*ordered)]
    return [_line(row, more) for row, more in zip(found, _told_apart(found))]


def _line(row: list[list[Known]], more: str) -> Line:
    everyone = [run for group in row for run, *_ in group]
    means = {group[0][1]: _mean(group, more) for group in row}
    return Line(depth_and_size(everyone) + more, frozenset(run.run for run in everyone), means)


def _mean(group: list[Known], more: str) -> Mean:
    runs, values = [run for run, *_ in group], [value for *_, value in group]
    mean, deviation = mean_std(values)
    assert mean is not None  # a group has a run
    return Mean(depth_and_size(runs) + more, mean, deviation, len(values))


def settings(config: Mapping[str, Any]) -> dict[str, Any]:
    """A run's settings as one level of dotted keys, without the seeds and without those that are not set: of an older
    run they may be missing."""
    found = flatten(config).items()
    return {key: value for key, value in found if value is not None and key.rpartition(".")[2] not in SEEDS}


def surroundings(config: Mapping[str, Any]) -> dict[str, Any]:
    """`settings` without what ablations of the layout vary: the layout, and the FFN width that keeps sizes equal."""
    found = settings(config).items()
    return {key: value for key, value in found if key.removeprefix("model.").partition(".")[0] not in VARIED}


def depth_and_size(runs: Sequence[Evaluated]) -> str:
    """E.g. "T = 4, 1.34B"; of several sizes the smallest and the largest."""
    sizes = sorted({run.parameters for run in runs if run.parameters})
    texts = list(dict.fromkeys(amount(size) for size in (sizes[:1] + sizes[-1:])))
    return f"T = {_loops(runs[0])}" + (f", {' to '.join(texts)}" if texts else "")


def _told_apart(found: list[list[list[Known]]]) -> list[str]:
    """What the labels of lines of one depth and size need besides: settings in which they differ, or a number."""
    labels = [depth_and_size([run for group in row for run, *_ in group]) for row in found]
    more = [""] * len(found)
    for label in dict.fromkeys(labels):
        same = [index for index, each in enumerate(labels) if each == label]
        differing = differences({str(index): surroundings(found[index][0][0][0].config) for index in same})
        for index in same:
            more[index] = "".join(f", {said}" for said in in_words(differing[str(index)])[:MAX_TOLD])
        for index in same:
            if more[index] in (others := [more[other] for other in same if other < index]):
                more[index] += f" ({1 + len(others)})"
    return more


def _key(found: Mapping[str, Any]) -> str:
    return json.dumps(found, sort_keys=True)


def _loops(run: Evaluated) -> int:
    return kind.n_loops if (kind := run.architecture) else 1
