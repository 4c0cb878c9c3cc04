"""The callback that saves: storage that refuses for a while costs retries, not the run."""

from __future__ import annotations

import logging
import math
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import torch

from lt2.config import ModelConfig
from lt2.model import LoopedLM
from lt2.training import TrainConfig, TrainState
from lt2_platform.train import checkpoint
from lt2_platform.train.retention import Keep
from lt2_platform.train.shards import StorageRefusedError

log = logging.getLogger(__name__)

REPORT_SECONDS = 5.0  # Ray takes one report in two seconds and blocks the loop for more
FIRST_RETRY_SECONDS, LONGEST_RETRY_SECONDS = 1.0, 60.0


@dataclass
class Saver:
    """A checkpoint when due, and now and then a report about it.

    When storage refuses (full disk, S3 away), training goes on and the save is tried again at the steps that are
    logged, after 1, 2, 4, … at most 60 seconds; `settle` waits for it. After `train.save_patience_s` of refusals
    StorageRefusedError is raised. All methods are collective. flush: writes the metrics, on rank 0.
    """

    folder: str
    model_config: ModelConfig
    config: TrainConfig
    tokenizer: dict[str, Any]
    tokenizer_files: dict[str, bytes]
    report: Callable[[dict[str, Any]], None] | None
    validation_losses: Callable[[], dict[int, float]]
    flush: Callable[[], None]
    reported: float = -math.inf
    saved: int = -1
    refused_since: float | None = None
    wait: float = field(default_factory=lambda: FIRST_RETRY_SECONDS)
    tried: float = -math.inf
    trained: tuple[Any, Any] = field(default=(None, None))

    def on_checkpoint(self, state: TrainState, model: LoopedLM, optimizer: torch.optim.Optimizer) -> None:
        self.trained = (model, optimizer)
        if state.step != self.saved and (self.refused_since is None or self._may_retry()):
            self._try(state)

    def on_step(self, state: TrainState, metrics: dict[str, float]) -> None:
        if self.refused_since is not None and self._may_retry():
            self._try(state)

    def on_end(self, state: TrainState) -> None:
        self.settle(state)

    def settle(self, state: TrainState) -> None:
        """Return once nothing is waiting to be saved."""
        while self.refused_since is not None:
            time.sleep(0.1 * self.wait)
            if self._may_retry():
                self._try(state)

    def _may_retry(self) -> bool:
        return checkpoint.from_rank_zero(time.monotonic() - self.tried >= self.wait)  # rank 0's clock decides

    def _try(self, state: TrainState) -> None:
        try:
            # The metrics of a step must be safe before the checkpoint that makes a resume skip it.
            checkpoint.on_rank_zero(self.flush)
            uri = self._save(state)
        except StorageRefusedError as error:
            self._refused(state, error)
            return
        if self.refused_since is not None:
            log.warning("step %d is saved; storage takes writes again", state.step)
        self.saved, self.refused_since, self.wait = state.step, None, FIRST_RETRY_SECONDS
        if self.report is None:
            return
        # Rank 0's clock decides, because a report waits for all ranks.
        last = state.step == self.config.steps
        if checkpoint.from_rank_zero(last or time.monotonic() - self.reported >= REPORT_SECONDS):
            self.reported = time.monotonic()
            self.report({"step": state.step, "loss": state.loss, "checkpoint": uri})

    def _save(self, state: TrainState) -> str:
        model, optimizer = self.trained
        return checkpoint.save(
            self.folder,
            model,
            optimizer,
            state,
            config=self.model_config,
            tokenizer=self.tokenizer,
            tokenizer_files=self.tokenizer_files,
            train=self.config.model_dump(mode="json"),
            keep=Keep(self.config.keep_checkpoints, self.config.keep_every, self.config.keep_best),
            validation_loss=self.validation_losses().get(state.step),
        )

    def _refused(self, state: TrainState, error: StorageRefusedError) -> None:
        now = time.monotonic()
        if self.refused_since is None:
            self.refused_since = now
        else:
            self.wait = min(2 * self.wait, LONGEST_RETRY_SECONDS)
        self.tried = now
        since = now - self.refused_since
        if checkpoint.from_rank_zero(since > self.config.save_patience_s):
            raise StorageRefusedError(
                f"no checkpoint could be written to {self.folder} for {since:.0f} s (train.save_patience_s): {error}"
            ) from error
        log.error(
            "CHECKPOINT NOT WRITTEN at step %d (%s). Training goes on, the next try is in %.0f s; for %.0f s now, "
            "the run fails after %.0f s", state.step, error, self.wait, since, self.config.save_patience_s,
        )  # fmt: skip
