"""Pretraining on Ray Train: validate on the driver, launch workers, follow their progress, name what failed.

Ray Train only places, connects and restarts workers. What survives a failure is ours: the newest complete checkpoint
in `<out>/checkpoints` (Ray's record can miss a checkpoint it was just told of, and refuses a run with a deleted one).
"""

from __future__ import annotations

import logging
import os
import signal
import threading
from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import asdict
from typing import Any

import ray.train
from ray._private.worker import get_dashboard_url
from ray.train import FailureConfig, RunConfig, ScalingConfig, WorkerGroupError
from ray.train.torch import TorchTrainer
from ray.train.v2._internal.callbacks.datasets import DatasetsCallback
from ray.train.v2._internal.callbacks.placement_group_callback import PlacementGroupCleanerCallback

from lt2.config import ConfigError
from lt2.train.loop import STOP, NonFiniteLossError, PreemptedError
from lt2_platform.data.ray_stream import ray_batches
from lt2_platform.data.spread import some_ray
from lt2_platform.failures import portably
from lt2_platform.fence import FENCE
from lt2_platform.machine.cores import share
from lt2_platform.progress import Progress
from lt2_platform.signals import kept
from lt2_platform.storage import Storage
from lt2_platform.storage_errors import STORAGE_ERRORS, patiently
from lt2_platform.train import worker
from lt2_platform.train.callbacks import PROGRESS
from lt2_platform.train.config import ONE_WORKER, PretrainConfig, Sources, TrainingEvaluation, Workers
from lt2_platform.train.on_ray.incurable import OncePolicy, mistake
from lt2_platform.train.on_ray.names import new_name
from lt2_platform.train.on_ray.places import check_places, kept_waiting, shortage, worker_request
from lt2_platform.train.on_ray.side_evaluation import SideEvaluations
from lt2_platform.train.on_ray.stopping import StopRequest, conveyed, requested
from lt2_platform.train.preemption import ray_notice, ray_sigterm
from lt2_platform.train.reporting.live_metrics import LiveMetrics
from lt2_platform.train.reporting.wandb_sink import WandbSink
from lt2_platform.train.run_folder import close_run, open_run, summary
from lt2_platform.train.worker import WorkerSpec

__all__ = ["PretrainConfig", "pretrain"]

log = logging.getLogger(__name__)

POLL_SECONDS = 0.5


def pretrain(
    config: PretrainConfig,
    *,
    data: str,
    out: str,
    run_id: str,
    storage_root: str,
    workers: Workers = ONE_WORKER,
    sources: Sources | None = None,
    info: dict[str, Any] | None = None,
    progress: Progress | None = None,
    stop: StopRequest | None = None,
) -> dict[str, Any]:
    """Train on the packed dataset `data` into the folder `out`; returns the summary, also in `<out>/summary.json`.

    The summary holds checkpoint (URI), step, position, tokens and loss. The same call after any interruption goes on
    from the newest complete checkpoint, with any number of workers; after the end it returns at once. Where it may run
    with fewer than num_workers, Ray looks once a minute for more places. Metrics go to run `run_id` of the results
    store under `storage_root`; `info` is provenance for it. sources: for objectives that start from or learn from other
    models. progress is called in a thread with {step, steps, loss, tokens_per_s, eta_s}, before that once with
    {waiting} where other work has the places, and with {notice} of the step it goes on from. Uses the running Ray, or a
    local one for the duration. stop: asks to save at the next step and to end there.
    Raises ConfigError for what cannot work, NonFiniteLossError when training diverges, PreemptedError when it ended as
    `stop` asked, and Ray's WorkerGroupError when workers failed more than worker_failures times.
    """
    if workers.evaluation is not None:
        workers.evaluation.check(config.train)
    where: dict[str, Any] = {"data": data, "out": out, "run_id": run_id, "storage_root": storage_root}
    spec = open_run(config, **where, workers=workers, sources=sources, info=info)
    if (done := summary(spec)) is not None:
        return done
    storage, request = Storage(spec.out), stop or StopRequest()
    trainer = Trainer if stop is None else CallersSignals

    waits = threading.Event()  # told once

    def told(values: dict[str, Any]) -> None:
        if "waiting" in values:
            waits.set()
        if "step" in values and values["step"] < values["steps"]:
            request.possible.set()
        if progress is not None:
            progress(values)

    with some_ray(None):
        scaling = _scaling(workers, told)
        evaluated = _evaluated(spec, workers.evaluation, scaling)
        with conveyed(request, storage), _followed(storage, told, waits), evaluated:
            settings = {"spec": asdict(spec), "data_reader": workers.data_reader, "wandb": workers.wandb}
            settings["folder"] = os.getcwd()
            threads = _threads(workers)
            while True:
                try:
                    result = _fit(trainer, settings, storage, scaling, threads, workers.worker_failures)
                    break
                except PreemptedError:
                    if request.asked.is_set():
                        raise
                    log.warning("a worker was asked to end (SIGTERM): the run is saved and continues with new workers")
            request.possible.clear()  # evaluations that are left can be ended at once: all is saved
    return patiently(lambda: close_run(spec, result))


