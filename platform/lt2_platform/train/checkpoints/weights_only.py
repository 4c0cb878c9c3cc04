"""Runs of models that no training here left: their checkpoint has weights, and nothing to go on from."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

from lt2.model import LoopedLM
from lt2.train.loop import TrainState
from lt2_platform.storage import Storage
from lt2_platform.train.checkpoints import checkpoint, integrity


def store_weights(out: str, make: Callable[[], tuple[LoopedLM, TrainState, checkpoint.About]]) -> dict[str, Any]:
    """Write what `make` gives as the checkpoint of a run at `out`, with the run's summary, which is returned.

    make is not called where the checkpoint is complete. Its About's `train` has one of `matching.WEIGHTS_ONLY`.
    """
    storage = Storage(out)
    checkpoints = storage.join("checkpoints")
    if not integrity.complete(checkpoints):
        model, state, about = make()
        optimizer = torch.optim.SGD(model.parameters(), lr=0.0)  # has no state to save
        checkpoint.save(checkpoints, model, optimizer, state, about)
    found = checkpoint.resolve(out)
    state = checkpoint.read_info(found).state
    result = {"step": state.step, "position": state.position, "tokens": state.tokens, "loss": None}
    storage.write_json("summary.json", result | {"checkpoint": found})
    return result
