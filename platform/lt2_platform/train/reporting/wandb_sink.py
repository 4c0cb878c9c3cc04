"""Rank 0's metrics for Weights & Biases, beside the results store, which stays the record.

Offline unless told otherwise: files that `wandb sync` uploads whenever somebody wants to. Whatever happens to wandb
costs its curve, never the run and never a step: a thread does everything.
"""

from __future__ import annotations

import logging
import os
import queue
import tempfile
import threading
from typing import Any

from lt2.train.loop import TrainState
from lt2_platform.storage import S3
from lt2_platform.train.config import WandbMode

log = logging.getLogger(__name__)

FINISH_SECONDS = 30.0
INIT_SECONDS = 60.0
WAITING_ROWS = 10_000  # held for a wandb that hangs; what comes then is missing in its curve


def resolve_mode(mode: WandbMode) -> WandbMode:
    """ "auto" is what WANDB_MODE says, else online where a key is configured (WANDB_API_KEY), else offline."""
    if mode != "auto":
        return mode
    asked = os.environ.get("WANDB_MODE", "")
    if asked in ("disabled", "dryrun"):
        return "off" if asked == "disabled" else "offline"
    if asked in ("online", "offline"):
        return asked
    return "online" if os.environ.get("WANDB_API_KEY") else "offline"


class WandbSink:
    """Callback of the training loop, and a context that ends wandb's run with the attempt.

    The run has the id `run_id`, so that a resume continues it; its project is $WANDB_PROJECT or "lt2". Files go to
    `<out>/wandb`, or to a temporary folder when `out` is on S3.
    """

    def __init__(self, run_id: str, out: str, config: dict[str, Any], mode: WandbMode = "auto"):
        self.mode = resolve_mode(mode)
        folder = os.path.join(tempfile.gettempdir(), "lt2-wandb", run_id) if out.startswith(S3) else out
        self.settings: dict[str, Any] = {
            "project": os.environ.get("WANDB_PROJECT", "lt2"),
            "id": run_id,
            "name": run_id,
            "resume": "allow" if self.mode == "online" else None,  # offline, `wandb sync` joins the parts by the id
            "dir": folder,
            "config": config,
            "mode": self.mode,
        }
        self.rows: queue.SimpleQueue[tuple[int, dict[str, float]] | None] = queue.SimpleQueue()
        self.thread = threading.Thread(target=self._work, name="lt2-wandb", daemon=True)

    def __enter__(self) -> WandbSink:
        if self.mode != "off":
            self.thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        if self.mode == "off":
            return
        self.rows.put(None)
        self.thread.join(FINISH_SECONDS)
        if self.thread.is_alive():
            log.warning("wandb has not finished in %.0f s; continuing without it", FINISH_SECONDS)

    def on_step(self, state: TrainState, metrics: dict[str, float]) -> None:
        if self.thread.is_alive() and self.rows.qsize() < WAITING_ROWS:
            self.rows.put((state.step, dict(metrics) | {"tokens": state.tokens}))

    def _work(self) -> None:
        try:
            import wandb

            os.makedirs(self.settings["dir"], exist_ok=True)
            quiet = wandb.Settings(console="off", silent=True, disable_git=True, disable_code=True)
            quiet.init_timeout = INIT_SECONDS
            run = wandb.init(**self.settings, settings=quiet)
            log.info("wandb, %s: %s", self.mode, run.url if self.mode == "online" else run.dir)
            try:
                while (row := self.rows.get()) is not None:
                    run.log(row[1], step=row[0])
            finally:
                run.finish()
        except Exception as error:  # a service down, a full disk, a key revoked, wandb itself: training must not notice
            log.warning("wandb failed (%s); training continues, and the results store has every metric", error)
