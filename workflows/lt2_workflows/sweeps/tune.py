"""The trials of a sweep under Ray Tune: how many at a time, where, which are stopped early, and a record of each."""

from __future__ import annotations

import logging
import os
import signal
from collections.abc import Mapping
from dataclasses import replace
from typing import Any

import ray
from ray import tune
from ray.tune.schedulers import FIFOScheduler

from lt2.config import ConfigError
from lt2_platform.storage import Storage
from lt2_platform.train.on_ray.names import new_name
from lt2_workflows.engine.attempt import Interrupted
from lt2_workflows.engine.context import StepContext
from lt2_workflows.engine.endings import AT_ONCE
from lt2_workflows.plan import planned_training
from lt2_workflows.steps.average import AverageStep
from lt2_workflows.sweeps.asha import KeptAsha
from lt2_workflows.sweeps.config import SweepStep, Trial, sized
from lt2_workflows.sweeps.trial import Ended, not_done, run_trial

HEAD = "node:__internal_head__"  # a resource that every cluster's head has
DRIVERS = "tune_driver"  # one that a cluster may have, to say where trials are driven from
TRIAL_SHARE = 0.001
ACTOR_FAILURES = 2


def tune_trials(config: SweepStep, jobs: dict[str, dict[str, Any]], context: StepContext, folder: str) -> None:
    """Run the jobs (of `trial.run_trial`, by trial) and write `<folder>/<name>.json` as they end."""
    # Signals are the attempt's own business (see also TrialRecords.setup), and our records replace Tune's files.
    # Strict checking would have a trial's last word, its outcome, carry a loss.
    names = ("SIGINT_HANDLER", "AUTO_CALLBACK_LOGGERS", "STRICT_METRIC_CHECKING")
    os.environ.update({f"TUNE_DISABLE_{name}": "1" for name in names})
    # At the end Tune looks for the files that it was told not to write, and warns of each.
    logging.getLogger("ray.tune.analysis.experiment_analysis").setLevel(logging.ERROR)
    os.environ["RAY_CHDIR_TO_TRIAL_DIR"] = "0"  # a job's files are named relative to its working directory
    # No CPU: a trial that held one would keep it from its own workers, and two such trials from each other's.
    place = {"CPU": 0, DRIVERS if DRIVERS in ray.cluster_resources() else HEAD: TRIAL_SHARE}
    storage = Storage(context.storage.join(context.step.folder, "out/tune"))
    filesystem, path = storage.arrow_fs("")
    records = TrialRecords(config, context, folder)
    tuner = tune.Tuner(
        tune.with_resources(tune.with_parameters(run_trial, jobs=jobs), place),
        param_space={"trial": tune.grid_search(list(jobs))},
        tune_config=tune.TuneConfig(
            scheduler=_scheduler(config, jobs, context),
            max_concurrent_trials=config.resources.concurrent,
            trial_name_creator=_name,
            trial_dirname_creator=_name,
        ),
        run_config=tune.RunConfig(
            name=new_name(storage.list("")),
            storage_path=path,
            storage_filesystem=filesystem,
            failure_config=tune.FailureConfig(max_failures=ACTOR_FAILURES),
            callbacks=[records],
            verbose=0,
        ),
    )
    tuner.fit()
    if records.interrupted:  # the last that ran: Tune was done before it could be ended
        records.end_interrupted()


def _name(trial: Any) -> str:
    return trial.config["trial"]


def _scheduler(config: SweepStep, jobs: Mapping[str, Any], context: StepContext) -> Any:
    if config.scheduler.type == "fifo":
        return FIFOScheduler()
    return KeptAsha(config.scheduler, context.storage, f"{context.step.folder}/out/rungs", jobs)