class Trainer(TorchTrainer):
    """With our say in what is tried again, without a process that hands out datasets, of which Ray is given none, and
    without Ray's cleaner of placement groups where it can only do harm.

    Once a second it asks a dashboard whether the controller lives. Where this Ray has none, it writes each time that
    nobody answers, or asks whatever cluster's dashboard is at port 8265 of this machine, which does not know the
    controller; it would then take the workers for left over and end them.
    """

    def _create_default_callbacks(self) -> list[Any]:
        left_out = (DatasetsCallback,) if get_dashboard_url() else (DatasetsCallback, PlacementGroupCleanerCallback)
        return [callback for callback in super()._create_default_callbacks() if not isinstance(callback, left_out)]

    def _initialize_and_run_controller(self, **options: Any) -> Any:
        policy = OncePolicy(self.run_config.failure_config or FailureConfig())
        return super()._initialize_and_run_controller(**options | {"failure_policy": policy})


class CallersSignals(Trainer):
    """Whoever can ask a run to save has a handler of Ctrl-C that does; Ray's would end the run as it is."""

    def _register_sigint_handler(self, controller: Any) -> None:
        pass


def _evaluated(
    spec: WorkerSpec, evaluation: TrainingEvaluation | None, scaling: ScalingConfig
) -> AbstractContextManager[Any]:
    if evaluation is None:
        return nullcontext()
    gpus = float(bool(scaling.use_gpu)) if evaluation.gpus is None else evaluation.gpus
    return SideEvaluations(spec, evaluation, gpus=gpus)


def _scaling(workers: Workers, progress: Progress) -> ScalingConfig:
    """Ask for what the cluster has; `progress` hears of it when that is in use."""
    most, fewest, use_gpu = workers.num_workers, workers.min_workers, workers.use_gpu
    if use_gpu is None:
        use_gpu = ray.cluster_resources().get("GPU", 0) >= most
    least, request = fewest or most, worker_request(most, workers.cpus_per_worker, use_gpu)
    check_places(least, request, "num_workers" if fewest is None else "min_workers")
    if (why := shortage(least, request)) is not None:
        progress({"waiting": why})
    count = most if fewest is None else (fewest, most)
    return ScalingConfig(num_workers=count, use_gpu=use_gpu, resources_per_worker=dict(request))


def _threads(workers: Workers) -> int:
    """PyTorch threads of a worker: the CPUs it asks for, else OMP_NUM_THREADS (1 in the driver of a Ray job), else its
    part of this machine's cores, or of what a step or trial that runs beside others has of them."""
    if workers.cpus_per_worker is not None:
        return max(1, int(workers.cpus_per_worker))
    return int(share(os.environ, workers.num_workers)["OMP_NUM_THREADS"])


