"""Two evaluated models, item by item: is the difference more than chance?"""

from __future__ import annotations

import json
import math
import re
from collections.abc import Collection, Iterator, Mapping, Sequence
from typing import Any, NamedTuple, get_args

import numpy as np

from lt2.config import ConfigError
from lt2_platform.data.sources.configs import Template
from lt2_platform.evaluate.config import depth_name
from lt2_platform.evaluate.repeats import standing
from lt2_platform.evaluate.spans import difference
from lt2_platform.evaluate.student import two_sided
from lt2_platform.results.tables import flatten
from lt2_platform.storage import Storage

Item = tuple[int, str]  # number in its task, and the hash of the document
Key = tuple[str, str]  # task and metric


class Answer(NamedTuple):
    """What an item was scored, and the hash of what was asked: the item with its examples, or as it was cut.

    cut_to: tokens of the window that did not hold all of it; 0 where it was whole, None where nothing tells.
    """

    score: float
    prompt: str | None
    cut_to: int | None = None


Answers = dict[Item, Answer]
# What harness.chat.label adds to a task.
_ASKED_AS = re.compile(rf"\+([0-9]+-shot|{'|'.join(('chat', *get_args(Template)))})\b.*")


def compare(a: str, b: str, depths: tuple[str | None, str | None] = (None, None)) -> list[dict[str, Any]]:
    """Rows {task, metric, a, b, difference (b - a), stderr, p_value, n, note} over the items that both answered.

    a, b: folders (or URIs) of evaluations, with samples/*.jsonl somewhere below. The error is of the mean of paired
    differences; the p-value is two-sided: exact for right/wrong metrics (McNemar: of the items only one got right, half
    by chance), else of Student's t-test of the differences. A task that the two were asked in different ways only
    (gsm8k and gsm8k+chat, or gsm8k+0-shot) is compared all the same, and its note says so.

    depths: of a and of b, what `scores` takes.

    Raises:
        ConfigError: a folder without samples, several depths in one, or no task in common.
    """
    left, right = (scores(folder, depth) for folder, depth in zip((a, b), depths))
    rows = []
    for key in sorted(left.keys() & right.keys()):
        rows.append({"task": key[0], "metric": key[1], **paired(left[key], right[key])})
    for one, other in asked_differently(left, right):
        row = paired(left[one], {item: answer._replace(prompt=None) for item, answer in right[other].items()})
        note = "; ".join(part for part in (f"asked differently: b as {other[0]}", row["note"]) if part)
        rows.append({"task": one[0], "metric": one[1], **row, "note": note})
    if not rows:
        tasks = [", ".join(sorted({task for task, _ in found})) for found in (left, right)]
        raise ConfigError(f"nothing to compare: {a} has {tasks[0]}; {b} has {tasks[1]}")
    return rows


def compare_losses(a: Mapping[Key, Mapping[str, Any]], b: Mapping[Key, Mapping[str, Any]]) -> list[dict[str, Any]]:
    """Rows as of `compare` of two models' stored losses by task and metric, where both are of the same text.

    The standard error is of the difference over groups of the same rows or spans (`spans.difference`), the p-value of
    Student's t-test over these groups; n counts tokens.
    """
    rows = []
    for key in sorted(a.keys() & b.keys()):
        one, other = a[key], b[key]
        named = {"task": key[0], "metric": key[1]}
        found = difference(one["groups"], other["groups"]) if one.get("data") == other.get("data") else None
        if found is None:
            rows.append({**named, "n": 0, "note": "other text, or other batches of it"})
            continue
        error, groups = found.get("stderr", math.nan), len(one["groups"].split())
        p = two_sided(abs(found["value"]) / error, groups - 1) if error else float(found["value"] == 0)
        row = {"a": one["value"], "b": other["value"], "difference": found["value"], "stderr": error, "p_value": p}
        rows.append({**named, **row, "n": found["n"], "note": ""})
    return rows


def asked_differently(left: Collection[Key], right: Collection[Key]) -> list[tuple[Key, Key]]:
    """Keys of a task and metric that both sides have, but each in one way only, and not the same."""
    plain = lambda key: (_ASKED_AS.sub("", key[0]), key[1])  # noqa: E731
    ways = [{name: [key for key in side if plain(key) == name] for name in map(plain, side)} for side in (left, right)]
    common = sorted(ways[0].keys() & ways[1].keys())
    only = [(ways[0][name], ways[1][name]) for name in common if len(ways[0][name]) == len(ways[1][name]) == 1]
    return [(a, b) for (a,), (b,) in only if a != b]


def paired(a: Answers, b: Answers) -> dict[str, Any]:
    """{a, b, difference, stderr, p_value, n, note} of one task and metric, see `compare`; {n, note} of no items."""
    common = sorted(a.keys() & b.keys())
    if not common:
        return {"n": 0, "note": "different items"}
    x, y = (np.array([side[item].score for item in common]) for side in (a, b))
    difference, n = y - x, len(common)
    stderr = float(difference.std(ddof=1) / math.sqrt(n)) if n > 1 else math.nan
    return {
        "a": float(x.mean()),
        "b": float(y.mean()),
        "difference": float(difference.mean()),
        "stderr": stderr,
        "p_value": p_value(difference, stderr),
        "n": n,
        "note": "; ".join(_notes(a, b, common)),
    }


