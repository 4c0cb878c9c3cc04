"""What runs inside a Tune trial: the trial's workflow, by the same engine as any other.

The trial itself holds no CPU and no state. Its steps run in processes that end with it (their stdin is a pipe from
here), so a trial that the scheduler stops, or whose driver is killed, leaves neither workers nor reservations behind.
"""

from __future__ import annotations

import math
import os
import queue
import threading
import time
from collections import Counter, deque
from collections.abc import Callable
from typing import Any, Literal, TypedDict

from lt2.config import ConfigError, load_source
from lt2_platform.evaluate.ablations import headline
from lt2_platform.evaluate.repeats import at_own_depth, is_reading
from lt2_platform.storage import Storage
from lt2_platform.train.on_ray.stopping import requested
from lt2_workflows.engine.records import read_done
from lt2_workflows.graph import Workflow
from lt2_workflows.loading import workflow_from_record

SMOOTHED = 10  # reported values of the loss that are averaged
REPORT_SECONDS = 1.0

Report = Callable[[dict[str, Any]], None]


def run_trial(config: dict[str, Any], jobs: dict[str, dict[str, Any]]) -> None:
    """A Tune trainable. `config["trial"]` names one of `jobs`, plain JSON that `lt2_workflows.sweeps.step` makes.

    Reports {"of", "step", "loss", "logged"} of the job's watched steps: the name, the training step, the mean of
    the last SMOOTHED losses and the last of them; and at the end {"outcome": as `outcome` returns it}.
    """
    from ray import tune

    job = jobs[config["trial"]]
    # Where Ray is and how to authenticate: our steps' processes connect on their own, as any driver does.
    os.environ.update(job["environment"])
    if job["record"]["recipe_file"]:
        load_source(job["record"]["recipe_file"])
    workflow = workflow_from_record(job["record"], source=job["label"])
    storage = Storage(job["storage"])
    with requested(job["sweep"]) as stop:
        found = drive(workflow, storage, job, tune.report, stop)
    tune.report({"outcome": found})


def drive(workflow: Workflow, storage: Storage, job: dict[str, Any], report: Report, stop: threading.Event) -> Ended:
    """Run the workflow in a thread, until it ends or is stopped, and pass on its progress; the outcome."""
    from lt2_workflows.engine import executor

    events: queue.Queue[dict[str, Any] | None] = queue.Queue()
    found: dict[str, Any] = {}

    def work() -> None:
        try:
            found["outcomes"] = executor.run(workflow, storage, ttl_s=job["ttl_s"], say=events.put, stop=stop)
        except ConfigError as error:
            found["error"] = str(error)
        except Exception as error:
            found["raised"] = error
        finally:
            events.put(None)

    threading.Thread(target=work, name="trial", daemon=True).start()
    recent: dict[str, deque[float]] = {}
    seen, reported = Counter[str](), time.monotonic()
    while (event := events.get()) is not None:
        values, name = event.get("values") or {}, event["step"]
        if event["event"] != "progress" or name not in job["watch"] or values.get("loss") is None:
            continue
        if name not in recent:  # of a training that goes on, with what it logged before
            recent[name] = deque(losses(storage, workflow.steps[name].id, values["step"]), SMOOTHED)
        recent[name].append(values["loss"])
        if values["step"] > seen[name] and time.monotonic() - reported >= REPORT_SECONDS:
            seen[name], reported = values["step"], time.monotonic()
            mean = sum(recent[name]) / len(recent[name])
            report({"of": name, "step": values["step"], "loss": mean, "logged": values["loss"]})
    if "raised" in found:
        raise found["raised"]
    return outcome(workflow, storage, found)


def losses(storage: Storage, run: str, before: int) -> list[float]:
    """The finite losses that a run has logged below step `before`, in order; none of a run that there is not."""
    from lt2_platform.results.store import ResultsStore

    logged = ResultsStore(storage).metrics(run, ["loss"])
    found = sorted(zip(logged["step"].to_pylist(), logged["value"].to_pylist(), strict=True))
    return [loss for step, loss in found if step < before and math.isfinite(loss)]


class Ended(TypedDict):
    """How a trial ended; `stopped` is by the scheduler. Of one that was not done, run and metrics are empty."""

    state: Literal["done", "failed", "interrupted", "stopped"]
    error: str | None
    log: str | None
    run: str | None
    metrics: dict[str, float]


def not_done(state: Literal["failed", "interrupted", "stopped"], error: str | None, log: str | None = None) -> Ended:
    return {"state": state, "error": error, "log": log, "run": None, "metrics": {}}


def outcome(workflow: Workflow, storage: Storage, found: dict[str, Any]) -> Ended:
    """How a workflow ended."""
    if "error" in found:
        return not_done("failed", found["error"])
    for name, each in found["outcomes"].items():
        if each.state in ("failed", "bad_input"):
            return not_done("failed", f"{name}, attempt {each.attempt}: {each.error}", each.log)
    for name, each in found["outcomes"].items():
        if each.state == "interrupted":
            return not_done("interrupted", f"{name}: {each.error or 'stopped before it began'}", each.log)
    run, metrics = results_of(workflow, storage)
    return {"state": "done", "error": None, "log": None, "run": run, "metrics": metrics}


def results_of(workflow: Workflow, storage: Storage) -> tuple[str | None, dict[str, float]]:
    """(the run of the results store, its numbers) of a finished workflow: the run that the sweep's table has scores of
    (a perplexity, or the paper's tasks), else the one that is evaluated last, if any is.

    Evaluation rows as "task/metric", of the model as it was trained and without readings of it; where
    several steps have one (of several models, say), each as "step/task/metric", since none of them is the trial's. Of a
    recipe without evaluation the plain numbers that its steps returned, as "step/name".
    """
    run, of, scored, evaluations, plain = None, None, None, {}, {}
    for name, step in workflow.steps.items():
        done = read_done(storage, step)
        result = done["result"] if done else {}
        run = result.get("run", run)
        if "n_loops" in result:
            of = result.get("run", of)
            rows = [row for row in at_own_depth(result["rows"], result["n_loops"]) if not is_reading(row)]
            evaluations[name] = {f"{row['task']}/{row['metric']}": row["value"] for row in rows}
            if headline(evaluations[name]):
                scored = of
        plain |= {f"{name}/{key}": value for key, value in result.items() if type(value) in (int, float)}
    asked = Counter(key for found in evaluations.values() for key in found)
    evaluated = {
        key if asked[key] == 1 else f"{name}/{key}": value
        for name, found in evaluations.items()
        for key, value in found.items()
    }
    return scored or of or run, evaluated or plain
