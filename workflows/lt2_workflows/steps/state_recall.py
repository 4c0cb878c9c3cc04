"""The step type of one state-recall curriculum: an architecture at a depth."""

from __future__ import annotations

import json
from typing import Any, ClassVar, Literal

from lt2.layout import loops_text
from lt2_platform.evaluate.config import StateRecallConfig
from lt2_workflows.engine.context import StepContext
from lt2_workflows.graph import StepConfig, step_type


class StateRecallStep(StepConfig, StateRecallConfig):
    """Train and test a model on state-based recall. Settings: StateRecallConfig."""

    produces: ClassVar[str] = "state_recall"
    type: Literal["state_recall"] = "state_recall"

    @property
    def inner(self) -> StateRecallConfig:
        return StateRecallConfig.model_validate({name: getattr(self, name) for name in StateRecallConfig.model_fields})


def describe_state_recall(config: StateRecallStep, context: StepContext) -> str:
    stages = ", ".join(map(str, config.stages))
    return (
        f"{config.layout.type} layout, {loops_text(config.n_loops)}, n in {stages}, "
        f"at most {config.max_steps:,} steps each"
    )


def task(n: int, swaps: int) -> str:
    """The name of a task of n bits; a stage has as many swaps as bits, and only other numbers are part of the name."""
    return f"state_recall_{n}" if n == swaps else f"state_recall_{n}_swaps_{swaps}"


@step_type(StateRecallStep, describe=describe_state_recall)
def run_state_recall(config: StateRecallStep, context: StepContext) -> dict[str, Any]:
    """Result: {"run", "n_max", "stage", "steps"}; every evaluation's accuracies go to a run of the results store."""
    from lt2_platform.evaluate.state_recall import run_curriculum
    from lt2_platform.results.store import ResultsStore
    from lt2_workflows.provenance import provenance

    store = ResultsStore(context.storage)
    settings = json.loads(config.inner.model_dump_json())
    made_by = {"workflow": context.workflow.id, "step": context.step.id, **provenance()}
    with store.create_run(context.run_id, {"config": settings, **made_by}) as run:
        began = 0

        def evaluated(entry: dict[str, Any], found: bool) -> None:
            nonlocal began
            run.log(entry["step"], {"loss": entry["loss"], "accuracy": entry["all"]})
            if found:
                began = entry["step"]
                return
            if began:  # told with the first news: nothing else is progress
                context.progress({"notice": f"resumes from step {began:,}"})
                began = 0
            message = f"{entry['n']} bits, {entry['swaps']} swaps: accuracy {entry['all']:.3f}"
            context.progress({"message": message, "step": entry["step"], "accuracy": entry["all"]})

        found = run_curriculum(config.inner, out=context.out, evaluated=evaluated)
    rows = [
        {"task": task(entry["n"], entry["swaps"]), "metric": metric, "value": entry[metric], "step": entry["step"]}
        for entry in found["history"]
        for metric in ("all", "final", "moved")
    ]
    summary = {"task": "state_recall", "step": found["steps"]}
    rows += [{**summary, "metric": name, "value": found[name]} for name in ("n_max", "stage")]
    store.log_eval(context.run_id, "state_recall", rows)
    return {"run": context.run_id, **{name: found[name] for name in ("n_max", "stage", "steps")}}
