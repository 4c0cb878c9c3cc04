"""The step that packs text as tokens.

Importing this module imports neither torch nor Ray.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from functools import partial
from typing import Any, ClassVar, Literal

from lt2.config import ConfigError
from lt2_platform.data.prepare import PrepareConfig, chat_templates, prepare
from lt2_platform.data.sources.configs import STDLIB, describe, paths_of
from lt2_platform.data.sources.listing import changed_since
from lt2_platform.data.sources.paths import look_for
from lt2_platform.data.tokenizers.tokenize import change_since, load_tokenizer
from lt2_platform.data.tokenizers.tokenize import describe as tokenizer_record
from lt2_platform.remake import remaking
from lt2_platform.storage_errors import STORAGE_ERRORS
from lt2_platform.wording import amount
from lt2_workflows.engine.context import StepContext
from lt2_workflows.engine.local_ray import join_ray
from lt2_workflows.engine.records import read_done
from lt2_workflows.graph import NotKnownYetError, Place, StepConfig, step_type
from lt2_workflows.outside import USED_AS_IT_IS
from lt2_workflows.steps.refs import DatasetRef
from lt2_workflows.steps.task_inputs import pack_place


class PrepareStep(StepConfig, PrepareConfig):
    """Tokenise text and pack it into a dataset. Settings: PrepareConfig."""

    produces: ClassVar[str] = "dataset"
    uses_ray: ClassVar[bool] = True
    type: Literal["prepare"] = "prepare"

    @property
    def inner(self) -> PrepareConfig:
        return PrepareConfig.model_validate({name: getattr(self, name) for name in PrepareConfig.model_fields})


def prepare_places(config: PrepareStep, context: StepContext) -> Iterator[Place]:
    """The tokenizer's file, and every path of the source."""
    if config.tokenizer != "byte":
        yield Place("tokenizer", config.tokenizer, load_tokenizer)
    for part in config.parts:
        look = partial(look_for, format=part.format, by_extension=part.by_extension)
        yield from (Place("source", path, look) for path in paths_of(part) if path != STDLIB)
    if config.decontaminate is not None:
        yield pack_place("decontaminate.pack", config.decontaminate.pack, config.decontaminate.tasks)


def describe_prepare(config: PrepareStep, context: StepContext) -> str:
    how = ", tokenised while training" if config.tokenize == "on_the_fly" else ""
    apart = f", without what overlaps {config.decontaminate.pack}" if config.decontaminate is not None else ""
    text = f"{describe(config.source)} -> {config.tokenizer} tokens in rows of {config.seq_len:,}{how}{apart}"
    if (done := read_done(context.storage, context.step)) is not None:
        text += f": {contents(done['result']['splits'])}"
    changes = input_changes(config, context)
    return f"{text}; {changes}" if changes else text


def input_changes(config: PrepareStep, context: StepContext) -> str:
    """A finished dataset stays what it is; whoever plans with it should know that its corpus or tokenizer does not."""
    path = f"{context.step.folder}/out/manifest.json"
    if not context.storage.exists(path):
        return ""
    made = context.storage.fs.modified(context.storage.join(path)).timestamp()
    try:
        manifest = context.storage.read_json(path)
    except ValueError as error:
        advice = remaking(context.out, "run its workflow again")
        raise ConfigError(f"{context.storage.join(path)} is damaged (no JSON: {error}); {advice}") from error
    found = {
        "CORPUS": _if_in_reach(lambda: changed_since(config.parts, manifest["sources"], made)),
        "TOKENIZER": _if_in_reach(lambda: _tokenizer_changes(config.tokenizer, manifest["tokenizer"])),
    }
    told = [
        f"THE {what} HAS CHANGED since: {changes[0]}" + (f" and {len(changes) - 1:,} more" if len(changes) > 1 else "")
        for what, changes in found.items()
        if changes
    ]
    if not told:
        return ""
    return f"{'; '.join(told)}. The dataset and what was made from it {USED_AS_IT_IS}"


def _if_in_reach(changes: Callable[[], list[str]]) -> list[str]:
    try:
        return changes()
    except (ConfigError, *STORAGE_ERRORS):  # it is not here, or out of reach: the finished dataset does not need it
        return []


def _tokenizer_changes(spec: str, record: dict[str, Any]) -> list[str]:
    change = "" if spec == "byte" else change_since(spec, record)
    return [f"{spec} {change}"] if change else []