def _fit(
    trainer: type[TorchTrainer],
    settings: dict[str, Any],
    storage: Storage,
    scaling: ScalingConfig,
    threads: int,
    max_failures: int,
) -> dict[str, Any]:
    """One life of a worker group; raises PreemptedError if it saved and ended early because it was told to."""
    name = new_name(patiently(lambda: storage.list("ray")))
    filesystem, path = storage.arrow_fs("ray")
    variables = {"OMP_NUM_THREADS": str(threads)}
    if FENCE in os.environ:  # workers outlive this process by a moment, and work on while it is stopped
        variables[FENCE] = os.environ[FENCE]
    run_config = RunConfig(
        name=name,
        storage_path=path,
        storage_filesystem=filesystem,
        failure_config=FailureConfig(max_failures=max_failures),
        worker_runtime_env={"env_vars": variables},
    )
    with kept(signal.SIGINT):
        try:
            result = trainer(_work, train_loop_config=settings, scaling_config=scaling, run_config=run_config).fit()
        except WorkerGroupError as error:
            raise mistake(error) or error from None
    outcome: Any = result.return_value  # rank 0's
    if outcome["error"] == "diverged":
        raise NonFiniteLossError(outcome["message"])
    if outcome["error"] == "preempted":
        raise PreemptedError(outcome["message"])
    return outcome["summary"]


@portably  # Ray's controller takes a worker whose error it cannot make again for dead
def _work(settings: dict[str, Any]) -> dict[str, Any]:
    """Runs on each worker. How a run ends on all of them is returned: if it were raised, Ray would retry."""
    if os.path.isdir(settings["folder"]):  # Ray starts workers in one of its own; a relative `source` means the user's
        os.chdir(settings["folder"])
    spec, reader = settings["spec"], ray_batches if settings["data_reader"] == "ray" else None
    notice, sigterm = ray_notice(), ray_sigterm()
    first = ray.train.get_context().get_world_rank() == 0
    run = {"model": spec["model"], "train": spec["train"], **spec["info"].get("config", {})}
    sink = WandbSink(spec["run_id"], spec["out"], run, settings["wandb"] if first else "off")
    live = [LiveMetrics(spec["run_id"]), sink] if first else []
    try:
        # Rank 0's word stops all of them; a thousand need not ask the store.
        with sink, requested(spec["out"]) if first else nullcontext(threading.Event()) as asked:
            summary = worker.run(
                WorkerSpec(**spec),
                report=report_to_ray,
                callbacks=live,
                stop=lambda: max(notice(), sigterm(), STOP if asked.is_set() else 0),
                reader=reader,
            )
        return {"error": None, "summary": summary}
    except PreemptedError as stopped:
        return {"error": "preempted", "message": str(stopped)}
    except ConfigError as error:  # raised: it may be this worker's alone, for whom the others would wait
        raise ConfigError(str(error)) from None
    except NonFiniteLossError as error:
        return {"error": "diverged", "message": str(error)}


def report_to_ray(metrics: dict[str, Any]) -> None:
    # Without Ray's Checkpoint: ours are written, verified and pruned by ourselves, and Ray cannot load a run whose
    # registered checkpoint is gone. The numbers are for Tune and Ray's dashboard.
    ray.train.report(metrics)


@contextmanager
def _followed(storage: Storage, progress: Progress, waits: threading.Event) -> Iterator[None]:
    """Call `progress` with what rank 0 writes to `<out>/progress.json`, while the block runs; before that, whenever
    training began anew, with the step that it goes on from, and with what it waits for unless that was said."""
    stop = threading.Event()
    seen: dict[str, Any] = {}

    def look() -> None:
        try:
            values = storage.read_json(PROGRESS)
        except (*STORAGE_ERRORS, ValueError):  # not there, or storage is away: whoever watches sees it later
            return
        if values == seen:
            return
        anew = values["began"] != seen.get("began") or values["step"] <= seen["step"]
        if anew and values["began"]:
            progress({"notice": f"resumes from step {values['began']:,} of {values['steps']:,}"})
        seen.update(values)
        progress({key: value for key, value in values.items() if key not in ("began", "time")})

    def follow() -> None:
        while not stop.wait(POLL_SECONDS):
            look()
            if not seen and not waits.is_set() and (why := kept_waiting()) is not None:
                progress({"waiting": why})

    storage.delete(PROGRESS)  # an earlier attempt's last words
    thread = threading.Thread(target=follow, name="lt2-progress", daemon=True)
    thread.start()
    try:
        yield
    finally:
        stop.set()
        thread.join()
        look()
