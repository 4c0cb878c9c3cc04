"""Which failures of workers end a run on Ray at once. Imports no torch: it is Ray's controller that decides."""

from __future__ import annotations

from ray.train import WorkerGroupError
from ray.train.v2._internal.execution.failure_handling import DefaultFailurePolicy, FailureDecision
from ray.train.v2.api.exceptions import TrainingFailedError

from lt2.config import ConfigError


def mistake(error: TrainingFailedError) -> ConfigError | None:
    """The user's mistake, or the damaged file, that one worker met at least; no retry cures it."""
    failures = error.worker_failures.values() if isinstance(error, WorkerGroupError) else ()
    return next((each for each in failures if isinstance(each, ConfigError)), None)


class OncePolicy(DefaultFailurePolicy):
    """Ray's own policy, except that a `mistake` is not tried again."""

    def make_decision(self, training_failed_error: TrainingFailedError) -> FailureDecision:
        if mistake(training_failed_error) is not None:
            return FailureDecision.RAISE
        return super().make_decision(training_failed_error)
