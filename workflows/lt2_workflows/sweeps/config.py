"""Sweeps as data: one recipe, and the settings in which its trials differ.

A trial is a workflow of its own: the recipe with its settings. So a trial is a full training run and its evaluation,
it continues where it was cut off, and what trials share (prepared data, a run that two sweeps contain) is done once.
The sweep's identity is that of its trials. Importable without torch or Ray; only parameter matching needs torch.
"""

from __future__ import annotations

import itertools
import json
import re
from collections.abc import Mapping, Sequence
from copy import deepcopy
from dataclasses import dataclass, field
from functools import cached_property
from typing import Annotated, Any, ClassVar, Literal

from pydantic import Field, model_validator

from lt2.config import Config, ConfigError, ModelConfig
from lt2_workflows.graph import Resources, StepConfig, Workflow, canonical, refs
from lt2_workflows.loading import workflow_from_record
from lt2_workflows.overrides import apply_overrides
from lt2_workflows.steps.refs import CheckpointRef

MAX_TRIALS = 10_000


class TrialConfig(Config):
    """One configuration of a sweep: `settings` maps keys of the recipe to values, as in `--set`."""

    label: str
    group: str = ""
    settings: dict[str, Any] = {}


class Fifo(Config):
    """Every trial runs to its end: what an ablation at matched tokens needs."""

    type: Literal["fifo"] = "fifo"


class Asha(Config):
    """Asynchronous successive halving on the training loss of step `step`, compared at equal training steps.

    At `grace_steps`, then at `reduction` times as many and so on, a trial goes on if it is in the best 1/`reduction` of
    those that got there. The loss is the mean of the last ten values the run reported, or logged before it went on.
    """

    type: Literal["asha"] = "asha"
    step: str = "pretrain"
    grace_steps: int = Field(ge=1)
    reduction: int = Field(default=3, ge=2)


class SweepResources(Resources):
    """`concurrent` trials at a time; each asks Ray for what its steps need and waits for it, holding nothing."""

    concurrent: int = Field(default=2, ge=1)


class SweepStep(StepConfig):
    """Run `trials` x `grid` x `seeds` of the recipe whose steps are `steps`.

    `grid` maps keys of the recipe to lists of values. `seeds` are written to every one of `seed_keys`; without them the
    recipe's own stay. `match_parameters` names a training step: the FFN width of every trial is then chosen so that its
    parameters are as many as the recipe's own. `paper` names the table of the paper that the labels belong to (see
    lt2_platform.evaluate.ablations). A failed trial stays failed; raise `retry` to run such trials again.
    """

    produces: ClassVar[str] = "sweep"
    uses_ray: ClassVar[bool] = True
    type: Literal["sweep"] = "sweep"
    resources: SweepResources = SweepResources()
    steps: dict[str, dict[str, Any]]
    trials: tuple[TrialConfig, ...] = ()
    grid: dict[str, tuple[Any, ...]] = {}
    seeds: tuple[int, ...] = ()
    seed_keys: tuple[str, ...] = ("pretrain.train.seed",)
    match_parameters: str | None = None
    scheduler: Annotated[Fifo | Asha, Field(discriminator="type")] = Fifo()
    paper: str | None = None
    retry: int = Field(default=0, ge=0)

    @model_validator(mode="after")
    def _trials_differ(self) -> SweepStep:
        """The same run twice would count as two samples that agree exactly."""
        for name, values in {
            "seeds": self.seeds,
            **{f"grid {key}": values for key, values in self.grid.items()},
        }.items():
            if len({json.dumps(value, sort_keys=True, default=str) for value in values}) < len(values):
                raise ValueError(f"{name} has a value twice, {list(values)}; give each once")
            if not values and name != "seeds":
                raise ValueError(f"{name} has no value; give at least one")
        return self

    @property
    def workers(self) -> int:
        return max(config.workers for trial in self.expanded for config in trial.workflow.configs.values())

    def identity(self, identities: Mapping[str, str]) -> Any:
        trials = {
            trial.name: {name: step.fingerprint for name, step in trial.workflow.steps.items()}
            for trial in self.expanded
        }
        more = {"scheduler": canonical(self.scheduler, {}), "paper": self.paper, "retry": self.retry}
        kept = {name: value for name, value in more.items() if value}
        return {"type": self.type, "trials": trials, **kept}

    @cached_property
    def expanded(self) -> tuple[Trial, ...]:
        """All trials in order. Raises ConfigError with all settings that the recipe cannot take."""
        return tuple(expand(self))


