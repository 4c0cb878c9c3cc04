"""Which result a figure over many runs is about, of which of them, and whether it is one quantity in all of them."""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping
from dataclasses import dataclass

from lt2_dashboards.figures.parts.names import titled
from lt2_dashboards.figures.parts.store import rows_of
from lt2_dashboards.figures.parts.texts import PER_TOKEN, text_notes
from lt2_dashboards.queries import RESULT, Snapshot, Source
from lt2_dashboards.runs.silent import moment
from lt2_dashboards.runs.table import how_many, matching, unusable
from lt2_platform.results.store import RunInfo
from lt2_platform.results.tables import depths_of, objective_of
from lt2_platform.wording import first_of

MAX_RUNS = 1_000
# What runs are ranked by unless another result is asked for: the first of these that half of them have. Training losses
# come last: runs that do not minimise the same cannot be compared by them, and are by whichever other one they have.
RESULTS = ("validation/perplexity/perplexity", "validation_loss", "loss")
LOWER_IS_BETTER = re.compile(
    r"loss|ppl|perplexity|kl|^ce$|grad_norm|_time|wait|stall|bytes|memory|spikes|flops", re.IGNORECASE
)


@dataclass(frozen=True)
class Chosen:
    """`runs` have a finite value of `metric`, called `title`, newest first, and differ in the settings `varying`;
    `refused` says why their values are not one quantity, "" where they are."""

    metric: str
    title: str
    runs: list[tuple[str, float]]
    varying: list[str]
    notes: list[str]
    refused: str


def choose(source: Source, q: str, metric: str) -> Chosen:
    """The runs that match `q` by `metric`, or by one of RESULTS for "". Raises ConfigError for a bad filter."""
    snapshot, at = source.snapshot(), moment(source)
    having = {} if metric else how_many(snapshot, at=at, q=q, metrics=RESULTS)
    metric = metric or _default(having)
    runs, varying = matching(snapshot, at=at, q=q, metric=metric, limit=MAX_RUNS)
    names = [run for run, _ in runs]
    notes, refused = [], ""
    if lost := unusable(snapshot, at=at, q=q, metric=metric):
        notes.append(f"Left out, because their value is NaN or infinite: {first_of(lost)}.")
    infos = list(snapshot.runs(names).values()) if metric in ("loss", "ce") else []
    if differ := _differ(infos, metric):
        if any(having.get(name) for name in RESULTS[:-1]):  # nobody has asked for the loss
            return choose(source, q, max(RESULTS[:-1], key=lambda name: having[name]))
        refused = (
            f"{differ}, so their losses are not comparable. Choose validation_loss or an evaluation as the result, "
            "or filter by objective.type or objective.loops."
        )
    elif metric == "loss":
        notes += mixed_losses(infos)
    if PER_TOKEN.search(metric):
        notes += _scales(snapshot, names, metric)
    if "/" not in metric and (still := _unfinished(snapshot, names)):
        notes.append(f"{still} {'run' if still == 1 else 'runs'} did not finish; the last logged value is shown.")
    return Chosen(metric, titled(metric, infos), runs, varying, notes, refused)


def _default(having: Mapping[str, int]) -> str:
    """Of RESULTS the first that half of the runs have; `having` says how many have each."""
    seen = {name: min(having[name], MAX_RUNS) for name in RESULTS}
    most = max(seen.values())
    return next(name for name in RESULTS if 2 * seen[name] >= most) if most else RESULTS[-1]


def _differ(runs: Iterable[RunInfo], metric: str) -> str:
    """What makes a training loss, or cross entropy, of these runs several quantities; "" where it is one."""
    kinds = sorted({objective_of(run.config) if metric == "loss" else depths_of(run.config) for run in runs})
    if len(kinds) < 2:
        return ""
    if metric == "loss":
        return f"These runs minimise different things ({', '.join(kinds)})"
    return f"Steps of these runs have different depths ({', '.join(kind or 'all loops' for kind in kinds)})"


def mixed_losses(runs: Iterable[RunInfo]) -> list[str]:
    """The notes on training losses that are not one quantity; none where they are."""
    runs = [run for run in runs if not run.elsewhere]  # those models have no training loss here
    kinds = sorted({objective_of(run.config) for run in runs})
    if len(kinds) > 1:
        return [f"Losses of different objectives ({', '.join(kinds)}) are not comparable."]
    more = [run.run_id for run in runs if _holds_more(run)]
    if not more or len(more) == len(runs):
        return []
    return [
        f"The loss of {first_of(more)} is more than cross entropy: mixers (DSA's indexer) or halting add "
        "terms. Across these runs compare ce, or a validation result."
    ]


def _holds_more(run: RunInfo) -> bool:
    loss, ce = (run.last[name][1] if name in run.last else None for name in ("loss", "ce"))
    return loss is not None and ce is not None and abs(loss - ce) > 1e-3 * abs(ce)


def _scales(snapshot: Snapshot, runs: list[str], metric: str) -> list[str]:
    """The notes on losses and perplexities of different text: of what evaluations say, else of what runs trained on."""
    found = rows_of(snapshot, f"{RESULT} = ?", [metric], runs=runs) if "/" in metric else []  # else it was logged
    notes, told = text_notes(found), {run for run, row in found if row.get("data")}
    if told != set(runs) and len(_settings(snapshot, runs, "data.fingerprint", "")) > 1:
        notes.append(
            "These runs read different data (data.fingerprint): losses and perplexities of different texts "
            "or tokenizers are not comparable."
        )
    return notes


def _settings(snapshot: Snapshot, runs: list[str], key: str, missing: str) -> list[str]:
    """The different values of a setting; `missing` is that of runs that do not say."""
    found = snapshot.query(
        "SELECT DISTINCT coalesce(c.text, ?) FROM (SELECT unnest(?) AS run) r "
        "LEFT JOIN config c ON c.run = r.run AND c.key = ? ORDER BY 1",
        [missing, runs, key],
    )
    return [text for (text,) in found]


def _unfinished(snapshot: Snapshot, runs: list[str]) -> int:
    found = snapshot.query("SELECT count(*) FROM runs WHERE list_contains(?, run) AND state <> 'finished'", [runs])
    return found[0][0]