@step_type(PrepareStep, describe=describe_prepare, outdated=input_changes, places=prepare_places)
def run_prepare(config: PrepareStep, context: StepContext) -> dict[str, Any]:
    """Result: the manifest without its file lists."""
    join_ray()
    manifest = prepare(config.inner, context.out)
    if manifest["quarantine"].get("rows"):
        folder = context.storage.join(context.step.folder, "out/quarantine")
        context.progress({"notice": f"{left_out(manifest)}: {folder} says which"})
    if config.validation_fraction and not manifest["splits"]["validation"]["documents"]:
        context.progress(
            {"notice": "nothing is held out, so no evaluation can use this data: it has no two different documents"}
        )
    kept = ("documents", "sequences", "tokens", "unigram_entropy")
    splits = {name: {key: split[key] for key in kept} for name, split in manifest["splits"].items()}
    context.progress({"notice": contents(splits) + shares(manifest)})
    return {
        "tokenizer": manifest["tokenizer"],
        "seq_len": manifest["seq_len"],
        "splits": splits,
        "quarantine": manifest["quarantine"],
    }


def contents(splits: dict[str, Any]) -> str:
    """'1.2M tokens in 4,688 rows, 24.1k held out'; of what is tokenised while training only the latter is known."""
    train, held_out = (splits.get(name, {}).get("tokens") or 0 for name in ("train", "validation"))
    said = f"{amount(held_out)} tokens held out"
    return f"{amount(train)} tokens in {splits['train']['sequences']:,} rows, {said}" if train else said


def shares(manifest: dict[str, Any]) -> str:
    """How many epochs of each of its sources a mixture has, and of which nothing is held out; empty for other data."""
    mixed = manifest.get("mixture", [])
    untold = any(part.get("held_out") for part in mixed)
    parts = [
        f"{part['source']} {part['epochs']:.2f}" + " (nothing held out)" * (untold and not part.get("held_out"))
        for part in mixed
    ]
    return f"; epochs of {', of '.join(parts)}" if parts else ""


def left_out(manifest: dict[str, Any]) -> str:
    """'153 of 300 rows could not be used (unknown role)', with the commonest reasons; of what is tokenised while
    training, the rows held out are meant, which alone are read."""
    quarantine = manifest["quarantine"]
    live = any(source["documents"] is None for source in manifest["sources"])
    if live:
        used = manifest["splits"]["validation"]["documents"]
    else:
        used = sum(source["documents"] + source.get("left_out", 0) for source in manifest["sources"])
    reasons = sorted(quarantine["reasons"].items(), key=lambda item: -item[1])
    named = ", ".join(f"{count:,} {reason}" for reason, count in reasons[:3]) if len(reasons) > 1 else reasons[0][0]
    more = f", {len(reasons) - 3} other reasons" if len(reasons) > 3 else ""
    rows = f"{quarantine['rows'] + used:,} {'held-out ' * live}rows"
    return f"{quarantine['rows']:,} of {rows} could not be used ({named}{more})"


def data_templates(data: DatasetRef | str, context: StepContext) -> list[str]:
    """The templates of the conversations in a dataset, by which a model trained on it can be asked."""
    return dataset_facts(data, context, vocab_size=1)["tokenizer"].get("chat_templates", [])


def row_length(data: DatasetRef | str, context: StepContext) -> int:
    """The seq_len of a dataset's rows."""
    return dataset_facts(data, context, vocab_size=1)["seq_len"]


def dataset_facts(data: DatasetRef | str, context: StepContext, *, vocab_size: int | None) -> dict[str, Any]:
    """The dataset's manifest; before it is prepared, the part of it that its step's config determines.

    A model that gives its own vocab_size can be planned where the tokenizer's file is not. Raises NotKnownYetError for
    a dataset of another kind of step that has not run.
    """
    from lt2_platform.data.stream import load_manifest

    path = context.path(data)
    if isinstance(data, str) or context.storage.exists(context.storage.relative(path) + "/manifest.json"):
        return load_manifest(path)
    source = context.workflow.configs[data.step]
    if not isinstance(source, PrepareStep):  # a step of the user's own
        raise NotKnownYetError(f"not known before its data, step {data.step}, is there")
    if vocab_size is None:
        tokenizer = tokenizer_record(load_tokenizer(source.tokenizer))
    else:
        tokenizer = {"name": source.tokenizer, "vocab_size": vocab_size}
    return {"seq_len": source.seq_len, "tokenizer": {**tokenizer, **chat_templates(source)}}