@dataclass(frozen=True)
class Trial:
    """One run of the recipe; `name` is unique in its sweep, `label` and `group` are those of its configuration."""

    name: str
    label: str
    group: str
    seed: int | None
    settings: dict[str, Any]
    steps: dict[str, Any] = field(repr=False)
    workflow: Workflow = field(repr=False)


def expand(config: SweepStep) -> list[Trial]:
    base = workflow_of(config, "recipe", config.steps)
    if config.match_parameters is not None and not hasattr(base.configs.get(config.match_parameters), "model"):
        raise ConfigError(f"match_parameters: the recipe has no step {config.match_parameters!r} with a model")
    found: list[Trial] = []
    configurations = config.trials or (TrialConfig(label=""),)
    points = [dict(zip(config.grid, values)) for values in itertools.product(*config.grid.values())]
    total = len(configurations) * len(points) * max(1, len(config.seeds))
    if total > MAX_TRIALS:
        raise ConfigError(f"the sweep has {total:,} trials; at most {MAX_TRIALS:,}")
    called: set[tuple[str, str]] = set()
    runs: dict[tuple[str, ...], str] = {}
    problems: dict[str, str] = {}  # what several trials share is said of the first
    for configuration, point in itertools.product(configurations, points):
        label = " ".join(part for part in (configuration.label, label_of(point, config.grid)) if part) or "recipe"
        if (configuration.group, label) in called:  # the table would take them for one configuration's seeds
            raise ConfigError(f"two configurations of the sweep are called {label!r}; give each trial its own label")
        called.add((configuration.group, label))
        for seed in config.seeds or (None,):
            settings = {**configuration.settings, **point}
            seeds = {} if seed is None else dict.fromkeys(config.seed_keys, seed)
            steps = {step: deepcopy(fields) for step, fields in config.steps.items()}  # which may share a model
            words = [configuration.group, label, "" if seed is None else f"seed {seed}"]
            name = unique(slug(" ".join(words)), {trial.name for trial in found})
            try:
                apply_overrides(steps, list({**settings, **seeds}.items()))
                if config.match_parameters is not None:
                    match_parameters(steps, config.match_parameters, base, label)
                workflow = workflow_of(config, name, steps, source=label)
            except ConfigError as error:
                for line in str(error).splitlines():
                    problems.setdefault(line.removeprefix(f"{label}: "), line)
                continue
            run = (configuration.group, *(step.fingerprint for step in workflow.steps.values()))
            if (other := runs.setdefault(run, name)) != name:
                keys = ", ".join(config.seed_keys) or "no seed_keys"
                raise ConfigError(
                    f"trials {other!r} and {name!r} of the sweep are the same run: a grid overrides trials, seeds (in "
                    f"{keys}) override both, and match_parameters the FFN width; vary what is not overridden"
                )
            found.append(Trial(name, label, configuration.group, seed, settings, steps, workflow))
    if problems:
        raise ConfigError("\n".join(problems.values()))
    return found


def workflow_of(config: SweepStep, name: str, steps: dict[str, Any], source: str = "sweep") -> Workflow:
    return workflow_from_record({"workflow": name, "recipe_file": None, "steps": steps}, source=source)


def trainings(trial: Trial) -> list[str]:
    """The steps that train."""
    return [name for name, step in trial.workflow.configs.items() if hasattr(step, "train")]


def check_asha(scheduler: Asha, trials: Sequence[Trial]) -> None:
    """Raise ConfigError where it would stop nothing."""
    name = scheduler.step
    watched = [trial.workflow.steps[name] for trial in trials if name in trial.workflow.steps]
    if not watched:
        others = [step for step, config in trials[0].workflow.configs.items() if hasattr(config, "train")]
        raise ConfigError(
            f"scheduler.step: the recipe has no step {name!r}; give the one to stop early"
            + f" ({', '.join(others)})" * bool(others)
        )
    if len(trials) > 1 and len({step.fingerprint for step in watched}) == 1:
        raise ConfigError(
            f"scheduler.step: {name} is the same in all trials, so it runs once and none is stopped early; "
            "give the step that differs, or leave --asha out"
        )
    trained: list[Any] = [step.config for step in watched if hasattr(step.config, "train")]
    lengths = [config.train.steps for config in trained]  # of a step of one's own that reports a loss it is not known
    if lengths and scheduler.grace_steps >= max(lengths):
        raise ConfigError(
            f"scheduler.grace_steps {scheduler.grace_steps} (--asha): no trial is stopped early, {name} has only "
            f"{max(lengths)} steps; lower it, or leave --asha out"
        )