class TrialRecords(tune.Callback):
    """Writes `<folder>/<name>.json` as trials end, and says how far the sweep is.

    A record: what `Ended` has, and {"name", "label", "group", "seed", "settings", "steps": {name: id}, "parameters",
    "last": {"step", "loss"} or None}.
    """

    def __init__(self, config: SweepStep, context: StepContext, folder: str):
        self.context, self.folder = context, folder
        self.trials = {trial.name: trial for trial in config.expanded}
        self.last: dict[str, dict[str, Any]] = {}
        self.outcomes: dict[str, Ended] = {}
        self.ended = {name.removesuffix(".json") for name in context.storage.list(folder)}
        self.saving: set[str] | None = None
        self.interrupted: list[str] = []
        self.at_once = signal.getsignal(AT_ONCE)

    def __getstate__(self) -> dict[str, Any]:
        return {}  # Tune pickles its callbacks into a state that we never restore

    def setup(self, *arguments: Any, **info: Any) -> None:
        signal.signal(AT_ONCE, self.at_once)  # Tune has just taken it for itself

    def on_step_begin(self, iteration: int, trials: Any, **info: Any) -> None:
        """End the sweep when it was asked to stop and all trials that were running then have saved and ended.

        Others that Tune starts meanwhile see the request and do nothing.
        """
        if not self.context.stop.asked.is_set():
            return
        running = {_name(trial) for trial in trials if trial.status == "RUNNING"}
        self.saving = running if self.saving is None else self.saving
        if not running & self.saving:
            self.end_interrupted()

    def end_interrupted(self) -> None:
        ended = f"stopped as asked; {len(self.ended)} of {len(self.trials)} trials have ended"
        raise Interrupted("\n".join([ended, *self.interrupted]))

    def on_trial_result(self, iteration: int, trials: Any, trial: Any, result: Mapping[str, Any], **info: Any) -> None:
        if "outcome" in result:
            self.outcomes[_name(trial)] = result["outcome"]
        elif "loss" in result:
            self.last[_name(trial)] = {"step": result["step"], "loss": result["logged"]}  # a mean is for schedulers
            self._say(f"{_name(trial)}: {result['of']} step {result['step']:,}, loss {result['logged']:.4f}")

    def on_trial_complete(self, iteration: int, trials: Any, trial: Any, **info: Any) -> None:
        outcome = self.outcomes.get(_name(trial), not_done("stopped", None))
        if outcome["state"] == "interrupted":  # it has not ended: the next attempt goes on with it
            self.interrupted.append(f"{_name(trial)}: {outcome['error']}")
        else:
            self._end(_name(trial), outcome)

    def on_trial_error(self, iteration: int, trials: Any, trial: Any, **info: Any) -> None:
        if trial.status == "ERROR":  # not one that is started again
            self._end(_name(trial), not_done("failed", _last_line(trial.error_file)))

    def _end(self, name: str, outcome: Ended) -> None:
        trial = self.trials[name]
        fields = {key: getattr(trial, key) for key in ("name", "label", "group", "seed", "settings")}
        steps = {step: each.id for step, each in trial.workflow.steps.items()}
        more = {"steps": steps, "parameters": count(trial, self.context, outcome["run"]), "last": self.last.get(name)}
        self.context.storage.write_json(f"{self.folder}/{name}.json", fields | more | dict(outcome))
        self.ended.add(name)
        self._say(f"{name}: {outcome['state']}")

    def _say(self, message: str) -> None:
        counts = {"step": len(self.ended), "steps": len(self.trials), "counts": "trials ended"}
        self.context.progress(counts | {"message": message})


def _last_line(error_file: str | None) -> str:
    lines: list[str] = []
    if error_file and os.path.exists(error_file):
        with open(error_file) as file:
            lines = [line.strip() for line in file if line.strip()]
    return lines[-1] if lines else "the trial's process was lost"


def count(trial: Trial, context: StepContext, run: str | None = None) -> int | None:
    """Parameters of the model that the trial's numbers are of: what step `run` made, else what is trained last; with
    the vocabulary of its data, None where there is no such data.
    """
    steps = trial.workflow.steps.values()
    trained = [step for step in steps if hasattr(step.config, "train")]
    step = next((each for each in steps if each.id == run), trained[-1] if trained else None)
    while step is not None and isinstance(step.config, AverageStep):  # as many as those that it is the mean of
        of = step.config.checkpoint
        step = None if isinstance(of, str) else trial.workflow.steps[of.step]
    if step is None:
        return None
    try:
        planned = planned_training(step.config, replace(context, workflow=trial.workflow, step=step))
    except ConfigError:  # which the trial has failed with
        return None
    model = getattr(step.config, "model", None) if planned is None else planned.model
    if model is None:
        return None
    from lt2.analysis.accounting import parameters  # with torch, for which no sweep need wait to begin

    return parameters(sized(model)).total
