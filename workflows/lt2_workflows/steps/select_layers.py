"""The step that chooses which layers keep attention.

Importing this module imports neither torch nor Ray.
"""

from __future__ import annotations

from typing import Any, ClassVar, Literal

from pydantic import Field, model_validator

from lt2.config import ConfigError
from lt2.distill.select import best_layers, uniform_layers
from lt2_workflows.console import table
from lt2_workflows.engine.context import StepContext
from lt2_workflows.graph import StepConfig, step_type
from lt2_workflows.steps.refs import CheckpointRef, DatasetRef


class SelectLayersStep(StepConfig):
    """Choose the `count` layers that keep attention (paper, section Distilling).

    Attributes:
        method: "kl" ranks by the probes' distance to the teacher; "one_shot" by that of the untrained single-layer
            students of a stage-1 student; "uniform" spaces them evenly and needs neither.
        probes: of "kl": the short stage-2 runs, one per layer in order, the i-th with kept (i,).
        teacher, student, data, sequences: of "one_shot": who is compared, on how many held-out sequences.
    """

    produces: ClassVar[str] = "selection"
    type: Literal["select_layers"] = "select_layers"
    method: Literal["kl", "one_shot", "uniform"]
    count: int = Field(ge=1)
    n_layers: int = Field(ge=1)
    probes: tuple[CheckpointRef, ...] = ()
    teacher: CheckpointRef | str | None = None
    student: CheckpointRef | str | None = None
    data: DatasetRef | str | None = None
    sequences: int = Field(default=32, ge=1)

    @model_validator(mode="after")
    def _inputs(self) -> SelectLayersStep:
        if self.count > self.n_layers:
            raise ValueError(f"count {self.count} exceeds the {self.n_layers} layers there are")
        if self.method == "kl" and len(self.probes) != self.n_layers:
            raise ValueError(f"method kl needs one probe per layer, {self.n_layers}; there are {len(self.probes)}")
        if self.method == "one_shot" and None in (self.teacher, self.student, self.data):
            raise ValueError("method one_shot needs teacher, student (of stage 1) and data")
        return self


def describe_select(config: SelectLayersStep, context: StepContext) -> str:
    how = {"kl": f"by {len(config.probes)} probes", "one_shot": "by swapping one layer at a time", "uniform": "evenly"}
    return f"{config.count} of {config.n_layers} layers keep attention, chosen {how[config.method]}"


@step_type(SelectLayersStep, describe=describe_select)
def run_select_layers(config: SelectLayersStep, context: StepContext) -> dict[str, Any]:
    """Result: {"kept": layers, "scores": KL of each layer's student, None where nothing was measured, "text"}."""
    scores: list[float] | None = None
    if config.method == "kl":
        found = [context.result(probe) for probe in config.probes]
        for layer, result in enumerate(found):
            if result["kept"] != [layer]:
                name = config.probes[layer].step
                raise ConfigError(
                    f"probe {name} keeps {result['kept']}, not [{layer}]; give the probes in layers' order"
                )
        scores = [result["kl"] for result in found]
    elif config.method == "one_shot":
        from lt2_platform.distill.measure import one_shot_scores

        places = (config.student, config.teacher, config.data)
        student, teacher, data = (context.path(place) for place in places if place is not None)  # as all are, here
        scores = one_shot_scores(student, teacher, data, max_sequences=config.sequences, progress=context.progress)
    if scores is None:
        kept, measured = uniform_layers(config.n_layers, config.count), {}
    else:
        kept = best_layers(scores, config.count)
        measured = {layer: {"KL with it alone kept": f"{score:.4f}"} for layer, score in enumerate(scores)}
    layers = range(config.n_layers)
    rows = [{"layer": n, **measured.get(n, {}), "kept": "yes" if n in kept else ""} for n in layers]
    text = table(rows, list(rows[0]))
    record = {"method": config.method, "kept": list(kept), "scores": scores}
    context.storage.write_json(f"{context.step.folder}/out/selection.json", record)
    return {"kept": list(kept), "scores": scores, "text": f"\nlayers that keep attention ({config.method})\n\n{text}\n"}
