"""What students keep of the model they were distilled from."""

from __future__ import annotations

from typing import Any

from lt2.config import ConfigError
from lt2_dashboards.figures.figure import Figure
from lt2_dashboards.figures.parts.dots import dots
from lt2_dashboards.figures.parts.names import told_apart
from lt2_dashboards.figures.parts.store import evaluated, rows_of
from lt2_dashboards.queries import Source
from lt2_platform.distill.retention import is_score, retained

STUDENTS = 6  # drawn by themselves, newest first


def distillation(source: Source, *, teacher: str = "", runs: list[str] | None = None) -> Figure:
    """Each student's scores as a share of its teacher's, task by task (inverted where lower is better).

    By default the newest distilled runs and the teacher that they name; any two evaluated runs can be compared so.
    """
    snapshot = source.snapshot()
    distances = _distances(source)
    wanted = runs if runs is not None else list(distances)
    named = teacher or next(
        (str(row["teacher"]) for run in wanted if (row := distances.get(run, {})).get("teacher")), ""
    )
    by_run = {run.run: run for run in evaluated(snapshot)}
    if teacher and teacher not in by_run:
        raise ConfigError(f"no evaluation of {teacher[:60]!r}; evaluate the teacher on the students' tasks first")
    theirs = by_run.get(named)
    before = theirs.scores if theirs is not None else {}
    students = [by_run[run] for run in wanted if run in by_run and run != named]
    students = [run for run in students if set(run.scores) & set(before)][: None if runs is not None else STUDENTS]
    tasks = [key for key in before if is_score(key[1]) and any(key in run.scores for run in students)]
    kept = {key: [_share(key[1], before[key], run.scores.get(key)) for run in students] for key in tasks}
    drawn = [key for key in tasks if any(share is not None for share in kept[key])]
    names = told_apart(snapshot, [run.run for run in students])
    shares = {names[run.run]: [kept[key][place] for key in drawn] for place, run in enumerate(students)}
    errors = {names[run.run]: [_share_error(before[key], run.errors.get(key)) for key in drawn] for run in students}
    option = dots([_label(key) for key in drawn], {}, shares, unit="% of the teacher's score", errors=errors)
    if drawn:
        _mark_teacher(option, shares, errors)
    elif tasks:
        option["empty"] = "The teacher scores 0 on all tasks of its students, so there is nothing to keep."
    elif named or not wanted:
        option["empty"] = "No distilled run has been evaluated on its teacher's tasks yet."
    else:
        option["empty"] = "These runs do not say who their teacher is: give teacher=RUN."
    rows: list[list[Any]] = []
    for place, run in enumerate(students):
        for key in tasks:
            error = _share_error(before[key], run.errors.get(key))
            rows.append([run.run, "this store", *key, before[key], run.scores.get(key), kept[key][place], error])
    rows += [
        [run, "this store", "distillation", "KL to the teacher (nats/token)", 0.0, row.get("value"), None, None]
        for run, row in distances.items()
        if run in wanted
    ]
    notes = [f"Teacher: {named}."] if before else []
    if drawn and (nothing := [_label(key) for key in tasks if key not in drawn]):
        notes.append(f"Not drawn, because the teacher scores 0: {'; '.join(nothing)}.")
    notes.append(
        "Paper: Figure 10 draws this for the distilled 1.4B model without printing numbers. Chance is not subtracted."
    )
    if any(error is not None for each in errors.values() for error in each):
        notes.append("Bars and ± are the student's standard error; the teacher's score is taken as exact.")
    columns = ["run", "source", "task", "metric", "teacher", "student", "kept (%)", "kept ±"]
    produce = "" if tasks else "lt2 run distill_small"
    return Figure("Distillation: what is kept (%)", option, columns, lambda: rows, notes, produce=produce)


def _mark_teacher(
    option: dict[str, Any], shares: dict[str, list[float | None]], errors: dict[str, list[float | None]]
) -> None:
    """Draw the teacher's line at 100 %, and make the axis reach it, which it would not do for the line alone."""
    option["series"][0]["markLine"] = {"data": [{"xAxis": 100}]}
    known = [
        (share, error or 0.0) for run in shares for share, error in zip(shares[run], errors[run]) if share is not None
    ]
    if max(share + error for share, error in known) < 100:
        option["xAxis"] |= {"max": 100, "axisLabel": {"showMaxLabel": True}}
    elif min(share - error for share, error in known) > 100:
        option["xAxis"]["min"] = 100


def _distances(source: Source) -> dict[str, dict[str, Any]]:
    """{run: the row of its distance to its teacher on held-out text}, newest first."""
    return dict(rows_of(source.snapshot(), "e.name = 'distillation' AND e.metric = 'teacher_kl'"))


def _label(key: tuple[str, str]) -> str:
    task, metric = key
    return task if task == metric else f"{task}, {metric}"


def _share(metric: str, teacher: float, student: float | None) -> float | None:
    """Percent; None where the student has no such score or the teacher has nothing to keep."""
    kept = None if student is None else retained(metric, teacher, student)
    return None if kept is None else 100 * kept


def _share_error(teacher: float, error: float | None) -> float | None:
    """Percent of the teacher's score; standard errors are stored of scores of which more is better."""
    return None if error is None or not teacher else 100 * error / teacher
