"""Early stopping that outlives its driver: what trials reached the scheduler's rungs with is kept in storage."""

from __future__ import annotations

from collections.abc import Collection
from types import SimpleNamespace
from typing import Any

from ray.tune.schedulers import ASHAScheduler, TrialScheduler

from lt2_platform.storage import Storage
from lt2_workflows.sweeps.config import Asha


class KeptAsha(ASHAScheduler):
    """Ray Tune's ASHA on {"step", "loss"}; `<folder>/<trial>.json` holds the results at which a trial reached rungs.

    A later attempt begins with them: a trial that went on there goes on, and others are compared with it as before.
    running: the trials of this attempt; of all others only their results count.
    """

    def __init__(self, config: Asha, storage: Storage, folder: str, running: Collection[str]):
        super().__init__(
            time_attr="step",
            metric="loss",
            mode="min",
            grace_period=config.grace_steps,
            reduction_factor=config.reduction,
            max_t=10**12,  # no rung is above it
            stop_last_trials=False,  # True: a result counts at the rungs below as well, against those of earlier steps
        )
        self.config, self.storage, self.folder, self.running = config, storage, folder, frozenset(running)
        names = [name.removesuffix(".json") for name in storage.list(folder)]
        self.reached: dict[str, list[dict[str, Any]]] = {
            name: storage.read_json(f"{folder}/{name}.json") for name in names
        }
        for name in self.reached:
            if name not in self.running:
                self.on_trial_add(None, SimpleNamespace(trial_id=name, config={"trial": name}))

    def on_trial_add(self, tune_controller: Any, trial: Any) -> None:
        super().on_trial_add(tune_controller, trial)
        name = trial.config["trial"]
        if name in self.running:  # one that was to be stopped, and was not when the driver died, is decided on again
            self.reached[name] = [result for result in self.reached.get(name, []) if result["went_on"]]
        for result in self.reached[name]:
            super().on_trial_result(tune_controller, trial, result)

    def on_trial_result(self, tune_controller: Any, trial: Any, result: dict[str, Any]) -> str:
        action = super().on_trial_result(tune_controller, trial, result)
        reached = self.reached[trial.config["trial"]]
        if "loss" in result and self._rungs(result["step"]) > (self._rungs(reached[-1]["step"]) if reached else 0):
            reached.append(
                {"step": result["step"], "loss": result["loss"], "went_on": action == TrialScheduler.CONTINUE}
            )
            self.storage.write_json(f"{self.folder}/{trial.config['trial']}.json", reached)
        return action

    def _rungs(self, step: int) -> int:
        """How many rungs lie at or below `step`."""
        count, rung = 0, self.config.grace_steps
        while rung <= step:
            count, rung = count + 1, rung * self.config.reduction
        return count
