"""Evaluation while training goes on: Ray tasks on what training leaves free, started by the driver.

The training loop knows nothing of it. A checkpoint is evaluated once it is complete, so it is safe by then; it stays
until its evaluation is over. Where nothing is free evaluations wait, the oldest are skipped, and what is left at the
end of training runs on the resources that it gives back.
"""

from __future__ import annotations

import logging
import os
import threading
import time
from functools import partial
from typing import Any

import ray
from ray.exceptions import RayError

from lt2.config import ConfigError
from lt2.train.config import TrainConfig
from lt2_platform.failures import portably
from lt2_platform.fence import FENCE
from lt2_platform.results.store import ResultsStore
from lt2_platform.storage import Storage
from lt2_platform.storage_errors import STORAGE_ERRORS, patiently
from lt2_platform.train import evaluation_records
from lt2_platform.train.checkpoints import retention
from lt2_platform.train.checkpoints.retention import Keep
from lt2_platform.train.config import TrainingEvaluation
from lt2_platform.train.on_ray.places import describe, places
from lt2_platform.train.worker import WorkerSpec

log = logging.getLogger(__name__)

POLL_SECONDS = 1.0
STARTING_SECONDS = 30.0  # a task that has its place says so once its process has begun and imported what it runs
EVALUATION = "training"  # in the results store, of the rows at the model's own depth; rows hold the step


class SideEvaluations:
    """Watches a run's folder from a thread inside `with`; leaving it waits for the evaluations that are left."""

    def __init__(self, spec: WorkerSpec, plan: TrainingEvaluation, *, gpus: float):
        self.spec, self.plan, self.gpus = spec, plan, gpus
        self.handles: dict[str, Any] = {}
        self.started: dict[str, float] = {}
        self.over: set[str] = set()
        self.told = False
        self.ended = threading.Event()
        self.thread = threading.Thread(target=self._run, name="lt2-evaluations", daemon=True)

    def __enter__(self) -> SideEvaluations:
        self._check_possible()
        self.thread.start()
        return self

    def __exit__(self, kind: type[BaseException] | None, *_: object) -> None:
        self.ended.set()
        self.thread.join()
        if kind is None:
            self.drain()
            return
        for handle in self.handles.values():  # the next attempt begins them again
            self.cancel(handle)

    def look(self) -> None:
        """Start what is new, take note of what is over, skip what has waited too long."""
        for name in evaluation_records.wanted(self.spec.out, self.plan.every, self.over):
            if name not in self.handles:
                evaluation_records.note(self.spec.out, name, "waiting")
                self.handles[name], self.started[name] = self.start(name), time.monotonic()
        for name in [name for name, handle in self.handles.items() if self.is_over(handle)]:
            self._take(name)
        since = time.monotonic() - STARTING_SECONDS
        waiting = [name for name in self.handles if self.started[name] <= since and self._state(name) == "waiting"]
        if waiting and not self.told:
            self.told = True
            log.warning(
                "the evaluation of %s waits: it needs %g CPUs and %g GPUs, and training leaves fewer free",
                waiting[0], self.plan.cpus, self.gpus,
            )  # fmt: skip
        for name in waiting[: -self.plan.max_waiting]:
            self.cancel(self.handles.pop(name))
            self._over(name, "skipped", f"no free CPU or GPU before {self.plan.max_waiting} newer ones waited as well")

    def drain(self) -> None:
        """Wait for every evaluation that is left, then drop the checkpoints that were kept for them."""
        patiently(self.look)
        if self.handles:
            log.info("training is over; waiting for %d evaluations", len(self.handles))
        for name in list(self.handles):
            patiently(partial(self._take, name))
        folder = Storage(self.spec.out).join("checkpoints")
        keep = Keep.of_run(TrainConfig.model_validate(self.spec.train))
        patiently(lambda: retention.drop(folder, keep))

    def start(self, name: str) -> Any:
        options = {"num_cpus": self.plan.cpus, "num_gpus": self.gpus, "name": f"evaluate {name}"}
        task = ray.remote(evaluate).options(**options)  # type: ignore[attr-defined]
        return task.remote(self.spec, self.plan.model_dump(mode="json"), name, os.environ.get(FENCE))

    def is_over(self, handle: Any) -> bool:
        return bool(ray.wait([handle], timeout=0)[0])

    def cancel(self, handle: Any) -> None:
        ray.cancel(handle)

    def result(self, handle: Any) -> None:
        ray.get(handle)

    def _take(self, name: str) -> None:
        try:
            self.result(self.handles[name])
        except (RayError, ConfigError) as error:  # its worker died, or it raised: training goes on
            self._over(name, "failed", (str(error).strip() or type(error).__name__).splitlines()[-1])
        del self.handles[name]  # last: what storage refuses above is tried again

    def _over(self, name: str, state: str, reason: str) -> None:
        log.warning("evaluation of %s %s: %s", name, state, reason)
        evaluation_records.note(self.spec.out, name, state, reason=reason)
        self.over.add(name)
        store = ResultsStore(Storage(self.spec.storage_root))
        store.log_event(self.spec.run_id, "evaluation", {"checkpoint": name, "state": state, "reason": reason})

    def _state(self, name: str) -> str | None:
        return evaluation_records.record(self.spec.out, name).get("state")

    def _check_possible(self) -> None:
        request = {"CPU": self.plan.cpus, "GPU": self.gpus}
        if places({name: amount for name, amount in request.items() if amount}) == 0:
            raise ConfigError(f"resources.evaluation needs {describe(request)}, and no node of the cluster has them")

    def _run(self) -> None:
        while not self.ended.wait(POLL_SECONDS):
            try:
                self.look()
            except STORAGE_ERRORS as error:
                log.warning("the evaluations of this run are not being tracked (%s); trying again", error)


@portably
def evaluate(spec: WorkerSpec, plan: dict[str, Any], name: str, fence: str | None) -> None:
    """One evaluation, as a Ray task: rows to the run's results, with their step. fence: of the attempt it belongs to.

    They are split as every evaluation's are; those at the depth the model is trained for are EVALUATION.
    """
    from lt2_platform.evaluate.checkpoints import evaluate_checkpoint

    if fence is not None:
        os.environ[FENCE] = fence  # the attempt may stand still, taken over, while this goes on
    config = TrainingEvaluation.model_validate(plan)
    evaluation_records.note(spec.out, name, "running")
    found = evaluate_checkpoint(
        Storage(spec.out).join(f"checkpoints/{name}"),
        config.tasks,
        data=spec.data,
        loops=config.loops,
        exit_thresholds=config.exit_thresholds,
        out=Storage(spec.out).join(f"evaluations/{name}"),
    )
    store = ResultsStore(Storage(spec.storage_root))
    for kind, rows in found.evaluations().items():
        store.log_eval(spec.run_id, EVALUATION if kind == "validation" else kind, rows)
    evaluation_records.note(spec.out, name, "done", rows=len(found.rows))
