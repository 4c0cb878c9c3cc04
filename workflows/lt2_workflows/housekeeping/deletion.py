"""What goes with a workflow that is deleted, and what stays."""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from lt2.config import ConfigError
from lt2_platform.wording import first_of
from lt2_workflows.engine.hold import check_idle, clear, hold
from lt2_workflows.housekeeping.dags import named, read_dags, trials_of, users_of
from lt2_workflows.housekeeping.usage import is_deleted

if TYPE_CHECKING:
    from lt2_platform.storage import Storage


@dataclass(frozen=True)
class Deletion:
    """What goes with a workflow, in the order in which it goes.

    steps: ids of steps that no other workflow has. workflows: ids, the trials of its sweeps before itself.
    kept: its steps that stay, and the workflows that have them too.
    """

    steps: tuple[str, ...]
    workflows: tuple[str, ...]
    kept: dict[str, list[str]]

    @classmethod
    def of(cls, storage: Storage, name: str) -> Deletion:
        """name: as of `named`, or the id of a step that is in no workflow. Raises ConfigError for what must not go,
        too: what an unfinished workflow was told to begin with.
        """
        dags = read_dags(storage)
        first = named(storage, dags, name)
        if first is None:
            return cls._orphan(storage, name, dags)
        going = [first]
        for each in going:  # grows: the trials of a sweep that goes, which may have sweeps of their own
            others = users_of(dags, without=going)
            ours = {step_id for step_id in dags[each]["ids"].values() if step_id not in others}
            going += [trial for trial in trials_of(dags, ours) if trial not in going]
        others = users_of(dags, without=going)
        all_ = dict.fromkeys(step_id for each in going for step_id in reversed(dags[each]["ids"].values()))
        steps = tuple(step_id for step_id in all_ if step_id not in others)
        _check_unused(storage, steps, {each: dag for each, dag in dags.items() if each not in going})
        return cls(steps, tuple(reversed(going)), {each: others[each] for each in all_ if each in others})

    @classmethod
    def _orphan(cls, storage: Storage, name: str, dags: dict[str, Any]) -> Deletion:
        if users := users_of(dags).get(name):
            raise ConfigError(f"step {name} belongs to {first_of(users)}; delete that workflow")
        if "/" in name or is_deleted(storage.sizes(f"steps/{name}")):
            raise ConfigError(f"no workflow {name!r} in {storage.root}; `lt2 status` lists them")
        _check_unused(storage, (name,), dags)
        return cls((name,), (), {})


def delete(storage: Storage, deletion: Deletion, say: Callable[[str], None] = lambda what: None) -> None:
    """Delete it; after a kill the same call does the rest. `say` is called with the path of what has gone.

    The numbers of its runs stay in the results store. Raises ConfigError while a process runs one of the steps.
    """
    check_idle(storage, deletion.steps)
    for step_id in deletion.steps:
        delete_step(storage, step_id)
        say(f"steps/{step_id}")
    for workflow_id in deletion.workflows:
        storage.delete(f"workflows/{workflow_id}")
        say(f"workflows/{workflow_id}")


def delete_step(storage: Storage, step_id: str) -> None:
    """Delete a step that is idle (`check_idle`) but for one lease."""
    folder = f"steps/{step_id}"
    with hold(storage, step_id) as attempt:
        clear(storage, folder)
        for number in range(1, attempt):
            storage.delete(f"{folder}/attempts/{number}")
        storage.delete(f"{folder}/spec.json")


def _check_unused(storage: Storage, steps: tuple[str, ...], others: dict[str, Any]) -> None:
    """Paths into a step's folder in the configs of others, such as pretrain.start, are needed until those are done."""
    for workflow_id, dag in others.items():
        text = json.dumps(dag)
        named = [step_id for step_id in steps if f"steps/{step_id}" in text]
        done = all(storage.is_file(f"steps/{each}/done.json") for each in dag["ids"].values())
        if named and not done:
            raise ConfigError(f"{workflow_id} is not finished and reads steps/{named[0]}; finish or delete it first")
