"""One result of every configuration over its seeds: mean, spread, and whether the best is so by more than chance."""

from __future__ import annotations

from typing import Any

from lt2.train.config import SEEDS
from lt2_dashboards.figures.figure import Figure, rounded
from lt2_dashboards.figures.parts.chosen import LOWER_IS_BETTER, Chosen, choose
from lt2_dashboards.figures.parts.names import TELLS_LITTLE, in_words
from lt2_dashboards.figures.parts.series import points, whiskers
from lt2_dashboards.figures.sweep import MAX_AXES, NEEDS, settings_of
from lt2_dashboards.queries import Snapshot, Source
from lt2_platform.evaluate.ablations import FLOPS
from lt2_platform.evaluate.student import mean_std, welch

DRAWN = 20  # configurations, the best ones: labels of more would lie on each other


def seeds(source: Source, *, q: str = "", metric: str = "") -> Figure:
    """A result by configuration, best first: mean and standard deviation over seeds, and the p-value against the best.

    Runs are of one configuration if they differ in their seeds only. What sweeps recorded of their training FLOPs is
    beside it. `q` filters runs as in the runs table, `metric` is a logged metric's last value or an evaluation
    (name/task/metric), by default what `chosen.RESULTS` says.
    """
    found, snapshot = choose(source, q, metric), source.snapshot()
    metric, runs, title = found.metric, found.runs, f"{found.title} by configuration"
    if found.refused:
        return Figure(title, {"series": [], "empty": found.refused}, ["runs", metric], list)
    keys = [key for key in found.varying if key.rpartition(".")[2] not in SEEDS][:MAX_AXES]
    keys.sort(key=lambda key: key.endswith(TELLS_LITTLE))  # labels are cut at their end
    settings = settings_of(snapshot, [run for run, _ in runs], keys)
    sign = 1 if LOWER_IS_BETTER.search(metric) else -1
    groups = sorted(_groups(snapshot, runs).values(), key=lambda group: sign * (mean_std(_values(group))[0] or 0.0))
    spent = _spent(snapshot, [run for run, _ in runs])
    rows: list[list[Any]] = []
    for group in groups:
        shown = [settings[group[0][0]].get(key, ("not set", None))[0] for key in keys]
        mean, deviation = mean_std(_values(group))
        p_value = welch(_values(groups[0]), _values(group)) if group is not groups[0] else None
        cost = [mean_std([spent[run] for run, _ in group if run in spent])[0]] if spent else []
        rows.append([*shown, len(group), mean, deviation, p_value, *cost, ", ".join(run for run, _ in group)])
    cost = ["training FLOPs"] if spent else []
    columns = [*keys, "runs", metric, "standard deviation", "p against the best", *cost, "names"]
    better = "lowest" if sign > 0 else "highest"
    if not runs:
        columns, produce = ["runs", metric], "" if q else NEEDS
        return Figure(title, _option([], keys, found), columns, list, found.notes, produce)
    notes = [
        *found.notes,
        f"Bars are one standard deviation over seeds. Best is the {better}. p: Welch's t-test of the means, which "
        "needs two runs of each; among many configurations one is the best by chance.",
    ]
    if len(groups) > 1 and len(groups[0]) < 2:
        notes.append("The best has only one run, so its uncertainty is unknown: run it with another seed.")
    if len(groups) > DRAWN:
        notes.append(f"Only the best {DRAWN} are drawn of {len(groups)} configurations.")
    return Figure(title, _option(rows[:DRAWN], keys, found), columns, lambda: rows, notes)


def _groups(snapshot: Snapshot, runs: list[tuple[str, float]]) -> dict[str, list[tuple[str, float]]]:
    """The runs by what is the same in them: all of their settings, also the many that no table shows, but the seeds."""
    found = snapshot.query(
        "SELECT run, md5(string_agg(concat(key, '=', text), chr(10) ORDER BY key)) FROM config "
        "WHERE list_contains(?, run) AND NOT list_contains(?, regexp_replace(key, '^.*\\.', '')) GROUP BY run",
        [[run for run, _ in runs], sorted(SEEDS)],
    )
    same, groups = dict(found), {}
    for run, value in runs:
        groups.setdefault(same.get(run, run), []).append((run, value))  # of no settings at all nothing is known
    return groups


def _spent(snapshot: Snapshot, runs: list[str]) -> dict[str, float]:
    """{run: training FLOPs that its sweep has recorded}."""
    found = snapshot.query(
        "SELECT run, max(value) FROM evals WHERE name = 'sweep' AND metric = ? AND list_contains(?, run) GROUP BY run",
        [FLOPS, runs],
    )
    return dict(found)


def _values(group: list[tuple[str, float]]) -> list[float]:
    return [value for _, value in group]


def _needed(rows: list[list[Any]], keys: list[str]) -> set[str]:
    """Kinds, and the first of the other settings that tell rows apart: there is no room for what follows from them.

    Others follow from what tells little, too (the width that a ratio was matched by), but are not left out for it.
    """

    def told_apart(columns: list[int]) -> int:
        return len({tuple(row[at] for at in columns) for row in rows})

    kept = list(range(len(keys)))
    for at in reversed([at for at, key in enumerate(keys) if not key.endswith(".type")]):
        little = keys[at].endswith(TELLS_LITTLE)
        others = [other for other in kept if other != at and (little or not keys[other].endswith(TELLS_LITTLE))]
        if told_apart(others) == told_apart([*others, at]):
            kept.remove(at)
    return {keys[at] for at in kept}


def _option(rows: list[list[Any]], keys: list[str], found: Chosen) -> dict[str, Any]:
    if not rows:
        return {"series": [], "empty": f"No run that matches has the result {found.metric!r}."}
    labels, needed = [], _needed(rows, keys)
    for row in rows:
        said = zip(keys, row[: len(keys)])
        words = in_words({key: text for key, text in said if key in needed and text not in ("null", "not set")})
        # A model from elsewhere has no settings.
        label = ", ".join(words) or (row[-1] if len(rows) > 1 else "all settings")
        labels.append(label if label not in labels else f"{label} ({len(labels) + 1})")
    data, ends = [], []
    for label, (n, mean, deviation, p_value, *_) in zip(labels, (row[len(keys) :] for row in rows)):
        told = [f"{n} run" + "s" * (n > 1)]
        if deviation is not None:
            told.append(f"± {deviation:.3g}")
            ends.append(([rounded(mean - deviation), label], [rounded(mean + deviation), label]))
        if p_value is not None:
            told.append(f"p = {p_value:.2g} against the best")
        data.append({"name": label, "value": [rounded(mean), label], "shown": rounded(mean), "detail": ", ".join(told)})
    return {
        "xAxis": {"type": "value", "name": found.title, "scale": True},
        "yAxis": {
            "type": "category",
            "data": labels,
            "inverse": True,
            "splitLine": {"show": True},
            "axisLabel": {"width": 420, "overflow": "truncate"},
        },
        "series": [*whiskers(found.title, ends, 0), points(found.title, data, 0, symbolSize=10, z=4)],
        "tooltip": {"trigger": "item"},
    }
