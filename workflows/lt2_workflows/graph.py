"""Workflows as pure data: steps, the references between them, and what identifies a step.

A workflow is a name and a mapping from step name to a frozen config. A config that needs another step's output holds a
`Ref`; the graph is found by walking the configs, so a dependency can never be declared and forgotten. Nothing here
touches storage, Ray or torch.

A step is identified by its fingerprint: sha256 of its config with defaults left out, where each reference is replaced
by the fingerprint of the step it names. Storage location, resources and code are not part of it, so a finished step is
found again from another machine, with other worker counts, and after a new defaulted field was added to its config.
"""

from __future__ import annotations

import graphlib
import hashlib
import json
import re
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass
from functools import cached_property
from typing import Any, ClassVar

from pydantic import Field
from pydantic_core import to_jsonable_python

from lt2.config import Config, ConfigError

NAME = re.compile(r"[a-z0-9][a-z0-9_-]*")


class NotKnownYetError(ConfigError):
    """What a plan cannot say before another step has run, or an input is there."""


class Ref(Config):
    """The output folder of the step called `step`. Subclasses say which kind of output they accept."""

    accepts: ClassVar[str] = ""
    step: str


class Resources(Config):
    """How a step runs, never what it computes: no field of it enters a fingerprint."""

    num_workers: int = Field(default=1, ge=1)
    retries: int = Field(default=2, ge=0)


class StepConfig(Config):
    """Base of every step's config. A subclass gives `type` a literal default, and `produces` its kind of output."""

    produces: ClassVar[str] = ""
    uses_ray: ClassVar[bool] = False
    type: str
    resources: Resources = Resources()

    @property
    def needs_ray(self) -> bool:
        """Whether there must be a Ray to join while the step runs."""
        return self.uses_ray

    @property
    def workers(self) -> int:
        """Ray workers that must find a place at the same time."""
        return self.resources.num_workers

    def identity(self, identities: Mapping[str, str]) -> Any:
        """What the fingerprint is taken of, as JSON; `identities` gives the fingerprint of each step referred to."""
        return canonical(self, identities)


@dataclass(frozen=True)
class Place:
    """A file or folder outside the workflow that a config names: which of its fields, where, and how to see what is
    wrong with it. `look(uri)` raises ConfigError or a storage's error; it is cheap, and called in any thread.
    `version(uri)`, as cheap, gives a digest of each part that is read, so that a change is told later.
    """

    field: str
    uri: str
    look: Callable[[str], object]
    version: Callable[[str], Mapping[str, str]] | None = None


@dataclass(frozen=True)
class StepType:
    """The code behind a config. All but `config` and `run` is optional; `context` is a StepContext."""

    config: type[StepConfig]
    run: Callable[[Any, Any], dict[str, Any]]
    """(config, context) -> the result, JSON-able: does the work."""
    check: Callable[[Any], None] | None = None
    """(config): rejects bad input before anything is written."""
    describe: Callable[[Any, Any], str] | None = None
    """(config, context) -> one line: what the step would do and cost."""
    outdated: Callable[[Any, Any], str] | None = None
    """(config, context) -> what has changed outside since the step finished; "" for nothing."""
    places: Callable[[Any, Any], Iterable[Place]] | None = None
    """(config, context) -> what it reads from outside the workflow, besides fields that hold a reference or a path."""
    fits: Callable[[Any, Any], None] | None = None
    """(config, context): rejects a config that does not go with its inputs, as far as they are there or known."""


STEP_TYPES: dict[str, StepType] = {}


def step_type(
    config: type[StepConfig],
    *,
    check: Callable[[Any], None] | None = None,
    describe: Callable[[Any, Any], str] | None = None,
    outdated: Callable[[Any, Any], str] | None = None,
    places: Callable[[Any, Any], Iterable[Place]] | None = None,
    fits: Callable[[Any, Any], None] | None = None,
):
    """Register the decorated `run(config, context) -> result` as the code of steps with this config; see StepType."""

    def register(run: Callable[[Any, Any], dict[str, Any]]):
        STEP_TYPES[config.model_fields["type"].default] = StepType(config, run, check, describe, outdated, places, fits)
        return run

    return register


@dataclass(frozen=True)
class Step:
    """A step in its place: `needs` are the steps its config refers to, `folder` is relative to the storage root."""

    name: str
    config: StepConfig
    fingerprint: str
    needs: tuple[str, ...]

    @property
    def id(self) -> str:
        return f"{self.name}-{self.fingerprint[:8]}"

    @property
    def folder(self) -> str:
        return f"steps/{self.id}"


