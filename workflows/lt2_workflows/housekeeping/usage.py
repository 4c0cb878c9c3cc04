"""What takes the room in a storage root."""

from __future__ import annotations

import logging
from collections import defaultdict
from collections.abc import Iterable
from typing import TYPE_CHECKING, Any

from lt2_workflows.engine.record_files import UnreadableRecordError
from lt2_workflows.engine.records import UNREADABLE, step_state
from lt2_workflows.housekeeping.dags import read_dag, users_of

if TYPE_CHECKING:
    from lt2_platform.storage import Storage

log = logging.getLogger(__name__)


def usage(storage: Storage) -> list[dict[str, Any]]:
    """[{"what", "bytes", "files", "state", "ended", "workflows"}], largest first: a row for every step and every run
    folder of torchrun, and one for each other kind of file. workflows: the ids of those that have the step, as far as
    their records are readable; of one that is not, the log says so.
    """
    dags = {}
    for workflow_id in storage.list("workflows"):
        try:
            dags[workflow_id] = read_dag(storage, workflow_id)
        except UnreadableRecordError as error:
            log.warning("%s", error)
    users = {f"steps/{step_id}": ids for step_id, ids in users_of(dags).items()}
    files: dict[str, dict[str, int]] = defaultdict(dict)
    for path, size in storage.sizes().items():
        files[_what(path)][path] = size
    for what in [what for what, sizes in files.items() if what not in users and is_deleted(sizes)]:
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


def is_deleted(files: Iterable[str]) -> bool:
    """Whether these files of a step are the leases of its deletions alone."""
    return all(path.endswith("/lease.json") for path in files)
