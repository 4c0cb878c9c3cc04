"""Which training a checkpoint is of, and whether a run may go on from it: its own, or another run's."""

from __future__ import annotations

from typing import Any

from lt2.config import ModelConfig
from lt2.train.config import SEEDS, TrainConfig
from lt2_platform.json_values import sha256_of
from lt2_platform.train.checkpoints.checkpoint import CheckpointInfo
from lt2_platform.train.checkpoints.integrity import CheckpointError

WEIGHTS_ONLY = {"averaged", "imported"}
"""What the `train` record of a checkpoint without moments says of how it came to be."""

YOUNGER = {"rope_scaling", "bias"}
"""Settings of models that are younger than what runs have stored of their origins."""


def lineage(info: CheckpointInfo) -> str:
    """12 hex digits that checkpoints share which differ in their seeds only, and in those of what they come from."""
    record = {
        "model": _without_unset(info.model.model_dump(mode="json"), YOUNGER),
        "train": {key: value for key, value in info.train.items() if key not in SEEDS},
        "step": info.state.step,
        "tokenizer": info.tokenizer.get("sha256"),
        "data": info.data,
        "sources": dict(info.sources),
    }
    return sha256_of(record)[:12]


def _without_unset(value: Any, names: set[str]) -> Any:
    """A JSON value without those of its keys, at any depth, that are in `names` and None."""
    if isinstance(value, dict):
        kept = {key: each for key, each in value.items() if each is not None or key not in names}
        return {key: _without_unset(each, names) for key, each in kept.items()}
    return [_without_unset(each, names) for each in value] if isinstance(value, list) else value


def check_matches(
    info: CheckpointInfo,
    config: ModelConfig,
    tokenizer: dict[str, Any],
    advice: str = "use another output folder",
) -> None:
    """Raise CheckpointError unless `info` holds this very model and tokenizer."""
    theirs, ours = info.model, config
    if theirs.vocab_size != ours.vocab_size:
        raise CheckpointError(
            f"{info.uri}: vocabulary of {theirs.vocab_size}, the model here has {ours.vocab_size}; "
            f"use the tokenizer the checkpoint was trained with, or {advice}"
        )
    if theirs != ours:
        fields = [name for name in type(ours).model_fields if getattr(theirs, name) != getattr(ours, name)]
        raise CheckpointError(f"{info.uri}: model differs in {', '.join(fields)}; {advice}")
    if info.tokenizer.get("sha256") != tokenizer.get("sha256"):
        raise CheckpointError(
            f"{info.uri}: trained with tokenizer {info.tokenizer.get('name')!r}, the data was made with "
            f"{tokenizer.get('name')!r} with different content; prepare the data again or {advice}"
        )


def check_continues(
    info: CheckpointInfo,
    config: ModelConfig,
    train: TrainConfig,
    tokenizer: dict[str, Any],
    data: str | None,
    *,
    live: bool = False,
) -> None:
    """Raise CheckpointError unless another run may go on from `info`: with its moments, at its place in its data.

    data: the fingerprint of the dataset to train on; None where it is not known yet. live: it is tokenised while
    training, where the place is one of as many lanes as a batch has sequences.
    """
    advice = "use `start` to take only its weights"
    if not info.train or info.train.keys() & WEIGHTS_ONLY:
        raise CheckpointError(f"{info.uri} was not left by a training and holds weights only; {advice}")
    check_matches(info, config, tokenizer, advice)
    if info.state.step >= train.steps:
        raise CheckpointError(f"{info.uri} has {info.state.step:,} steps already; raise train.steps beyond that")
    if None not in (data, info.data) and info.data != data:
        raise CheckpointError(f"{info.uri} was trained on another dataset, whose position it records; {advice}")
    lanes = [("global_batch_size", info.train.get("global_batch_size"), train.global_batch_size)] if live else []
    for field, theirs, ours in (
        ("seed", info.train.get("seed"), train.seed),
        ("optimizer", (info.train.get("optimizer") or {"type": "adamw"})["type"], train.optimizer.type),
        ("objective", (info.train.get("objective") or {}).get("type"), train.objective.type),
        *lanes,
    ):
        if theirs != ours:
            raise CheckpointError(f"{info.uri} was trained with train.{field} {theirs!r}; set that, or {advice}")
