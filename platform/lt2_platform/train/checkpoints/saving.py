"""The callback that saves, in the background: storage that is slow costs no steps, one that refuses costs retries."""

from __future__ import annotations

import logging
import math
import time
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Any

import torch

from lt2.model import LoopedLM
from lt2.train.loop import TrainConfig, TrainState, due_after
from lt2_platform.background import Background
from lt2_platform.train import ranks
from lt2_platform.train.checkpoints import checkpoint
from lt2_platform.train.checkpoints.checkpoint import About
from lt2_platform.train.checkpoints.contents import contents
from lt2_platform.train.checkpoints.retention import Keep
from lt2_platform.train.checkpoints.shards import StorageRefusedError, new_stager, stage

log = logging.getLogger(__name__)

REPORT_SECONDS = 5.0  # Ray takes one report in two seconds and blocks the loop for more
FIRST_RETRY_SECONDS, LONGEST_RETRY_SECONDS = 1.0, 60.0


@dataclass
class Saver:
    """A checkpoint when due, and now and then a report about it.

    With `train.async_save` the loop waits only for a copy in main memory; a thread writes it, and its outcome is heard
    at the next step that is logged. One save is under way at most: another that is due waits for it.

    When storage refuses (full disk, S3 away), training goes on and the save is tried again at the steps that are
    logged, after 1, 2, 4, … at most 60 seconds; `settle` waits for it. After `train.save_patience_s` of refusals
    StorageRefusedError is raised. All methods are collective. flush: writes the metrics, on rank 0. data_files: what
    the data needs to go on from a state, by name; collective. As a context it ends with no thread at work. stalled_s:
    seconds that the loop has been kept waiting since `take_stalled`.
    """

    folder: str
    about: About
    config: TrainConfig
    report: Callable[[dict[str, Any]], None] | None
    validation_losses: Callable[[], dict[int, float]]
    flush: Callable[[], None]
    pinned: Callable[[], set[str]] = set
    data_files: Callable[[TrainState], dict[str, bytes]] = lambda state: {}
    reported: float = -math.inf
    saved: int = -1
    refused_since: float | None = None
    wait: float = field(default_factory=lambda: FIRST_RETRY_SECONDS)
    tried: float = -math.inf
    trained: tuple[Any, Any] = field(default=(None, None))
    stalled_s: float = 0.0
    pending: tuple[TrainState, Background] | None = None

    def __post_init__(self) -> None:
        # Its own group: the thread agrees with other ranks' threads while the loops exchange gradients.
        self.group = ranks.background_group() if self.config.async_save else None
        self.stager = new_stager() if self.config.async_save else None

    def __enter__(self) -> Saver:
        return self

    def __exit__(self, *_: object) -> None:
        if self.pending is not None:  # an error is on its way; what is being written must not outlive the attempt
            self.pending[1].wait()

    def on_checkpoint(self, state: TrainState, model: LoopedLM, optimizer: torch.optim.Optimizer) -> None:
        began = time.perf_counter()
        self.trained = (model, optimizer)
        if self.pending is not None and self.pending[0].step != state.step:
            if not self.pending[1].done():
                log.warning(
                    "step %d: the checkpoint of step %d is still being written; waiting for it (storage is slower than "
                    "train.checkpoint_every)", state.step, self.pending[0].step,
                )  # fmt: skip
            self._take()
        due = self.pending is None and state.step != self.saved
        if due and (self.refused_since is None or self._may_retry()):
            self._try(state)
        self.stalled_s += time.perf_counter() - began

    def on_step(self, state: TrainState, metrics: dict[str, float]) -> None:
        began = time.perf_counter()
        if self.pending is not None and ranks.from_rank_zero(self.pending[1].done()):
            self._take()
        # A step whose checkpoint is due is tried after its evaluation, so that it can be the best.
        waits = self.pending is None and self.refused_since is not None
        if waits and "checkpoint" not in due_after(state.step, self.config) and self._may_retry():
            self._try(state)
        self.stalled_s += time.perf_counter() - began

    def on_end(self, state: TrainState) -> None:
        self.settle(state)

    def settle(self, state: TrainState) -> None:
        """Return once nothing is waiting to be saved."""
        while self.pending is not None or self.refused_since is not None:
            if self.pending is not None:
                self._take()
                continue
            time.sleep(0.1 * self.wait)
            if self._may_retry():
                self._try(state)

    def take_stalled(self) -> float:
        seconds, self.stalled_s = self.stalled_s, 0.0
        return seconds

    def _may_retry(self) -> bool:
        return ranks.from_rank_zero(time.monotonic() - self.tried >= self.wait)  # rank 0's clock decides

    def _try(self, state: TrainState) -> None:
        state = replace(state)  # the loop goes on counting in its own
        try:
            tensors = contents(*self.trained)
            if self.stager is not None:
                write = self._writing(state, stage(self.stager, tensors))
                self.pending = (state, Background(partial(self._write, write), "lt2-save"))
                return
            uri = self._write(self._writing(state, tensors))
        except StorageRefusedError as error:
            self._refused(state, error)
        else:
            self._succeeded(state, uri)

    def _take(self) -> None:
        assert self.pending is not None
        (state, thread), self.pending = self.pending, None
        try:
            uri = thread.take()
        except StorageRefusedError as error:
            self._refused(state, error)
        else:
            self._succeeded(state, uri)

    def _write(self, write: Callable[[], str]) -> str:
        # The metrics of a step must be safe before the checkpoint that makes a resume skip it.
        ranks.on_rank_zero(self.flush, self.group)
        return write()

    def _writing(self, state: TrainState, tensors: dict[str, Any]) -> Callable[[], str]:
        return partial(
            checkpoint.write,
            self.folder,
            tensors,
            state,
            self.about,
            files=self.data_files(state),
            keep=Keep.of_run(self.config),
            validation_loss=self.validation_losses().get(state.step),
            pinned=self.pinned,
            group=self.group,
        )

    def _succeeded(self, state: TrainState, uri: str) -> None:
        if self.refused_since is not None:
            log.warning("step %d is saved; storage accepts writes again", state.step)
        self.saved, self.refused_since, self.wait = state.step, None, FIRST_RETRY_SECONDS
        if self.report is None:
            return
        # Rank 0's clock decides, because a report waits for all ranks.
        last = state.step == self.config.steps
        if ranks.from_rank_zero(last or time.monotonic() - self.reported >= REPORT_SECONDS):
            self.reported = time.monotonic()
            self.report({"step": state.step, "loss": state.loss, "checkpoint": uri})

    def _refused(self, state: TrainState, error: StorageRefusedError) -> None:
        now = time.monotonic()
        if self.refused_since is None:
            self.refused_since = now
        else:
            self.wait = min(2 * self.wait, LONGEST_RETRY_SECONDS)
        self.tried = now
        since = now - self.refused_since
        if ranks.from_rank_zero(since > self.config.save_patience_s):
            raise StorageRefusedError(
                f"no checkpoint could be written to {self.folder} for {since:.0f} s (train.save_patience_s): {error}"
            ) from error
        log.error(
            "CHECKPOINT NOT WRITTEN at step %d (%s). Training continues, next try in %.0f s; failing for %.0f s now, "
            "the run fails after %.0f s", state.step, error, self.wait, since, self.config.save_patience_s,
        )  # fmt: skip


@dataclass
class SaveCost:
    """Callback before those that write: adds save_stall, the seconds that saving kept the loop since the last one."""

    saver: Saver

    def on_step(self, state: TrainState, metrics: dict[str, float]) -> None:
        metrics["save_stall"] = self.saver.take_stalled()
