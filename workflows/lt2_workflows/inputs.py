"""Are the inputs of steps there? What finished steps made, and what configs name outside the workflow.

A typo in the last step's path must not show after the first steps' hours.
"""

from __future__ import annotations

import hashlib
import inspect
import json
import os
from collections.abc import Callable, Iterable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import TYPE_CHECKING, Any, get_args

from lt2.config import ConfigError
from lt2_workflows.engine.context import StepContext
from lt2_workflows.graph import STEP_TYPES, NotKnownYetError, Place, Ref, Step, StepConfig, Workflow

if TYPE_CHECKING:
    from lt2_platform.storage import Storage

# By kind of output, the file that is written last; a run's lies in each of its checkpoints.
LAST_WRITTEN = {"dataset": "manifest.json", "teacher_topk": "topk.json", "checkpoint": "COMPLETE"}


def check_inputs(workflow: Workflow, storage: Storage, pending: Iterable[Step]) -> None:
    """Raise ConfigError, with a line for each, when inputs of the steps of `pending` are not there or do not fit."""
    pending = list(pending)
    if found := problems(workflow, storage, pending) or conflicts(workflow, storage, pending):
        raise ConfigError("\n".join(found))


def check_settings(pending: Iterable[Step]) -> None:
    """Raise ConfigError for what a step's type refuses whatever its inputs are."""
    for step in pending:
        if (refuse := STEP_TYPES[step.config.type].check) is not None:
            refuse(step.config)


def problems(workflow: Workflow, storage: Storage, pending: Iterable[Step], *, elsewhere: bool = False) -> list[str]:
    """What is wrong with the inputs of the steps of `pending`, as seen from here: "step.field: what and what to do".

    What the steps need is finished or among them. elsewhere: they will run on other machines, in a folder of their own.
    """
    pending = list(pending)
    named: dict[tuple[str, Callable[[str], object]], list[str]] = {}
    for step in pending:
        context = StepContext(storage, workflow, step)
        for place in places_of(step.config, context):
            named.setdefault((place.uri, place.look), []).append(f"{step.name}.{place.field}")
    with ThreadPoolExecutor(16) as pool:
        texts = list(pool.map(lambda each: _problem(*each, elsewhere=elsewhere), named))
    fields: dict[str, dict[str, None]] = {}  # by what is wrong with them
    for (uri, _), names, text in zip(named, named.values(), texts, strict=True):
        if text:
            text += f"; to read the step of that name, refer to it: {{step: {uri}}}" * (uri in workflow.configs)
            fields.setdefault(text, {}).update(dict.fromkeys(names))
    lines = [f"{', '.join(names)}: {text}" for text, names in fields.items()]
    return [*dict.fromkeys(_gone(workflow, storage, pending)), *lines]


def conflicts(workflow: Workflow, storage: Storage, pending: Iterable[Step]) -> list[str]:
    """What does not go with its inputs, as far as they are there or known beforehand: "step: why and what to do"."""
    lines: list[str] = []
    for step in pending:
        fits = STEP_TYPES[step.config.type].fits
        if fits is None:
            continue
        try:
            fits(step.config, StepContext(storage, workflow, step))
        except NotKnownYetError:
            continue
        except ConfigError as error:
            lines.append(f"{step.name}: {error}")
    return lines


def places_of(config: StepConfig, context: StepContext) -> Iterator[Place]:
    """Everything outside the workflow that a step reads: paths where references may stand, and what its type adds."""
    for name, field in type(config).model_fields.items():
        value = getattr(config, name)
        for kind in get_args(field.annotation) if isinstance(value, str) else ():
            if inspect.isclass(kind) and issubclass(kind, Ref) and kind.accepts in LOOKS:
                yield Place(name, value, LOOKS[kind.accepts], VERSIONS.get(kind.accepts))
    more = STEP_TYPES[config.type].places
    if more is not None:
        yield from more(config, context)


def _gone(workflow: Workflow, storage: Storage, pending: Sequence[Step]) -> Iterator[str]:
    """The finished steps that `pending` needs and whose output is gone, whatever their records say."""
    from lt2_platform.remake import remaking

    unfinished = {step.name for step in pending}
    for name in dict.fromkeys(need for step in pending for need in step.needs):
        step = workflow.steps[name]
        if name in unfinished or _is_there(storage, step):
            continue
        out, file = storage.join(step.folder, "out"), LAST_WRITTEN[step.config.produces]
        yield f"step {name} is done, but its {step.config.produces} is gone (no {file} in {out}); {remaking(out, '')}"


def _is_there(storage: Storage, step: Step) -> bool:
    out, file = f"{step.folder}/out", LAST_WRITTEN.get(step.config.produces)
    if file is None:
        return True
    if step.config.produces != "checkpoint":
        return storage.exists(f"{out}/{file}")
    folder = f"{out}/checkpoints"
    return any(storage.exists(f"{folder}/{name}/{file}") for name in reversed(storage.list(folder)))


def _problem(uri: str, look: Callable[[str], object], *, elsewhere: bool) -> str | None:
    from lt2_platform.storage_errors import STORAGE_ERRORS, out_of_reach

    if elsewhere and "://" not in uri and not os.path.isabs(os.path.expanduser(uri)):
        return f"{uri} is relative, and a job has a folder of its own; give a full path that all nodes reach, or s3://"
    try:
        look(uri)
    except json.JSONDecodeError as error:
        return f"{uri} is damaged: a file of it is not JSON ({error})"
    except ConfigError as error:
        return str(error)
    except STORAGE_ERRORS as error:
        return out_of_reach(uri, error)
    return None


def _dataset(uri: str) -> Any:
    from lt2_platform.data.stream import load_manifest

    return load_manifest(uri)


def _checkpoint(uri: str) -> Any:
    from lt2_platform.train.checkpoints.checkpoint import resolve

    return resolve(uri)


def _pack(uri: str) -> Any:
    from lt2_platform.evaluate.harness.tasks.packs import read_manifest

    return read_manifest(uri)


def _top_k(uri: str) -> None:
    from lt2_platform.remake import remaking
    from lt2_platform.storage import Storage

    if not Storage(uri).exists(LAST_WRITTEN["teacher_topk"]):
        advice = remaking(uri, "give the output folder of a teacher_topk step", made_by=("teacher_topk",))
        raise ConfigError(f"{uri} holds no finished top-k (no {LAST_WRITTEN['teacher_topk']}); {advice}")


LOOKS: dict[str, Callable[[str], object]] = {
    "dataset": _dataset,
    "checkpoint": _checkpoint,
    "pack": _pack,
    "teacher_topk": _top_k,
}


def _dataset_version(uri: str) -> dict[str, str]:
    return {"the dataset": str(_dataset(uri).get("fingerprint"))}


def _checkpoint_version(uri: str) -> dict[str, str]:
    """The version of the checkpoint that `uri` means now; once its run has trained on, it means another."""
    return {"the checkpoint": _last_written(_checkpoint(uri), "checkpoint")}


def _top_k_version(uri: str) -> dict[str, str]:
    return {"the top-k": _last_written(uri, "teacher_topk")}


def _last_written(uri: str, kind: str) -> str:
    from lt2_platform.storage import Storage

    return hashlib.sha256(Storage(uri).read_bytes(LAST_WRITTEN[kind])).hexdigest()


# Of a pack only the tasks that are asked count: see task_inputs.
VERSIONS = {"dataset": _dataset_version, "checkpoint": _checkpoint_version, "teacher_topk": _top_k_version}
