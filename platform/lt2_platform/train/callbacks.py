"""What a worker does beside the loop's steps: metrics and progress for those who watch, validation now and then."""

from __future__ import annotations

import json
import logging
import math
import time
from dataclasses import dataclass, field
from functools import partial
from typing import TYPE_CHECKING, Any

from lt2.model import LoopedLM
from lt2.train.loop import TrainConfig, TrainState, autocast
from lt2_platform.background import Background
from lt2_platform.data.stream import PackedDataset
from lt2_platform.evaluate.validation import perplexity
from lt2_platform.results.store import ResultsStore, RunWriter
from lt2_platform.storage import Storage
from lt2_platform.storage_errors import STORAGE_ERRORS

if TYPE_CHECKING:
    from lt2_platform.train.worker import WorkerSpec

log = logging.getLogger(__name__)

PROGRESS = "progress.json"
PROGRESS_SECONDS = 0.5
REFUSED_SECONDS = 60.0
SETTLING_STEPS = 3  # the first steps of a process compile and load, so their time says nothing about the others


@dataclass
class Evaluator:
    """Callback: validation loss on the first sequences of the split. Every rank runs all of them, as FSDP requires."""

    data: str
    config: TrainConfig
    logger: Logger | None
    last: dict[int, float] = field(default_factory=dict)  # the loss of the last evaluated step

    def on_eval(self, state: TrainState, model: LoopedLM) -> None:
        with autocast(self.config.precision, model.embed.weight.device):
            result = perplexity(
                model,
                PackedDataset(self.data, "validation"),
                max_sequences=self.config.eval_sequences,
                document_mask=self.config.document_mask,
            )
        self.last = {state.step: result["loss"]}
        if self.logger is not None:
            self.logger.writer.log(state.step, {"validation_loss": result["loss"]})


@dataclass
class Logger:
    """Callback of rank 0: metrics to the results store, and a small progress file for whoever launched us.

    Not through ray.train.report: that is limited to one call in two seconds, and it blocks. Threads write both, so that
    a slow store costs the loop nothing: progress twice a second, metrics once a minute.
    """

    writer: RunWriter
    out: Storage
    config: TrainConfig
    began: int  # the step that training goes on from
    written: float = -math.inf
    writing: Background | None = None

    @classmethod
    def open(cls, spec: WorkerSpec, config: TrainConfig, began: int) -> Logger:
        info = {**spec.info, "config": {"model": spec.model, "train": spec.train, **spec.info.get("config", {})}}
        writer = ResultsStore(Storage(spec.storage_root)).create_run(spec.run_id, info)
        return cls(writer, Storage(spec.out), config, began)

    def on_step(self, state: TrainState, metrics: dict[str, float]) -> None:
        self.writer.log(state.step, metrics | {"tokens": state.tokens})
        last = state.step == self.config.steps
        if self.writing is not None:
            if not (last or self.writing.done()):
                return
            self.writing.take()  # what it raised is no refusal of the store, and ends the run
        if last:
            self._write_progress(_progress(state, metrics, self.config, self.began))
        elif time.monotonic() - self.written >= PROGRESS_SECONDS:
            values = _progress(state, metrics, self.config, self.began)
            self.writing = Background(partial(self._write_progress, values), "lt2-progress")

    def _write_progress(self, values: dict[str, Any]) -> None:
        pause = 0.0
        try:
            self.out.write_bytes(PROGRESS, json.dumps(values).encode())
        except STORAGE_ERRORS as error:
            log.warning("progress not written (%s); training continues", error)
            pause = REFUSED_SECONDS  # a line each half second says no more
        self.written = time.monotonic() + pause


def _progress(state: TrainState, metrics: dict[str, float], config: TrainConfig, began: int) -> dict[str, Any]:
    left = config.steps - state.step
    settled = state.step - began > max(SETTLING_STEPS, config.log_every)  # metrics are means since the last logged step
    return {
        "step": state.step,
        "steps": config.steps,
        "loss": metrics["loss"],
        "tokens_per_s": metrics["tokens_per_s"],
        "eta_s": left * metrics["step_time"] if settled or not left else None,
        "time": time.time(),
        "began": began,
    }
