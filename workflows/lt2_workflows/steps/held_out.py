"""Whether the held-out text that a model is evaluated on may have been in its training.

Documents are held out by their hash, so datasets of one seed and fraction hold out the same ones, whatever their rows'
length. Datasets that differ in these share text between one's training and the other's held-out split.
"""

from __future__ import annotations

from collections.abc import Iterator

from lt2_platform.data.sources.configs import paths_of
from lt2_workflows.engine.context import StepContext
from lt2_workflows.graph import Ref
from lt2_workflows.steps.prepare import PrepareStep
from lt2_workflows.steps.refs import CheckpointRef, DatasetRef


def held_out_remark(checkpoint: CheckpointRef | str, data: DatasetRef | str, context: StepContext) -> str:
    """Which training data of a checkpoint's steps has text of `data` and holds out other documents of it; "" for none,
    and where steps of this workflow do not tell."""
    own = context.workflow.configs[data.step] if isinstance(data, Ref) else None
    if not isinstance(own, PrepareStep) or not isinstance(data, Ref):
        return ""
    for name in dict.fromkeys(trained_on(checkpoint, context)):
        other = context.workflow.configs[name]
        if name == data.step or not isinstance(other, PrepareStep):
            continue
        shared = [path for path in _paths(own) if any(_overlap(path, there) for there in _paths(other))]
        if shared and (why := _why(own, other, name, shared[0], context)):
            return f"HELD-OUT TEXT MAY HAVE BEEN TRAINED ON: {shared[0]} is in {name} too, {why}"
    return ""


def trained_on(checkpoint: CheckpointRef | str, context: StepContext) -> Iterator[str]:
    """The steps that made the data of a checkpoint's training, and of what it started from or learned from."""
    if not isinstance(checkpoint, Ref):
        return
    config = context.workflow.configs[checkpoint.step]
    data = getattr(config, "data", None)
    if isinstance(data, Ref):
        yield data.step
    for field in ("checkpoint", "start", "continue_from", "student", "teacher"):
        yield from trained_on(getattr(config, field, ""), context)


def _why(own: PrepareStep, other: PrepareStep, name: str, path: str, context: StepContext) -> str:
    """How the split of `own` differs from that of `other`, so that the first holds out what the second does not."""
    if own.seed != other.seed:
        return f"which holds out others by another seed ({other.seed}, here {own.seed}); give both the same"
    if own.tokenize != other.tokenize:
        return "which holds out others, since one of the two is tokenised while training"
    if own.validation_fraction > other.validation_fraction:
        fractions = f"{other.validation_fraction}, here {own.validation_fraction}"
        return f"which holds out fewer of it (validation_fraction {fractions}); give both the same"
    manifest = f"{context.workflow.steps[name].folder}/out/manifest.json"
    mixed = context.storage.read_json(manifest).get("mixture", []) if context.storage.exists(manifest) else []
    if any(part.get("held_out") == 0 and path in part["source"].split() for part in mixed):
        return "which by chance holds out nothing of it; raise validation_fraction of both"
    return ""


def _paths(config: PrepareStep) -> list[str]:
    return [path for part in config.parts for path in paths_of(part)]


def _overlap(one: str, other: str) -> bool:
    """Whether two paths are the same, or one lies in the other."""
    one, other = one.rstrip("/"), other.rstrip("/")
    return one == other or one.startswith(other + "/") or other.startswith(one + "/")