def _notes(a: Answers, b: Answers, common: Sequence[Item]) -> Iterator[str]:
    if missing := len(a) + len(b) - 2 * len(common):
        yield f"{missing:,} items only in one"
    prompts = ((a[item].prompt, b[item].prompt) for item in common)
    if differ := sum(None not in pair and pair[0] != pair[1] for pair in prompts):
        yield f"{differ:,} of the {len(common):,} in both asked by other prompts (examples, or cut elsewhere)"
    cuts = [(a[item].cut_to, b[item].cut_to) for item in common]
    if windows := [pair for pair in cuts if None not in pair and pair[0] != pair[1]]:
        sides = ("whole" if not window else f"{window:,} tokens" for window in map(max, zip(*windows)))
        yield f"{len(windows):,} of the {len(common):,} in both cut to other windows (a {next(sides)}, b {next(sides)})"


def p_value(difference: np.ndarray, stderr: float) -> float:
    """The two-sided p-value of the hypothesis that the mean difference is 0; see `compare`."""
    # Differences that are all the same have no spread for a t-test (one item never has); their sign is still known.
    same = bool(np.ptp(difference) <= 1e-12 * np.abs(difference).max())
    if same or np.isin(difference, (-1.0, 0.0, 1.0)).all():
        better, changed = int((difference > 0).sum()), int((difference != 0).sum())
        return sign_test(min(better, changed - better), changed)
    return two_sided(abs(float(difference.mean())) / stderr, len(difference) - 1)


def sign_test(fewer: int, n: int) -> float:
    """Two-sided p-value of n fair coins of which `fewer`, at most half, fell on one side; in integers, hence exact."""
    ways = tail = 1
    for k in range(fewer):
        ways = ways * (n - k) // (k + 1)  # C(n, k + 1) from C(n, k): each anew takes minutes at 60,000 items
        tail += ways
    return min(1.0, 2 * tail / 2**n)


class NoItemsError(ConfigError):
    """There is nothing to compare, at the depth asked for."""


def own_depth(config: Mapping[str, Any]) -> str | None:
    """The folder of a run's evaluations at the depth that it was trained at, such as "loops-4", from its settings."""
    settings = flatten(config)
    loops = settings.get("model.n_loops", settings.get("n_loops"))
    halts = any(
        key.removeprefix("model.").startswith("halting") and value is not None for key, value in settings.items()
    )
    return depth_name(loops, halts) if isinstance(loops, int) else None


def scores(folder: str, depth: str | None = None) -> dict[Key, Answers]:
    """(task, metric) -> item -> answer, of the samples below a folder; see `standing` for tasks evaluated repeatedly.

    depth: only what lies in folders of this name, such as "loops-4".
    """
    storage = Storage(folder)
    paths = storage.glob(f"**/{depth}/samples/*.jsonl" if depth else "**/samples/*.jsonl")
    if not paths:
        raise NoItemsError(f"{folder} holds no evaluation with samples; run `lt2 eval` first")
    depths = {path.rsplit("/", 3)[-3]: path.rsplit("/", 2)[0] for path in paths if path.count("/") >= 2}
    if len(depths) > 1:
        raise ConfigError(
            f"{folder} holds several depths ({', '.join(sorted(depths))}); name the folder of one of them, such as "
            f"{storage.join(depths[min(depths)])}"
        )
    found: dict[Key, Answers] = {}
    for path in standing_files(storage, paths):
        for line in read_lines(storage, path):
            for metric, value in line["scores"].items():
                item = (line["doc_id"], line["doc_hash"])
                answer = Answer(float(value), line.get("prompt_hash"), line.get("cut_to"))
                found.setdefault((line["task"], metric), {})[item] = answer
    return found


def standing_files(storage: Storage, paths: Sequence[str]) -> list[str]:
    """One file per task, the one that tables and figures choose too; between equals, the one written last."""
    records: dict[str, dict[str, Any]] = {}

    def place(path: str) -> tuple[Any, ...]:
        *_, file = parts = path.split("/")  # <evaluation>/<task>/<depth>/samples/<file>
        name = "/".join([*parts[:-4], "evaluation.json"])
        if name not in records:
            records[name] = _record(storage, name)
        rows = (row for row in records[name]["rows"] if row["task"] == file.removesuffix(".jsonl"))
        row = {**next(rows, {}), "step": records[name]["step"]}
        return standing(row), storage.fs.modified(storage.join(path))

    return list({path.rsplit("/", 1)[-1]: path for path in sorted(paths, key=place)}.values())


def _record(storage: Storage, name: str) -> dict[str, Any]:
    """The record of an evaluation; one without rows where there is no such file."""
    if not storage.exists(name):
        return {"step": None, "rows": []}
    try:
        return storage.read_json(name)
    except ValueError as error:
        raise ConfigError(damaged(storage.join(name), error)) from error


def read_lines(storage: Storage, path: str) -> Iterator[dict[str, Any]]:
    try:
        for line in storage.read_bytes(path).decode().splitlines():
            yield json.loads(line)
    except ValueError as error:
        raise ConfigError(damaged(storage.join(path), error)) from error


def damaged(file: str, error: Exception) -> str:
    return f"{file} is damaged ({error}); remove its folder and run `lt2 eval` again"
