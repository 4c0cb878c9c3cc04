"""What `lt2 plan` prints: the graph, what would run, and what it would cost. Reads storage, writes nothing."""

from __future__ import annotations

from typing import TYPE_CHECKING

from lt2_workflows.attempt import StepContext
from lt2_workflows.graph import STEP_TYPES, Workflow
from lt2_workflows.records import step_state

if TYPE_CHECKING:
    from lt2_platform.storage import Storage


def describe_plan(workflow: Workflow, storage: Storage) -> str:
    """One line per step in running order: name, run or skip, what it comes after, and its own description."""
    lines = [f"{workflow.id} in {storage.root}"]
    width = max(len(name) for name in workflow.steps)
    for name, step in workflow.steps.items():
        known = step_state(storage, step.folder)
        if known["state"] == "done":
            action = "skip (done)"
        elif known["state"] == "waiting":
            action = "run"
        else:
            action = f"run ({known['state']} in attempt {known['attempt']})"
        after = f"after {', '.join(step.needs)}" if step.needs else ""
        describe = STEP_TYPES[step.config.type].describe
        context = StepContext(storage, workflow, step, lambda values: None)
        lines.append(f"  {name:<{width}}  {action:<12} {after}".rstrip() + f"  [{step.id}]")
        if describe is not None:
            lines.append(f"  {'':<{width}}  {describe(step.config, context)}")
    return "\n".join(lines)


def describe_costs(
    workflow: Workflow, storage: Storage, *, card: str, count: int | None = None, utilisation: float = 0.4
) -> str:
    """Memory and time of every pretrain step on `count` cards (None: its workers); see `cost.describe_cost`."""
    from lt2_workflows.cost import Hardware, describe_cost
    from lt2_workflows.steps import PretrainStep, planned_model

    parts = []
    for name, step in workflow.steps.items():
        if not isinstance(step.config, PretrainStep):
            continue
        model, seq_len = planned_model(step.config, StepContext(storage, workflow, step, lambda values: None))
        hardware = Hardware(card, count or step.config.resources.num_workers, utilisation)
        parts.append(f"\n{name} on {describe_cost(model, step.config.train, seq_len, hardware)}")
    return "\n".join(parts) or f"{workflow.id} trains nothing"
