"""Is what finished steps made still there? Their records say that they are done, whatever became of their files."""

from __future__ import annotations

from collections.abc import Iterable
from typing import TYPE_CHECKING

from lt2.config import ConfigError
from lt2_workflows.graph import Step, Workflow
from lt2_workflows.records import read_done

if TYPE_CHECKING:
    from lt2_platform.storage import Storage

# By kind of output, the file that is written last; a run's lies in each of its checkpoints.
LAST_WRITTEN = {"dataset": "manifest.json", "teacher_topk": "topk.json", "checkpoint": "COMPLETE"}


def check_inputs(workflow: Workflow, storage: Storage, pending: Iterable[Step]) -> None:
    """Raise ConfigError when a step of `pending` needs the output of a finished one and that is gone."""
    from lt2_platform.remake import remaking

    for name in dict.fromkeys(need for step in pending for need in step.needs):
        step = workflow.steps[name]
        if read_done(storage, step) is None or _is_there(storage, step):
            continue
        out, file = storage.join(step.folder, "out"), LAST_WRITTEN[step.config.produces]
        raise ConfigError(
            f"step {name} is done, but its {step.config.produces} is gone (no {file} in {out}); {remaking(out, '')}"
        )


def _is_there(storage: Storage, step: Step) -> bool:
    out, file = f"{step.folder}/out", LAST_WRITTEN.get(step.config.produces)
    if file is None:
        return True
    if step.config.produces != "checkpoint":
        return storage.exists(f"{out}/{file}")
    folder = f"{out}/checkpoints"
    return any(storage.exists(f"{folder}/{name}/{file}") for name in reversed(storage.list(folder)))
