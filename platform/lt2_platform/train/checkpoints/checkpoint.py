"""Sharded checkpoints that a kill at any moment cannot spoil.

    <folder>/step-00000100/__<rank>_0.distcp   tensors, each rank its own shards (torch.distributed.checkpoint)
    <folder>/step-00000100/.metadata           where every tensor's pieces are
    <folder>/step-00000100/checkpoint.json     schema version, model config, tokenizer, train config, TrainState
    <folder>/step-00000100/tokenizer/…         the tokenizer's files, unless it is the built-in one
    <folder>/step-00000100/COMPLETE            sizes and sha256 of all of the above; written last

A folder without COMPLETE does not exist for readers. The optimizer is keyed by parameter name and tensors are stored
whole-shaped, so any number of workers can load what any other number saved. Works with or without a process group;
functions marked "collective" must be called by all of its ranks. Knows nothing of Ray.
"""

from __future__ import annotations

import hashlib
import json
import logging
from collections.abc import Callable, Mapping
from contextlib import suppress
from dataclasses import asdict, dataclass, field
from typing import Any

import torch
from pydantic import ValidationError
from torch import nn

from lt2.config import ConfigError, ModelConfig
from lt2.explain import explain
from lt2.model import LoopedLM
from lt2.packages import version_of
from lt2.train.loop import TrainState
from lt2_platform.remake import remaking
from lt2_platform.storage import Storage
from lt2_platform.storage_errors import STORAGE_ERRORS
from lt2_platform.train.checkpoints.contents import allocate_moments, contents, generators
from lt2_platform.train.checkpoints.integrity import (
    COMPLETE,
    INFO,
    CheckpointError,
    complete,
    damage,
    damage_over_ranks,
    delete,
)
from lt2_platform.train.checkpoints.retention import Keep, drop, note_best, read_best
from lt2_platform.train.checkpoints.shards import StorageRefusedError, load_shards, save_shards, saved_names
from lt2_platform.train.ranks import Group, from_rank_zero, gather, is_rank_zero, on_rank_zero, rank, world_size

log = logging.getLogger(__name__)

SCHEMA_VERSION = 1


@dataclass(frozen=True)
class CheckpointInfo:
    """What a checkpoint says about itself, read without touching its tensors."""

    uri: str
    model: ModelConfig
    tokenizer: dict[str, Any]
    train: dict[str, Any]
    state: TrainState
    data: str | None = None  # the dataset's fingerprint; None: of a version of LT2 that did not note it
    sources: Mapping[str, str] = field(default_factory=dict)  # `lineage` of what it began with or learned from


@dataclass(frozen=True)
class About:
    """What all checkpoints of one run say, as CheckpointInfo has it, and the tokenizer's files by path within them.

    tokenizer: the dataset manifest's record.
    """

    model: ModelConfig
    tokenizer: dict[str, Any]
    tokenizer_files: Mapping[str, bytes] = field(default_factory=dict)
    train: dict[str, Any] = field(default_factory=dict)
    data: str | None = None
    sources: Mapping[str, str] = field(default_factory=dict)


def save(
    folder: str, model: nn.Module, optimizer: torch.optim.Optimizer, state: TrainState, about: About, **options: Any
) -> str:
    """`write` what the model and the optimizer hold now. Collective."""
    return write(folder, contents(model, optimizer), state, about, **options)


