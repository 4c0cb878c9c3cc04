"""What a step reads from outside its workflow: noted in its done record, and compared when it is skipped later.

Only what its identity knows by a path alone: what other steps made has an identity, and resources have no part in one.
"""

from __future__ import annotations

import hashlib
from collections.abc import Mapping
from contextlib import suppress
from pathlib import Path
from typing import Any

from lt2.config import ConfigError
from lt2_platform.source_files import python_sources
from lt2_platform.storage_errors import STORAGE_ERRORS
from lt2_workflows.engine.context import StepContext
from lt2_workflows.graph import STEP_TYPES
from lt2_workflows.inputs import places_of

USED_AS_IT_IS = "are used as they are; to start afresh, rename what has changed or use another --storage"


def note(context: StepContext) -> dict[str, dict[str, str]]:
    """Digests of what the step reads, by the place as the config names it: {"packs/a": {"arc_easy": "3f…"}}.

    What is out of reach is left out: a step that needs it says so, and a finished one does not need it.
    """
    found: dict[str, dict[str, str]] = {}
    for source in python_sources(context.step.config.model_dump(mode="json", exclude={"resources"})):
        with suppress(OSError):
            found[source] = {"the code": hashlib.sha256(Path(source).expanduser().read_bytes()).hexdigest()}
    with suppress(ConfigError, *STORAGE_ERRORS):
        for place in places_of(context.step.config, context):
            if place.version is not None and not place.field.startswith("resources."):
                with suppress(ConfigError, *STORAGE_ERRORS):
                    found.setdefault(place.uri, {}).update(place.version(place.uri))
    return found


def stale(context: StepContext, done: Mapping[str, Any]) -> str:
    """What has changed since the step with this done record finished, by the record's notes or as the step itself
    tells; "" if nothing has."""
    outdated = STEP_TYPES[context.step.config.type].outdated
    return changes(context, done.get("read", {})) or (outdated(context.step.config, context) if outdated else "")


def changes(context: StepContext, noted: Mapping[str, Mapping[str, str]]) -> str:
    """One line on what has changed since it was `noted`; "" if nothing has."""
    now = note(context) if noted else {}
    told = [
        f"{part} in {uri} {'has other content' if part in now[uri] else 'is gone'}"
        for uri, parts in noted.items()
        for part, digest in parts.items()
        if now.get(uri) and now[uri].get(part) != digest
    ]
    if not told:
        return ""
    more = f" and {len(told) - 1:,} more" if len(told) > 1 else ""
    return f"ITS INPUT HAS CHANGED since: {told[0]}{more}. Its result and what was made from it {USED_AS_IT_IS}"
