"""What a step's functions are given besides its config."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from lt2.config import ConfigError
from lt2_platform.progress import Progress, silent
from lt2_platform.train.on_ray.stopping import StopRequest
from lt2_workflows.engine.records import read_done
from lt2_workflows.graph import Ref, Step, Workflow

if TYPE_CHECKING:
    from lt2_platform.storage import Storage


@dataclass(frozen=True)
class StepContext:
    """What a step function may use: where to write, where its inputs are, and how to say how far it is.

    `out` is the step's output folder (path or URI). It may hold the remains of an attempt that was cut off;
    the step continues from them or overwrites them. `run_id` is stable across attempts. A step that can save and end
    sets `stop.possible`; from then on a signal is no exception but sets `stop.asked`, for the driver's patience.
    """

    storage: Storage
    workflow: Workflow
    step: Step
    progress: Progress = silent
    stop: StopRequest = field(default_factory=StopRequest)

    @property
    def out(self) -> str:
        return self.storage.join(self.step.folder, "out")

    @property
    def run_id(self) -> str:
        return self.step.id

    def path(self, source: Ref | str) -> str:
        """The output folder of the step that `source` refers to; a plain path or URI is returned as it is."""
        if isinstance(source, str):
            return source
        return self.storage.join(self.workflow.steps[source.step].folder, "out")

    def result(self, source: Ref) -> dict[str, Any]:
        """What the function of the referenced step returned."""
        done = read_done(self.storage, self.workflow.steps[source.step])
        if done is None:
            raise ConfigError(f"step {source.step!r} has not finished; run it first")
        return done["result"]
