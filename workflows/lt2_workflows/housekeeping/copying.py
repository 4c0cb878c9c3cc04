"""Copies workflows to another storage root, such as a team's: finished steps, and all numbers of their runs."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING

from lt2.config import ConfigError
from lt2_platform.copying import copy_files, copy_missing
from lt2_platform.results.copying import copy_runs
from lt2_workflows.engine.hold import INCOMPLETE, check_idle, hold
from lt2_workflows.engine.record_files import read_record
from lt2_workflows.engine.records import json_bytes
from lt2_workflows.housekeeping.dags import named, read_dags, trials_of

if TYPE_CHECKING:
    from lt2_platform.storage import Storage

COPIED, THERE, UNFINISHED = "copied", "there already", "not finished, left out"


def copy_workflow(
    source: Storage, target: Storage, name: str, say: Callable[[str, str], None] = lambda what, how: None
) -> None:
    """Copy a workflow, by id or name, and the trials of its sweeps. `say` is called with each path and what became of
    it.

    A step is done in `target` once all of it is there, so whoever runs the recipe there goes on from it. After a kill
    the same call does the rest. Raises ConfigError for no such workflow, and while a process runs one of the steps in
    `target`.
    """
    dags = read_dags(source)
    first = named(source, dags, name)
    if first is None:
        raise ConfigError(f"no workflow {name!r} in {source.root}; `lt2 status` lists them")
    chosen = [first]
    for each in chosen:  # grows
        chosen += [trial for trial in trials_of(dags, dags[each]["ids"].values()) if trial not in chosen]
    step_ids = dict.fromkeys(step_id for each in chosen for step_id in dags[each]["ids"].values())
    finished = [step_id for step_id in step_ids if source.is_file(f"steps/{step_id}/done.json")]
    missing = [step_id for step_id in finished if not target.is_file(f"steps/{step_id}/done.json")]
    check_idle(target, missing)
    for step_id in step_ids:
        if step_id in missing:
            _copy_step(source, target, step_id)
        say(f"steps/{step_id}", COPIED if step_id in missing else THERE if step_id in finished else UNFINISHED)
    copy_runs(source, target, finished)
    for step_id in finished:  # answers to single items, which `lt2 compare` reads
        copy_missing(source, target, f"evals/{step_id}")
    for workflow_id in reversed(chosen):
        copy_files(source, target, source.sizes(f"workflows/{workflow_id}"))
        say(f"workflows/{workflow_id}", COPIED)


def _copy_step(source: Storage, target: Storage, step_id: str) -> None:
    folder = f"steps/{step_id}"
    done = read_record(source, f"{folder}/done.json")
    assert done is not None
    with hold(target, step_id) as attempt:
        if target.is_file(f"{folder}/done.json"):  # an attempt there has ended since we looked
            target.delete(f"{folder}/{INCOMPLETE}")
            return
        target.delete(f"{folder}/out")  # of attempts that did not end
        paths = source.sizes(f"{folder}/out")
        copy_files(source, target, paths)
        if target.sizes(f"{folder}/out") != paths:
            raise RuntimeError(f"{source.join(folder, 'out')} changed while it was copied; copy it again")
        for name in ("log", "state.json"):
            if source.is_file(old := f"{folder}/attempts/{done['attempt']}/{name}"):
                target.write_bytes(f"{folder}/attempts/{attempt}/{name}", source.read_bytes(old))
        target.create_exclusive(f"{folder}/spec.json", source.read_bytes(f"{folder}/spec.json"))
        target.delete(f"{folder}/{INCOMPLETE}")
        target.create_exclusive(f"{folder}/done.json", json_bytes(done | {"attempt": attempt}))
