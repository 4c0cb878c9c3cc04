"""One model out of a run's last checkpoints: the mean of their weights (Izmailov et al. 2018; Kaddour 2022)."""

from __future__ import annotations

from typing import Any

import torch

from lt2.config import ConfigError
from lt2.model import LoopedLM
from lt2.train.loop import TrainState
from lt2_platform.data.tokenizers.tokenize import tokenizer_files
from lt2_platform.storage import Storage
from lt2_platform.train.checkpoints import checkpoint, integrity
from lt2_platform.train.checkpoints.matching import check_matches, lineage
from lt2_platform.train.checkpoints.retention import Keep, kept
from lt2_platform.train.checkpoints.weights_only import store_weights


def averaged(uri: str, last: int) -> list[str]:
    """URIs of the checkpoints that are averaged, oldest first: the `last` complete ones that end with the one `uri`
    means. One that is only there because it is the best, long before the others, does not count.

    Raises:
        ConfigError: there are fewer.
    """
    newest = checkpoint.resolve(uri)
    folder, _, name = newest.rpartition("/")
    names, train = integrity.complete(folder), checkpoint.read_info(newest).train
    stay = kept(names, Keep(train.get("keep_checkpoints", 2), train.get("keep_every"), best=False)) | {name}
    names = [each for each in names[: names.index(name) + 1] if each in stay]
    if len(names) < last:
        raise ConfigError(
            f"{folder} has {len(names)} checkpoints to average up to {name}, and {last} are asked for; train with a "
            "larger train.keep_checkpoints, or average fewer"
        )
    return [Storage(folder).join(each) for each in names[-last:]]


def store_average(uri: str, out: str, *, last: int) -> dict[str, Any]:
    """Write the mean of the weights of a run's last checkpoints, fp32, as the checkpoint of a run at `out`, with their
    tokenizer and the newest one's step. Returns the run's summary. Does nothing where the checkpoint is complete.

    Raises:
        ConfigError: too few checkpoints, a damaged one, or ones of different models.
    """
    return store_weights(out, lambda: _mean(averaged(uri, last)))


@torch.no_grad()
def _mean(places: list[str]) -> tuple[LoopedLM, TrainState, checkpoint.About]:
    info = checkpoint.read_info(places[-1])
    model, _, tokenizer = checkpoint.load_model(places[-1])
    for count, place in enumerate(places[:-1], start=2):
        check_matches(checkpoint.read_info(place), info.model, info.tokenizer, "average those of one run")
        other, _, _ = checkpoint.load_model(place)
        for mean, parameter in zip(model.parameters(), other.parameters(), strict=True):
            mean.lerp_(parameter, 1 / count)
    files = tokenizer_files(tokenizer["file"] or "byte")
    steps = [integrity.step_of(place.rpartition("/")[2]) for place in places]  # which they were, others may not be
    made, sources = {"averaged": steps} | info.train, {"averaged": lineage(info)}
    about = checkpoint.About(info.model, info.tokenizer, files, made, data=info.data, sources=sources)
    return model, info.state, about
