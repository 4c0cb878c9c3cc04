"""Checks of a task's data: that each row has a right answer and, in multiple choice, that it is among the choices.

lm-eval warns of an answer that is no choice, scores the item as wrong and goes on; -1, the label of data without
labels, it takes for the last choice. An empty answer is contained in whatever a model says.
"""

from __future__ import annotations

import ast
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

import pyarrow as pa

from lt2.config import ConfigError

SHOWN = 5
_UNLABELLED = (None, "", -1, "-1")

Row = Mapping[str, Any]
Item = tuple[Sequence[Any], Any, Any]
"""The choices, what the row says of the right one, and its index (None: it is none of them)."""


def _index(value: Any, first: int = 0) -> int | None:
    return int(value) - first if isinstance(value, int) or str(value).isdigit() else None


def _place(labels: Sequence[str], label: Any) -> int | None:
    return labels.index(label) if label in labels else None


def _lettered(row: Row) -> Item:
    key = (row["answerKey"] or "").lstrip()
    return row["choices"]["text"], row["answerKey"], _place(row["choices"]["label"], key)


def _numbered(choices: str, label: str) -> Callable[[Row], Item]:
    return lambda row: (row[choices], row[label], _index(row[label]))


def _columns(*names: str, label: str, first: int = 0) -> Callable[[Row], Item]:
    return lambda row: ([row[name] for name in names], row[label], _index(row[label], first))


def _last_problem(row: Row) -> Item:
    problem = ast.literal_eval(row["problems"])[-1]
    return problem["options"][:4], problem["answer"], _place([*"ABCD"], problem["answer"])


CHOICES = _numbered("choices", "gold")
"""Of the format of ours."""

UPSTREAM: dict[str, Callable[[Row], Item]] = {
    "arc_easy": _lettered,
    "arc_challenge": _lettered,
    "openbookqa": _lettered,
    "commonsense_qa": _lettered,
    "hellaswag": _numbered("endings", "label"),
    "mmlu": _numbered("choices", "answer"),
    "piqa": _columns("sol1", "sol2", label="label"),
    "winogrande": _columns("option1", "option2", label="answer", first=1),
    "copa": _columns("choice1", "choice2", label="label"),
    "social_iqa": _columns("answerA", "answerB", "answerC", label="label", first=1),
    "boolq": lambda row: (("no", "yes"), row["label"], _index(row["label"])),
    "race": _last_problem,
}
"""As lm-eval's definitions read them; tasks that are not here have no choices, or a column for the right one."""

NORMALISED = ("arc_easy", "arc_challenge", "openbookqa", "hellaswag", "piqa", "copa")
"""Their choices may not be empty: they are scored by length, or their first letter is changed."""

CONTAINED = {"needles": "outputs", "documents": "answers", "cloze": "answers"}
"""Formats whose score is what a continuation contains, and their column of that; upstream's have it in `value`."""
CONTAINED_UPSTREAM = ("swde", "fda", "squad_completion")


def labelled(task: str, format: str, tables: Mapping[str, pa.Table], source: str) -> dict[str, pa.Table]:
    """The splits without those of which no row has an answer (test splits that are kept secret).

    Raises ConfigError, with file and rows, for items without choices, or whose answer is empty or none of them.
    """
    kept = {split: table for split, table in tables.items() if not _is_secret(task, format, table)}
    if not kept:
        raise ConfigError(f"{task}: {source} has no answers in {', '.join(tables)}; give a split that has")
    for split, table in kept.items():
        check_rows(task, format, table, f"{task}: {source}, {split}")
    return kept


def check_rows(task: str, format: str, rows: pa.Table, where: str) -> None:
    """Raise ConfigError, beginning with `where`, for items without choices or whose answer is empty or none of them,
    and for answers that may be of different lengths."""
    found = [f"row {index}: {problem}" for index, problem in _problems(task, format, rows)]
    if found:
        more = f"; and {len(found) - SHOWN:,} more" if len(found) > SHOWN else ""
        raise ConfigError(f"{where} {'; '.join(found[:SHOWN])}{more} (rows count from 0); fix or leave them out")


def _reader(task: str, format: str) -> Callable[[Row], Item] | None:
    return CHOICES if format == "choices" else UPSTREAM.get(task) if format == "upstream" else None


def _is_secret(task: str, format: str, table: pa.Table) -> bool:
    read = _reader(task, format)
    return read is not None and all(item is not None and item[1] in _UNLABELLED for item in _items(read, table))


def _problems(task: str, format: str, table: pa.Table) -> Iterator[tuple[int, str]]:
    column = "value" if format == "upstream" and task in CONTAINED_UPSTREAM else CONTAINED.get(format)
    if column is not None:
        for index, answers in enumerate(table[column].to_pylist()):
            found = [answers] if column == "value" else answers
            if not isinstance(found, list) or not found:
                yield index, f"{column} {answers!r} is not a list of answers"
            elif not all(isinstance(answer, str) and answer.strip() for answer in found):
                yield index, f"an answer of {column} {answers!r} is empty"
        yield from _lengths(table)
        return
    read = _reader(task, format)
    if read is None:
        return
    scored_by_length = format == "choices" or task in NORMALISED
    for index, item in enumerate(_items(read, table)):
        if item is None:
            yield index, "its choices are unreadable"
            continue
        choices, answer, gold = item
        if not choices:
            yield index, "no choices"
        elif scored_by_length and not all(choices):
            yield index, f"a choice of {list(choices)} is empty"
        elif gold is None or not 0 <= gold < len(choices):
            yield index, f"the answer {answer!r} is not among the {len(choices)} choices"


def _lengths(table: pa.Table) -> Iterator[tuple[int, str]]:
    """What is wrong with the column that says how long answers may be: a task has one length."""
    lengths = table["max_new_tokens"].to_pylist() if "max_new_tokens" in table.column_names else []
    for index, length in enumerate(lengths):
        if type(length) is not int or length < 1:
            yield index, f"max_new_tokens {length!r} is not a number above 0"
        elif length != lengths[0]:
            yield index, f"max_new_tokens {length}, and row 0 has {lengths[0]}: a task has one"


def _items(read: Callable[[Row], Item], table: pa.Table) -> Iterator[Item | None]:
    """Each row as an Item; None for a row that does not have the task's form."""
    for batch in table.to_batches():
        for row in batch.to_pylist():
            try:
                yield read(row)
            except (TypeError, KeyError, IndexError, ValueError, SyntaxError):
                yield None
