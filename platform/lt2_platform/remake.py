"""What an error tells the user to do about a folder that is damaged or gone.

A finished step does not run again, so where the folder is a step's output the step's record has to go first.
"""

from __future__ import annotations

import re
import shlex
from collections.abc import Collection

from lt2_platform.storage import S3, Storage

_IN_A_STEP = re.compile(r"(?P<step>.*/steps/[^/]+)(/out(/.*)?)?")


def remaking(uri: str, otherwise: str, *, made_by: Collection[str] = ()) -> str:
    """What makes the folder `uri` anew: for (a part of) a step's folder its workflow, for any other `otherwise`.

    made_by: the types of the steps that make such a thing. Of another's nothing is gone: the wrong one was named.
    """
    found = _IN_A_STEP.fullmatch(Storage(uri).root)
    if found is None:
        return otherwise
    step = Storage(found["step"])
    if made_by and _type_of(step) not in (None, *made_by):
        return otherwise
    if step.exists("done.json"):
        return f"remove the finished step's folder ({_removal(step.root)}) and run its workflow again"
    return "its step has not finished: run its workflow" if step.exists("spec.json") else otherwise


def _type_of(step: Storage) -> str | None:
    try:
        return step.read_json("spec.json").get("config", {}).get("type")
    except (FileNotFoundError, ValueError):
        return None


def _removal(folder: str) -> str:
    command = "aws s3 rm --recursive" if folder.startswith(S3) else "rm -r"
    return f"{command} {shlex.quote(folder)}"
