"""Runs a workflow: steps in dependency order, independent ones side by side, each attempt in its own process.

The driver holds no state that matters: what is finished, running or failed is read from storage, so it may be killed at
any moment and started again. A step whose attempt was cut off is taken over once its lease is released or stale.
"""

from __future__ import annotations

import logging
import os
import threading
from collections.abc import Callable, Mapping
from concurrent.futures import FIRST_COMPLETED, Future, ThreadPoolExecutor, wait
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, field
from functools import partial
from typing import TYPE_CHECKING, Any, TypeVar

from lt2.config import ConfigError
from lt2_platform.machine.cores import usable
from lt2_platform.storage_errors import STORAGE_ERRORS, patiently
from lt2_workflows.engine.child import run_child
from lt2_workflows.engine.context import StepContext
from lt2_workflows.engine.cores import side_by_side
from lt2_workflows.engine.endings import BAD_INPUT, BUSY, DONE, INFRASTRUCTURE, INTERRUPTED
from lt2_workflows.engine.local_ray import ray_head, unanswered
from lt2_workflows.engine.records import TTL_S, Events, Watch, describe_holder, read_done, release_for, write_workflow
from lt2_workflows.graph import Step, Workflow
from lt2_workflows.inputs import check_inputs, check_settings
from lt2_workflows.outside import stale
from lt2_workflows.provenance import drift, provenance

if TYPE_CHECKING:
    from lt2_platform.storage import Storage

# Infrastructure errors do not count against a step's retries, but a step that only ever kills its worker must end:
# so many in all, and so many in a row that got nowhere.
MAX_LOST, MAX_LOST_WITHOUT_PROGRESS = 100, 4

log = logging.getLogger(__name__)

Say = Callable[[dict[str, Any]], None]
Answer = TypeVar("Answer")


@dataclass(frozen=True)
class Outcome:
    """How a step ended: state is done, skipped, failed, bad_input, blocked (a step it needs failed) or interrupted."""

    state: str
    attempt: int = 0
    error: str | None = None
    log: str | None = None


@dataclass
class Driver:
    """What the threads of one `run` share."""

    storage: Storage
    workflow: Workflow
    events: Events
    say: Say
    ttl_s: float
    wait_for_others: bool
    environment: Mapping[str, str]
    side_by_side: Mapping[str, int]
    stopping: threading.Event
    at_once: threading.Event = field(default_factory=threading.Event)

    def ask(self, question: Callable[[], Answer]) -> Answer:
        """What storage answers: one that is away for a while is no reason to end the steps that run."""
        return patiently(question, self.stopping)

    def tell(self, step: Step, event: str, **details: Any) -> None:
        message = {"step": step.name, "event": event, **details}
        if event != "progress":
            self.events.add(message)
        self.say(message)


def run(
    workflow: Workflow,
    storage: Storage,
    *,
    only: str | None = None,
    wait_for_others: bool = True,
    ttl_s: float = TTL_S,
    say: Say = lambda event: None,
    stop: threading.Event | None = None,
) -> dict[str, Outcome]:
    """Bring the workflow (or its step `only`, whose inputs must be finished) to its end; the outcome of each step.

    `say` is called, from several threads, with {"step", "event", …} for everything that happens. Bad input that can be
    seen beforehand, an unusable root and missing inputs of any step included, raises ConfigError before anything is
    written. `stop`, once set, stops the running attempts, those that train after a checkpoint, and releases their
    leases; KeyboardInterrupt (SIGTERM as well, see the CLI) does the same and is raised again. Another one does not
    wait for checkpoints.
    """
    storage.check_readable(new=True)
    chosen = _choose(workflow, storage, only)
    pending = [step for step in chosen.values() if read_done(storage, step) is None]
    check_inputs(workflow, storage, pending)
    check_settings(pending)
    if _needs_ray(pending) and (silent := unanswered(os.environ.get("RAY_ADDRESS", ""))):
        raise ConfigError(silent)
    storage.check_writable()
    write_workflow(storage, workflow)
    with _ray_for(pending) as environment:
        events = Events(storage, workflow.id)
        stopping = stop or threading.Event()
        shares = side_by_side(workflow.steps)  # also for a step run alone: other threads may make other sums
        driver = Driver(storage, workflow, events, say, ttl_s, wait_for_others, environment, shares, stopping)
        return _run_graph(driver, chosen)


def _needs_ray(steps: list[Step]) -> bool:
    return any(step.config.needs_ray for step in steps)


def _ray_for(pending: list[Step]) -> AbstractContextManager[dict[str, str]]:
    """The environment of attempts, with a Ray if one is needed that we are not inside of."""
    if "RAY_ADDRESS" in os.environ or not _needs_ray(pending):
        return nullcontext(dict(os.environ))
    # A coordinator takes no CPU, but as many logical CPUs as workers must exist or Train waits forever for a place.
    workers = max(step.config.workers for step in pending)
    return ray_head(max(usable(), workers + 1))


def _choose(workflow: Workflow, storage: Storage, only: str | None) -> dict[str, Step]:
    if only is None:
        return workflow.steps
    if only not in workflow.steps:
        raise ConfigError(f"workflow {workflow.name} has no step {only!r}; its steps: {', '.join(workflow.steps)}")
    step = workflow.steps[only]
    missing = [need for need in step.needs if read_done(storage, workflow.steps[need]) is None]
    if missing:
        raise ConfigError(f"step {only!r} needs {', '.join(missing)}, not finished in {storage.root}; run that first")
    return {only: step}


