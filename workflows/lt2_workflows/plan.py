"""What `lt2 plan` prints: the graph, what would run, and what it would cost. Reads storage, writes nothing."""

from __future__ import annotations

import os
from typing import TYPE_CHECKING

from lt2.config import ConfigError
from lt2_platform.storage_errors import STORAGE_ERRORS
from lt2_workflows.engine.context import StepContext
from lt2_workflows.engine.records import read_done, step_state
from lt2_workflows.graph import STEP_TYPES, NotKnownYetError, StepConfig, Workflow
from lt2_workflows.inputs import check_settings, conflicts, problems
from lt2_workflows.outside import changes

if TYPE_CHECKING:
    from lt2_platform.storage import Storage
    from lt2_workflows.training import Training


def describe_plan(workflow: Workflow, storage: Storage) -> str:
    """One line per step in running order: name, run or skip, what it comes after, and its own description. In the end,
    inputs that are not there: a plan may be made before them, or on another machine.
    """
    lines = [f"{workflow.id} in {storage.root}"]
    states = {name: step_state(storage, step.folder) for name, step in workflow.steps.items()}
    pending = [workflow.steps[name] for name in states if states[name]["state"] != "done"]
    missing = problems(workflow, storage, pending)
    if not missing and (wrong := conflicts(workflow, storage, pending)):
        raise ConfigError("\n".join(wrong))
    check_settings(pending)
    width = max(len(name) for name in workflow.steps)
    for name, step in workflow.steps.items():
        known = states[name]
        if known["state"] == "done":
            action = "skip (done)"
        elif known["state"] == "waiting":
            action = "run"
        else:
            action = f"run ({known['state']} in attempt {known['attempt']})"
        after = f"after {', '.join(step.needs)}" if step.needs else ""
        describe = STEP_TYPES[step.config.type].describe
        context = StepContext(storage, workflow, step)
        lines.append(f"  {name:<{width}}  {action:<12} {after}".rstrip() + f"  [{step.id}]")
        if describe is not None:
            try:
                text = describe(step.config, context)
            except NotKnownYetError as error:
                text = str(error)
            except (ConfigError, *STORAGE_ERRORS) as error:
                if not missing and known["state"] != "done":  # nobody needs a finished step's inputs
                    raise
                text = f"not known: {error}"
            lines.append(f"  {'':<{width}}  {text}")
        done = read_done(storage, step) if known["state"] == "done" else None
        if done is not None and (stale := changes(context, done.get("read", {}))):
            lines.append(f"  {'':<{width}}  {stale}")
    if missing:
        lines += ["", f"NOT FOUND from here ({os.getcwd()}); `lt2 run` needs:", *(f"  {line}" for line in missing)]
    return "\n".join(lines)


def describe_costs(
    workflow: Workflow, storage: Storage, *, card: str, count: int | None = None, utilisation: float = 0.4
) -> str:
    """Memory and time of every step that trains on `count` cards (None: its workers); see `cost.describe_cost`."""
    from lt2.memory import Known
    from lt2_workflows.cost import Hardware, describe_cost

    lines: list[str] = []
    named: dict[str, str] = {}
    known: Known = {}
    for name, step in workflow.steps.items():
        try:
            run = planned_training(step.config, StepContext(storage, workflow, step))
        except (ConfigError, *STORAGE_ERRORS) as error:  # of inputs that are not there, as `describe_plan` says
            lines.append(f"\n{name}: {'' if isinstance(error, NotKnownYetError) else 'not known: '}{error}")
            continue
        if run is None:
            continue
        text = describe_cost(run, Hardware(card, count or step.config.resources.num_workers, utilisation), known)
        same = named.setdefault(text, name)
        lines.append(f"\n{name} on {text}\n" if same == name else f"{name}: as {same}")
    return "\n".join(lines) or f"{workflow.id} has no step of type pretrain or distill, the ones that --card is for"


def planned_training(config: StepConfig, context: StepContext) -> Training | None:
    """What a step trains; None: it trains nothing. Raises NotKnownYetError where nothing tells yet."""
    from lt2_workflows.steps.distill import DistillStep, planned_stage
    from lt2_workflows.steps.prepare import dataset_facts
    from lt2_workflows.steps.pretrain import PretrainStep, first_step, planned_model
    from lt2_workflows.training import Training

    if isinstance(config, PretrainStep):
        model, seq_len = planned_model(config, context)
        return Training(model, config.train, seq_len, done=first_step(config, context))
    if not isinstance(config, DistillStep):
        return None
    model, teacher = planned_stage(config, context)
    asks = config.train.objective.needs_teacher and config.topk is None
    seq_len = dataset_facts(config.data, context, vocab_size=1)["seq_len"]
    return Training(model, config.train, seq_len, teacher if asks else None)
