"""What is refused or told of a sweep's trials before they run: their own plans are seen by nobody.

A step that trials share is looked at once, and what is true of several trials is told once.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace

from lt2.config import ConfigError
from lt2_platform.wording import first_of
from lt2_workflows.engine.context import StepContext
from lt2_workflows.engine.records import read_done
from lt2_workflows.inputs import conflicts
from lt2_workflows.outside import stale
from lt2_workflows.provenance import drift, provenance
from lt2_workflows.steps.evaluate import EvaluateStep
from lt2_workflows.steps.held_out import held_out_remark
from lt2_workflows.steps.pretrain import fresh_mixers
from lt2_workflows.sweeps.config import SweepStep, Trial, trainings


def each_step(config: SweepStep, context: StepContext) -> Iterator[tuple[Trial, StepContext]]:
    """Every step of the trials once, with the first trial that has it."""
    seen: set[str] = set()
    for trial in config.expanded:
        for step in trial.workflow.steps.values():
            if step.fingerprint not in seen:
                seen.add(step.fingerprint)
                yield trial, replace(context, workflow=trial.workflow, step=step)


def check_trials(config: SweepStep, context: StepContext) -> None:
    """Raise ConfigError for what in a trial does not go with its inputs: it would fail after the others' hours."""
    found: dict[str, str] = {}
    for trial, each in each_step(config, context):
        if read_done(context.storage, each.step) is None:
            for line in conflicts(trial.workflow, context.storage, [each.step]):
                found.setdefault(line, f"{trial.label}: {line}")
    if found:
        raise ConfigError("\n".join(found.values()))


def remarks(config: SweepStep, context: StepContext) -> list[str]:
    """What in the trials is allowed and may not be meant: trainings that begin mixers at random although they start
    from a run, or that no seed reaches; evaluations on text that was trained on; and finished steps that are used
    although what they read has changed since."""
    told: dict[str, list[str]] = {}
    for trial, each in each_step(config, context):
        if (done := read_done(context.storage, each.step)) is None:
            asked, place = each.step.config, f"{trial.label}: {each.step.name}"
            told.setdefault(fresh_mixers(asked, each), []).append(place)
            if isinstance(asked, EvaluateStep):
                told.setdefault(held_out_remark(asked.checkpoint, asked.data, each), []).append(place)
            continue
        told.setdefault(stale(each, done), []).append(each.step.id)
    lines = [f"{first_of(steps, 3)}: {text}" for text, steps in told.items() if text]
    missed = [name for name in trainings(config.expanded[0]) if f"{name}.train.seed" not in config.seed_keys]
    if len(config.seeds) > 1 and missed:
        keys = ", ".join(f"{name}.train.seed" for name in missed)
        lines.append(f"SEEDS DO NOT REACH {first_of(missed)}, whose data have one order; seed_keys lacks {keys}")
    return lines


def made_otherwise(config: SweepStep, context: StepContext) -> list[str]:
    """With which other code or packages the trials' finished steps were made, beside which the others will stand."""
    now, told = provenance(), dict[str, list[str]]()
    for _, each in each_step(config, context):
        if (done := read_done(context.storage, each.step)) is not None:
            told.setdefault(", ".join(drift(done["provenance"], now)), []).append(each.step.id)
    return [
        f"{first_of(steps, 3)}: already finished, made with other code or packages: {text}"
        for text, steps in told.items()
        if text
    ]