def write(
    folder: str,
    tensors: dict[str, Any],
    state: TrainState,
    about: About,
    *,
    files: Mapping[str, bytes] | None = None,
    keep: Keep | int = 2,
    validation_loss: float | None = None,
    pinned: Callable[[], set[str]] = set,
    group: Group = None,
) -> str:
    """Write `<folder>/step-…` and return its URI; then drop what `keep` (a number: so many) does not. Collective.

    tensors: `contents`, or a copy of them. files: more that belong to this state, by path within it. validation_loss,
    if this very step was evaluated, makes it a candidate for the best checkpoint. pinned(): names that must stay for
    now, asked on rank 0.
    Raises StorageRefusedError on every rank when storage does not take it. Whatever is raised, nothing incomplete is
    left behind if that is possible.
    """
    storage, name = Storage(folder), f"step-{state.step:08d}"
    info = {
        "schema_version": SCHEMA_VERSION,
        "model": about.model.model_dump(mode="json"),
        "tokenizer": about.tokenizer,
        "train": about.train,
        "data": about.data,
        "sources": dict(about.sources),
        "state": asdict(state),
        "validation_loss": validation_loss,
        "world_size": world_size(),
        "versions": {package: version_of(package) for package in ("lt2", "torch")},
    }

    def finish() -> None:
        described = {INFO: json.dumps(info, indent=2).encode()}
        for path, content in {**described, **about.tokenizer_files, **(files or {})}.items():
            storage.write_bytes(f"{name}/{path}", content)
            written[path] = {"bytes": len(content), "sha256": hashlib.sha256(content).hexdigest()}
        storage.write_json(f"{name}/{COMPLETE}", {"files": written})
        if validation_loss is not None:
            note_best(folder, name, validation_loss)

    def tidy() -> None:
        try:
            drop(folder, Keep(keep) if isinstance(keep, int) else keep, pinned(), newest=name)
        except STORAGE_ERRORS as error:  # of old ones: no reason to take back what is written
            log.warning("old checkpoints in %s were not deleted (%s); the next save tries again", folder, error)

    on_rank_zero(lambda: delete(folder, name), group)  # what a kill or a damaged file left under this name
    try:
        own = save_shards(tensors, storage, name, group)
        written = {path: record for part in gather(own, group) for path, record in part.items()}
        on_rank_zero(finish, group)
        on_rank_zero(tidy, group)
    except StorageRefusedError:
        with suppress(StorageRefusedError):
            on_rank_zero(lambda: delete(folder, name), group)  # on a full disk the half of it is what is in the way
        raise
    except Exception:
        with suppress(Exception):  # this error may be one rank's alone: ask nothing of the others, and hide none of it
            if is_rank_zero() and not storage.exists(f"{name}/{COMPLETE}"):
                delete(folder, name)
        raise
    return storage.join(name)


def read_info(uri: str) -> CheckpointInfo:
    """The checkpoint's description. Raises CheckpointError when it is missing, incomplete or of a newer schema, and
    ConfigError for a mixer whose file is not there or has other fields now."""
    storage = Storage(uri)
    if not storage.exists(COMPLETE):
        raise CheckpointError(f"{uri}: no complete checkpoint here; give a folder named step-… with a {COMPLETE} file")
    try:
        info = storage.read_json(INFO)
    except (FileNotFoundError, ValueError) as error:
        raise CheckpointError(f"{uri}: damaged checkpoint ({INFO}: {error}); use another") from error
    if info.get("schema_version") != SCHEMA_VERSION:
        raise CheckpointError(
            f"{uri}: checkpoint schema {info.get('schema_version')!r}; this LT2 reads schema {SCHEMA_VERSION}"
        )
    try:
        model = ModelConfig.model_validate(info["model"])
    except ValidationError as error:
        raise ConfigError(explain(error, uri)) from None
    state, made_from = TrainState(**info["state"]), (info.get("data"), info.get("sources", {}))
    return CheckpointInfo(storage.root, model, info["tokenizer"], info["train"], state, *made_from)


