"""The curriculum of state-based recall: train on programs of a size until they are passed, then on larger ones."""

from __future__ import annotations

import json
from collections.abc import Callable
from typing import Any

from lt2.model import build
from lt2.train.loop import TrainState
from lt2.train.optim import adamw
from lt2_platform.evaluate.config import StateRecallConfig
from lt2_platform.evaluate.state_recall_programs import current, n_max, practise
from lt2_platform.machine.devices import this_device
from lt2_platform.storage import Storage
from lt2_platform.train.checkpoints import checkpoint, integrity


def run_curriculum(
    config: StateRecallConfig,
    *,
    out: str,
    evaluated: Callable[[dict[str, Any], bool], None] = lambda entry, found: None,
) -> dict[str, Any]:
    """Train through the stages and return {"n_max", "stage", "steps", "history"}; also in `<out>/result.json`.

    history: {n (bits), swaps, step, loss, all, final, moved} of every evaluation. n_max is 0 if not even the first
    stage is passed.
    Continues from the newest checkpoint under `out`, to the same bits on a CPU. `evaluated` is called with each entry
    of the history as it is made (False), or where it is found (True).
    """
    storage = Storage(out)
    if storage.exists("result.json"):
        result = storage.read_json("result.json")
        for entry in result["history"]:
            evaluated(entry, True)
        return result
    architecture = config.model
    model = build(architecture, seed=config.seed, device=this_device())
    optimizer = adamw(model, lr=config.lr)
    tokenizer = {"name": "state recall", "sha256": "none", "vocab_size": architecture.vocab_size}
    state, history = TrainState(), []
    if newest := integrity.latest(f"{out}/checkpoints"):
        state = checkpoint.load(newest, model, optimizer)
        history = checkpoint.read_info(newest).train["history"]
        for entry in history:
            evaluated(entry, True)
    while (following := current(config, history)) is not None:
        size, steps = following
        state, entry = practise(config, model, optimizer, size, state, steps)
        history.append(entry)
        evaluated(entry, False)
        train = {"history": history, "config": json.loads(config.model_dump_json())}
        about = checkpoint.About(architecture, tokenizer, train=train)
        checkpoint.save(f"{out}/checkpoints", model, optimizer, state, about, keep=1)
    largest = n_max(config, history)
    stage = config.stages.index(largest) + 1 if largest else 0
    result = {"n_max": largest, "stage": stage, "steps": state.step, "history": history}
    storage.write_json("result.json", result)
    return result
