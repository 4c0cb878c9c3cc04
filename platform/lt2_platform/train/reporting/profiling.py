"""A profiler trace of chosen steps, kept with the run.

<out>/profile/steps-00000010-00000012.json.gz     for chrome://tracing, Perfetto or TensorBoard
"""

from __future__ import annotations

import logging
import tempfile
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import TypeVar

import torch
from torch.profiler import ProfilerActivity, profile

from lt2_platform.storage import Storage
from lt2_platform.storage_errors import STORAGE_ERRORS

log = logging.getLogger(__name__)

Item = TypeVar("Item")


def traced(data: Iterator[Item], step: Callable[[], int], steps: tuple[int, int], out: str) -> Iterator[Item]:
    """`data`, tracing the steps from steps[0] to steps[1] (from 1) of the loop that asks for one item per step.

    step(): optimizer steps done. The trace is written when the last of them is over, or when the loop ends within;
    storage that does not take it costs the trace, not the run.
    """
    first, last = steps
    running: profile | None = None
    began = 0
    try:
        while True:
            done = step()
            if running is None and first <= done + 1 <= last:
                running, began = profile(activities=_activities(), record_shapes=True, profile_memory=True), done + 1
                running.start()
            elif running is not None and done >= last:
                running = _write(running, began, done, out)
            try:
                item = next(data)
            except StopIteration:
                return
            yield item
    finally:
        if running is not None:
            _write(running, began, step(), out)


def _activities() -> list[ProfilerActivity]:
    return [ProfilerActivity.CPU, *([ProfilerActivity.CUDA] if torch.cuda.is_available() else [])]


def _write(trace: profile, began: int, ended: int, out: str) -> None:
    trace.stop()
    if ended < began:
        return
    name = f"profile/steps-{began:08d}-{ended:08d}.json.gz"
    with tempfile.TemporaryDirectory() as folder:
        file = Path(folder, "trace.json.gz")
        trace.export_chrome_trace(str(file))
        try:
            Storage(out).write_bytes(name, file.read_bytes())
        except STORAGE_ERRORS as error:
            log.warning("the profiler's trace is not written: %s", error)
            return
    log.info("profiler trace of steps %d to %d: %s", began, ended, Storage(out).join(name))