def resolve(uri: str) -> str:
    """The checkpoint `uri` means: itself, or the newest one in it, its `checkpoints` or a step's `out/checkpoints`;
    `…/best` the best."""
    storage = Storage(uri)
    if storage.exists(COMPLETE):
        return storage.root
    for folder in _places(storage):
        if names := complete(folder):
            return Storage(folder).join(names[-1])
    if storage.root.endswith("/best"):
        for folder in _places(Storage(storage.root.removesuffix("/best"))):
            if best := read_best(folder):
                found = Storage(folder).join(best["checkpoint"])
                if not Storage(found).exists(COMPLETE):
                    raise CheckpointError(f"{uri}: the best checkpoint was {found}, which is gone; use another")
                return found
        raise CheckpointError(f"{uri}: no checkpoint of a step that was evaluated (train.eval_every)")
    if storage.exists("config.json"):
        raise CheckpointError(
            f"{uri} is a Hugging Face folder, not a checkpoint of ours; `lt2 eval` and transformers read it, and a "
            "step of type import_model makes one of it"
        )
    otherwise = "give a run's folder (steps/NAME-… under the storage root) or a checkpoint"
    advice = remaking(uri, otherwise, made_by=("pretrain", "distill", "average", "import_model", "import_ouro"))
    raise CheckpointError(f"{uri}: no complete checkpoint in it or in {storage.join('checkpoints')}; {advice}")


def _places(storage: Storage) -> tuple[str, ...]:
    """Where checkpoints may lie in a folder that a user names: of checkpoints, of a run, or of a step."""
    return storage.root, storage.join("checkpoints"), storage.join("out", "checkpoints")


def intact(uri: str) -> str:
    """`resolve` for all ranks, each of which reads a share of the files. Raises CheckpointError for a damaged one also
    where `uri` leaves a choice: whoever reads weights must know of which step they are. Collective.
    """
    found = from_rank_zero(resolve(uri))
    _refuse_damaged(uri, found, damage_over_ranks(found))
    return found


def _intact_alone(uri: str) -> str:
    """`intact` in one process, which reads every file."""
    found = resolve(uri)
    _refuse_damaged(uri, found, damage(found))
    return found


def _refuse_damaged(uri: str, found: str, problems: list[str]) -> None:
    if not problems:
        return
    folder = Storage(found.rpartition("/")[0])
    others = (folder.join(name) for name in reversed(complete(folder.root)))
    if (other := next((one for one in others if one != found and not damage(one)), None)) is not None:
        advice = f"the newest intact one is {other}: name that, or remove the damaged one"
    else:  # a run of which none is intact must be made again
        advice = remaking(uri, "use another")
    raise CheckpointError(f"{found}: damaged checkpoint ({'; '.join(problems)}); {advice}")


def load(uri: str, model: nn.Module, optimizer: torch.optim.Optimizer) -> TrainState:
    """Fill model, optimizer and this rank's RNG from a checkpoint of any number of workers. Collective.

    A rank the checkpoint has no generator state for (more workers than before) keeps its own.
    """
    saved = saved_names(Storage(uri))
    allocate_moments(model, optimizer, saved)
    mine = {key: value for key, value in generators().items() if f"rng.{rank()}.{key}" in saved}
    target = contents(model, optimizer) | {"rng": {str(rank()): mine}}
    load_shards(target, Storage(uri))  # in place: state dicts alias parameters and moments
    if "cpu" in mine:
        torch.set_rng_state(mine["cpu"])
    if "cuda" in mine:
        torch.cuda.set_rng_state(mine["cuda"])
    return read_info(uri).state


def load_model(uri: str) -> tuple[LoopedLM, ModelConfig, dict[str, Any]]:
    """(model on CPU in fp32 and eval mode, its config, tokenizer info) in one process; `uri` as for `resolve`.

    A damaged one is refused, and the newest intact one of the folder named.

    The tokenizer is `load_recorded(info)`: "file" is a full path, None for the built-in one.
    """
    uri = _intact_alone(uri)
    info = read_info(uri)
    with torch.device("meta"):
        model = LoopedLM(info.model)
    model = model.to_empty(device="cpu")
    load_shards({"model": model.state_dict()}, Storage(uri), alone=True)  # in place
    file = info.tokenizer.get("file")
    return model.eval(), info.model, {**info.tokenizer, "file": Storage(uri).join(file) if file else None}