def label_of(point: Mapping[str, Any], grid: Mapping[str, Sequence[Any]] = {}) -> str:
    """'lr=0.001 ratio=1:4': the last part of each key, or as much of it as tells the keys apart.

    A config is shown by its type, and by what it says otherwise than those of its type in `grid`.
    """
    parts = []
    for key, value in point.items():
        words = key.split(".")
        alone = (
            n for n in range(1, len(words))
            if [other.split(".")[-n:] for other in point].count(words[-n:]) == 1
        )  # fmt: skip
        size = next(alone, len(words))  # all of it may be the end of another
        parts.append(f"{'.'.join(words[-size:])}={_shown(value, grid.get(key, ()))}")
    return " ".join(parts)


def _shown(value: Any, others: Sequence[Any]) -> Any:
    if not isinstance(value, dict) or "type" not in value:
        return json.dumps(value) if isinstance(value, dict) else value
    alike = [other for other in others if isinstance(other, dict) and other.get("type") == value["type"]]
    told = [name for name in value if any(name not in other or other[name] != value[name] for other in alike)]
    fields = [f"{name}={_shown(value[name], [other.get(name) for other in alike])}" for name in told]
    return value["type"] + (f"({', '.join(fields)})" if fields else "")


def sized(model: Any) -> ModelConfig:
    """A training step's model; a vocabulary left to the tokenizer counts as 256."""
    return ModelConfig.model_validate(model.model_dump() | {"vocab_size": model.vocab_size or 256})


def slug(text: str) -> str:
    """A usable name: '1:4 seed 0' becomes '1-4-seed-0'."""
    return re.sub(r"[^a-z0-9_]+", "-", text.lower()).strip("-_")[:60] or "trial"


def unique(name: str, taken: set[str]) -> str:
    return name if name not in taken else next(f"{name}-{n}" for n in itertools.count(2) if f"{name}-{n}" not in taken)


def match_parameters(steps: dict[str, Any], step: str, base: Workflow, label: str) -> None:
    """Set the FFN width of `step` so that its model has as many parameters as the recipe's, as near as widths allow.

    Steps that train its weights further, with longer rows say, get the same width. From 1,024 on widths are multiples
    of 64, as kernels like. A model as large as the recipe's is left alone.
    """
    from lt2.analysis.accounting import parameters

    given: Any = workflow_from_record({"workflow": "trial", "steps": steps}, source=label).configs[step]
    wanted: Any = base.configs[step]
    embedded = [(each.model.dim, each.model.tie_embeddings) for each in (given, wanted)]
    if given.model.vocab_size is None and embedded[0] != embedded[1]:
        raise ConfigError(
            f"{label}: {step}.model: with another dim or tie_embeddings, the FFN's parameters depend on the "
            f"vocabulary; set {step}.model.vocab_size"
        )
    ours = sized(given.model)
    difference = parameters(sized(wanted.model)).total - parameters(ours).total
    unit = 64 if ours.ffn_dim >= 1024 else 1
    width = ours.ffn_dim + unit * round(difference / (3 * ours.dim * ours.n_layers * unit))
    if width < unit:
        raise ConfigError(
            f"{label}: {step}.model: no FFN width makes it as small as the recipe's model; it would be {width}. "
            "Leave match_parameters out or take a wider recipe"
        )
    if width != ours.ffn_dim:
        for name in (step, *grown_from(base, step)):
            steps[name]["model"]["ffn_hidden"] = width


def grown_from(recipe: Workflow, step: str) -> list[str]:
    """The steps with a model of their own that begin with the weights of `step`, directly or through others."""
    family = {step}
    for name, each in recipe.steps.items():  # in the order in which they run
        if any(isinstance(ref, CheckpointRef) and ref.step in family for ref in refs(each.config)):
            family.add(name)
    return [name for name in recipe.steps if name in family - {step} and hasattr(recipe.configs[name], "model")]
