"""The records of workflows: which there are, what they are called, and which have a step."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Collection
from typing import TYPE_CHECKING, Any

from lt2.config import ConfigError
from lt2_platform.wording import first_of
from lt2_workflows.engine.record_files import read_record

if TYPE_CHECKING:
    from lt2_platform.storage import Storage


def read_dags(storage: Storage) -> dict[str, Any]:
    """The records of all workflows by id. Raises ConfigError for a damaged one: nobody knows what it needs."""
    return {workflow_id: read_dag(storage, workflow_id) for workflow_id in storage.list("workflows")}


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


def read_dag(storage: Storage, workflow_id: str) -> dict[str, Any]:
    """A workflow's record. Raises ConfigError for a damaged one."""
    return read_record(storage, f"workflows/{workflow_id}/dag.json") or {"workflow": workflow_id, "ids": {}}


def users_of(dags: dict[str, Any], without: Collection[str] = ()) -> dict[str, list[str]]:
    """By step id, the workflows that have it."""
    users: dict[str, list[str]] = defaultdict(list)
    for workflow_id, dag in dags.items():
        for step_id in dag["ids"].values() if workflow_id not in without else ():
            users[step_id].append(workflow_id)
    return users


def trials_of(dags: dict[str, Any], step_ids: Collection[str]) -> list[str]:
    """The workflows that are trials of these steps, which are sweeps."""
    return [workflow_id for workflow_id, dag in dags.items() if dag.get("part_of") in step_ids]
