"""What tasks need besides the model, of an evaluate step or while training: packs, a template to ask by, long rows."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from functools import partial

from lt2.config import ConfigError
from lt2_platform.evaluate.config import HarnessConfig, PositionsConfig, TaskConfig
from lt2_workflows.graph import Place, Ref, digest


def packs_of(tasks: Sequence[TaskConfig], field: str, pack: Ref | str | None = None) -> Iterator[Place]:
    """The packs of tasks that lm-eval scores, each with the names it is asked for.

    field: of the step's config, what holds the tasks; pack: of those that name none, the step's own.
    """
    from lt2_platform.evaluate.harness.tasks.suites import suite_tasks

    for index, task in enumerate(tasks):
        if not isinstance(task, HarnessConfig):
            continue
        place = task.pack or pack or ""
        if not isinstance(place, Ref):
            names = suite_tasks(task.suite, task.tasks)
            yield pack_place(f"{field}.{index}.pack" if task.pack or pack is None else "pack", place, names)


def pack_place(field: str, pack: str, names: Sequence[str]) -> Place:
    """A pack of which these tasks are read; without names, all that are made of text."""
    return Place(field, pack, partial(_look_for_tasks, names=names), partial(_tasks_version, names=names))


def _look_for_tasks(pack: str, names: Sequence[str]) -> None:
    from lt2_platform.evaluate.harness.tasks.packs import require

    if not pack:
        raise ConfigError(f"no pack is given for {', '.join(names)}; set one (`lt2 pack build`)")
    require(pack, names)


def _tasks_version(pack: str, names: Sequence[str]) -> dict[str, str]:
    """Digests of the tasks that are asked; others may be added to a pack meanwhile, but where all of it is read."""
    from lt2_platform.evaluate.harness.tasks.packs import read_manifest, worded

    tasks = read_manifest(pack)["tasks"]
    asked = [name for name in names if name in tasks] if names else sorted(worded(tasks))
    found = {name: digest([tasks[name].get(key) for key in ("format", "splits")]) for name in asked}
    return found if names else found | {"the list of tasks": digest(asked)}


def check_lengths(field: str, tasks: Sequence[TaskConfig], seq_len: Callable[[], int]) -> None:
    """Raise ConfigError for spans that are longer than the data's rows; `seq_len` is asked only where it matters."""
    for index, task in enumerate(tasks):
        if isinstance(task, PositionsConfig) and task.length is not None and task.length > (rows := seq_len()):
            raise ConfigError(
                f"{field}.{index}.length {task.length} is more than rows of the data hold, {rows}; prepare the "
                "documents once more with a larger seq_len, or set a smaller length"
            )


def first_by_training(tasks: Sequence[TaskConfig]) -> int | None:
    """The place of the first task that asks by the template of the model's training."""
    return next((i for i, task in enumerate(tasks) if isinstance(task, HarnessConfig) and task.chat is True), None)


def check_templates(field: str, known: Sequence[str], model: str) -> None:
    """Raise ConfigError unless a training had one template; `field` is the task, `known` are the training's."""
    if len(known) == 1:
        return
    why = f"is trained on several templates ({', '.join(known)})" if known else "is not trained on conversations"
    raise ConfigError(
        f"{field}.chat is true, and {model} {why}; name a template (chatml, llama3 or plain) to use, or leave chat out"
    )
