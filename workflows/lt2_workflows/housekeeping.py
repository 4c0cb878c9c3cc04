"""What takes the room in a storage root, and what goes with a workflow that is deleted."""

from __future__ import annotations

import json
import logging
from collections import defaultdict
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from lt2.config import ConfigError
from lt2_platform.wording import first_of
from lt2_workflows.engine.hold import check_idle, clear, hold
from lt2_workflows.engine.record_files import UnreadableRecordError, read_record
from lt2_workflows.engine.records import UNREADABLE, step_state

if TYPE_CHECKING:
    from lt2_platform.storage import Storage

log = logging.getLogger(__name__)


def usage(storage: Storage) -> list[dict[str, Any]]:
    """[{"what", "bytes", "files", "state", "ended", "workflows"}], largest first: a row for every step and every run
    folder of torchrun, and one for each other kind of file. workflows: the ids of those that have the step, as far as
    their records are readable; of one that is not, the log says so.
    """
    users: dict[str, list[str]] = defaultdict(list)
    for workflow_id in storage.list("workflows"):
        try:
            ids = _dag(storage, workflow_id)["ids"]
        except UnreadableRecordError as error:
            log.warning("%s", error)
            continue
        for step_id in ids.values():
            users[f"steps/{step_id}"].append(workflow_id)
    files: dict[str, dict[str, int]] = defaultdict(dict)
    for path, size in storage.sizes().items():
        files[_what(path)][path] = size
    for what in [what for what, sizes in files.items() if what not in users and _is_deleted(sizes)]:
        files["what is left of deleted steps"] |= files.pop(what)
    rows = [{"what": what, "bytes": sum(sizes.values()), "files": len(sizes)} for what, sizes in files.items()]
    for row in rows:
        kind, _, name = row["what"].partition("/")
        state = _state(storage, row["what"]) if kind == "steps" and name else {}
        row |= {"state": state.get("state"), "ended": state.get("ended"), "workflows": users.get(row["what"], [])}
    return sorted(rows, key=lambda row: (-row["bytes"], row["what"]))


def _state(storage: Storage, folder: str) -> dict[str, Any]:
    try:
        return step_state(storage, folder)
    except UnreadableRecordError:
        return {"state": UNREADABLE}


def _what(path: str) -> str:
    """The row that a file counts for."""
    kind, *rest = path.split("/")
    if kind == "runs":
        return f"runs/{rest[0]}" if rest[1:2] == ["checkpoints"] else "numbers"
    if kind == "steps" and len(rest) > 1:
        return f"steps/{rest[0]}"
    return {"results": "numbers", "evals": "answers of evaluations", "workflows": "records of workflows"}.get(
        kind, kind
    )


def read_dags(storage: Storage) -> dict[str, Any]:
    """The records of all workflows by id. Raises ConfigError for a damaged one: nobody knows what it needs."""
    return {workflow_id: _dag(storage, workflow_id) for workflow_id in storage.list("workflows")}


def named(storage: Storage, dags: dict[str, Any], name: str) -> str | None:
    """The workflow of this id or name; None if there is none. Raises ConfigError for several of one name, and for a
    sweep's trial, which belongs to the sweep."""
    mine = [name] if name in dags else [each for each, dag in dags.items() if name == dag["workflow"]]
    if len(mine) > 1:
        raise ConfigError(f"{len(mine)} workflows are called {name}: {first_of(mine)}; give the id of one")
    whole = {step_id for dag in dags.values() if not dag.get("part_of") for step_id in dag["ids"].values()}
    if mine and (sweep := dags[mine[0]].get("part_of")) in whole:
        raise ConfigError(f"{mine[0]} is a trial of the sweep {sweep} in {storage.root}; give that one's workflow")
    return mine[0] if mine else None


def _is_deleted(files: Iterable[str]) -> bool:
    """Whether these files of a step are the leases of its deletions alone."""
    return all(path.endswith("/lease.json") for path in files)


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
            others = _users(dags, without=going)
            ours = {step_id for step_id in dags[each]["ids"].values() if step_id not in others}
            going += [other for other, dag in dags.items() if dag.get("part_of") in ours and other not in going]
        others = _users(dags, without=going)
        all_ = dict.fromkeys(step_id for each in going for step_id in reversed(dags[each]["ids"].values()))
        steps = tuple(step_id for step_id in all_ if step_id not in others)
        _check_unused(storage, steps, {each: dag for each, dag in dags.items() if each not in going})
        return cls(steps, tuple(reversed(going)), {each: others[each] for each in all_ if each in others})

    @classmethod
    def _orphan(cls, storage: Storage, name: str, dags: dict[str, Any]) -> Deletion:
        if users := _users(dags, without=[]).get(name):
            raise ConfigError(f"step {name} belongs to {first_of(users)}; delete that workflow")
        if "/" in name or _is_deleted(storage.sizes(f"steps/{name}")):
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


def _dag(storage: Storage, workflow_id: str) -> dict[str, Any]:
    return read_record(storage, f"workflows/{workflow_id}/dag.json") or {"workflow": workflow_id, "ids": {}}


def _users(dags: dict[str, Any], without: list[str]) -> dict[str, list[str]]:
    """By step id, the workflows that have it."""
    users: dict[str, list[str]] = defaultdict(list)
    for workflow_id, dag in dags.items():
        for step_id in dag["ids"].values() if workflow_id not in without else ():
            users[step_id].append(workflow_id)
    return users


def _check_unused(storage: Storage, steps: tuple[str, ...], others: dict[str, Any]) -> None:
    """Paths into a step's folder in the configs of others, such as pretrain.start, are needed until those are done."""
    for workflow_id, dag in others.items():
        text = json.dumps(dag)
        named = [step_id for step_id in steps if f"steps/{step_id}" in text]
        done = all(storage.is_file(f"steps/{each}/done.json") for each in dag["ids"].values())
        if named and not done:
            raise ConfigError(f"{workflow_id} is not finished and reads steps/{named[0]}; finish or delete it first")