@dataclass(frozen=True)
class Workflow:
    """`Workflow("quickstart", {"prepare": PrepareStep(...), "pretrain": PretrainStep(data=DatasetRef(...))})`.

    Raises ConfigError for a bad name, a reference to a missing step or to the wrong kind of output, and for cycles.
    `recipe_file` is the Python file that defines its own step types, if any; `part_of` the step (its id) whose trial
    this is, or, `shared`, the steps that its trials have in common.
    """

    name: str
    configs: Mapping[str, StepConfig]
    recipe_file: str | None = None
    part_of: str | None = None
    shared: bool = False

    def __post_init__(self) -> None:
        if not isinstance(self.configs, Mapping):
            raise ConfigError(f"workflow {self.name}: steps are given as a dict, name -> step")
        for name, config in self.configs.items():
            if not isinstance(config, StepConfig):
                raise ConfigError(
                    f"workflow {self.name}: step {name} is a {type(config).__name__}, not a step's config"
                )

    @cached_property
    def steps(self) -> dict[str, Step]:
        """All steps in an order in which they can run."""
        for name in (self.name, *self.configs):
            if not NAME.fullmatch(name):
                raise ConfigError(f"{name!r} is not a usable name; use lower-case letters, digits, '-' and '_'")
        if not self.configs:
            raise ConfigError(f"workflow {self.name} has no steps; give at least one")
        needs = {name: self._needs(name) for name in self.configs}
        try:
            order = list(graphlib.TopologicalSorter(needs).static_order())
        except graphlib.CycleError as error:
            raise ConfigError(
                f"workflow {self.name}: steps refer to each other: {' -> '.join(error.args[1])}"
            ) from None
        steps: dict[str, Step] = {}
        for name in order:
            identities = {need: steps[need].fingerprint for need in needs[name]}
            steps[name] = Step(name, self.configs[name], fingerprint(self.configs[name], identities), needs[name])
        return steps

    @property
    def id(self) -> str:
        parts = {name: step.fingerprint for name, step in self.steps.items()}
        return f"{self.name}-{digest(parts)[:8]}"

    def record(self) -> dict[str, Any]:
        """Everything needed to run this again, defaults included: the form that is stored, overridden and replayed."""
        steps = {name: config.model_dump(mode="json") for name, config in self.configs.items()}
        part_of = {"part_of": self.part_of, "shared": self.shared} if self.part_of else {}
        return {"workflow": self.name, "recipe_file": self.recipe_file, **part_of, "steps": steps}

    def _needs(self, name: str) -> tuple[str, ...]:
        needs = []
        for ref in refs(self.configs[name]):
            target = self.configs.get(ref.step)
            if target is None:
                raise ConfigError(f"{name}: refers to step {ref.step!r}, which is not in {sorted(self.configs)}")
            if ref.accepts and target.produces != ref.accepts:
                made = target.produces or "nothing to refer to"
                raise ConfigError(f"{name}: needs a {ref.accepts}, but step {ref.step!r} produces {made}")
            needs.append(ref.step)
        return tuple(dict.fromkeys(needs))


def refs(value: Any) -> Iterator[Ref]:
    """Every reference inside a config, however deeply nested."""
    return (config for _, config in configs_within(value) if isinstance(config, Ref))


def configs_within(value: Any, keys: tuple[str, ...] = ()) -> Iterator[tuple[tuple[str, ...], Config]]:
    """Every config inside a value, itself included, and the keys that lead to it."""
    items: Iterable[tuple[Any, Any]] = ()
    if isinstance(value, Config):
        yield keys, value
        items = ((field, getattr(value, field)) for field in type(value).model_fields)
    elif isinstance(value, Mapping):
        items = value.items()
    elif isinstance(value, list | tuple):
        items = enumerate(value)
    for key, item in items:
        yield from configs_within(item, (*keys, str(key)))


def fingerprint(config: StepConfig, identities: Mapping[str, str]) -> str:
    """Hex sha256 of the identity of `config`; `identities` gives the fingerprint of each step it refers to."""
    return digest(config.identity(identities))


def canonical(value: Any, identities: Mapping[str, str]) -> Any:
    """JSON form in which a field at its default is absent, `type` tags stay, and references are identities."""
    if isinstance(value, Ref):
        return {"ref": identities[value.step]}
    if isinstance(value, Config):
        kept = {}
        for name, field in type(value).model_fields.items():
            item = getattr(value, name)
            if isinstance(item, Resources):
                continue
            default = name != "type" and item == field.get_default(call_default_factory=True)
            if default and not any(refs(item)):  # what a default refers to changes with the workflow
                continue
            kept[name] = canonical(item, identities)
        return kept
    if isinstance(value, Mapping):
        return {str(key): canonical(item, identities) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return [canonical(item, identities) for item in value]
    if isinstance(value, set | frozenset):  # in an order that is the same in every process
        return sorted((canonical(item, identities) for item in value), key=digest)
    return to_jsonable_python(value)


def digest(value: Any) -> str:
    """Hex sha256 of a JSON value."""
    text = json.dumps(value, sort_keys=True, separators=(",", ":"), ensure_ascii=False)
    return hashlib.sha256(text.encode()).hexdigest()