def _run_graph(driver: Driver, steps: Mapping[str, Step]) -> dict[str, Outcome]:
    outcomes: dict[str, Outcome] = {}
    running: dict[Future[Outcome], str] = {}
    with ThreadPoolExecutor(max_workers=len(steps) or 1, thread_name_prefix="step") as pool:
        try:
            while len(outcomes) < len(steps):
                for name, step in steps.items():
                    if name in outcomes or name in running.values():
                        continue
                    if driver.stopping.is_set():
                        outcomes[name] = Outcome("interrupted")
                        continue
                    needs = {need: outcomes.get(need) for need in step.needs if need in steps}
                    ended = {need: outcome for need, outcome in needs.items() if outcome is not None}
                    failed = [need for need, outcome in ended.items() if outcome.state not in ("done", "skipped")]
                    if failed:
                        outcomes[name] = Outcome("blocked", error=f"needs {', '.join(failed)}")
                        driver.tell(step, "blocked", error=outcomes[name].error)
                    elif len(ended) == len(needs):
                        running[pool.submit(_drive, driver, step)] = name
                if not running:
                    continue
                for future in wait(running, return_when=FIRST_COMPLETED).done:
                    outcomes[running.pop(future)] = future.result()
        except BaseException as error:
            if driver.stopping.is_set() and isinstance(error, KeyboardInterrupt):  # whoever asked waits no longer
                driver.at_once.set()
            driver.stopping.set()  # the threads stop their attempts, and leaving the pool waits for them
            try:
                wait(running)
            except KeyboardInterrupt:
                driver.at_once.set()
            raise
    return outcomes


def _drive(driver: Driver, step: Step) -> Outcome:
    """Attempt a step until it is done, its retries are used up, or the driver stops."""
    failures = lost = lost_in_a_row = 0
    watch = Watch(driver.storage, step.folder)
    ran = False
    while True:
        done = driver.ask(lambda: read_done(driver.storage, step))
        if done is not None:
            return _finished(driver, step, done, ran)
        newest = _wait_for_turn(driver, step, watch)
        if newest is None:
            continue
        if driver.stopping.is_set():
            return Outcome("interrupted")
        ran = True
        code, details = run_child(driver, step, newest + 1)
        attempt, error = newest + 1, details.get("error")
        log = driver.storage.join(step.folder, f"attempts/{attempt}/log")
        if code in (DONE, BUSY):
            continue
        if code == BAD_INPUT:
            driver.tell(step, "failed", attempt=attempt, error=error, log=log)
            return Outcome("bad_input", attempt, error, log)
        if driver.stopping.is_set():
            driver.tell(step, "interrupted", attempt=attempt, error=error)
            if code != INTERRUPTED:  # it was killed, or failed, before it could release its lease
                _release(driver, step, attempt)
            return Outcome("interrupted", attempt, error, log)
        infrastructure = code in (INFRASTRUCTURE, INTERRUPTED)
        lost += infrastructure
        lost_in_a_row = lost_in_a_row + 1 if infrastructure and not details.get("progressed") else 0
        failures += not infrastructure
        given_up = lost >= MAX_LOST or lost_in_a_row >= MAX_LOST_WITHOUT_PROGRESS
        if failures > step.config.resources.retries or given_up:
            driver.tell(step, "failed", attempt=attempt, error=error, log=log)
            return Outcome("failed", attempt, error, log)
        driver.tell(step, "retry", attempt=attempt, error=error, log=log, infrastructure=infrastructure)
        driver.stopping.wait(2.0 ** min(5, failures + lost_in_a_row - 1))


def _release(driver: Driver, step: Step, attempt: int) -> None:
    try:
        release_for(driver.storage, step.folder, attempt)
    except STORAGE_ERRORS as error:  # others look after it themselves; what else stops here must not be cut short
        log.warning("%s: the lease of attempt %d is not released (%s)", step.name, attempt, error)


def _finished(driver: Driver, step: Step, done: dict[str, Any], ran: bool) -> Outcome:
    log = driver.storage.join(step.folder, f"attempts/{done['attempt']}/log")
    if ran:
        driver.tell(step, "done", attempt=done["attempt"], result=done["result"])
        return Outcome("done", done["attempt"], log=log)
    changed, told = drift(done["provenance"], provenance()), ""
    if driver.workflow.part_of is None:  # not once for every trial of a sweep
        told = driver.ask(partial(stale, StepContext(driver.storage, driver.workflow, step), done))
    driver.tell(step, "skipped", attempt=done["attempt"], result=done["result"], drift=changed, stale=told)
    return Outcome("skipped", done["attempt"], log=log)


def _wait_for_turn(driver: Driver, step: Step, watch: Watch) -> int | None:
    """The newest attempt's number once no living process holds it; None when the step got done meanwhile."""
    told = False
    while not driver.stopping.is_set():
        newest, holder = driver.ask(watch.holder)
        if holder is None:
            return newest
        if driver.ask(lambda: read_done(driver.storage, step)) is not None:
            return None
        if not told:
            # Of a holder that has just died we cannot tell yet; it costs its time-to-live to be sure.
            waits = {"ttl_s": holder["ttl_s"], "only_looks": not driver.wait_for_others}
            driver.tell(step, "waiting", attempt=newest, holder=describe_holder(holder), **waits)
            told = True
        if not driver.wait_for_others and watch.heard():
            raise ConfigError(
                f"step {step.name} is being run by {describe_holder(holder)}; wait for it or run without --no-wait"
            )
        driver.stopping.wait(min(1.0, driver.ttl_s / 10))
    return 0
