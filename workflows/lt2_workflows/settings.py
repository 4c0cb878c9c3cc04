"""Everything that `--set` can change in a workflow, as text: each key, its value, and what else it takes."""

from __future__ import annotations

import json
from collections.abc import Iterator
from typing import Any, Literal, get_args, get_origin

from lt2.config import Config
from lt2.extension import Extension
from lt2_workflows.commands.overview import first_sentence
from lt2_workflows.graph import Workflow


def describe_settings(workflow: Workflow, step: str | None = None) -> str:
    """One block per step (or of the named one): what it is, then a line per key; of a sweep its trials', too."""
    from lt2_workflows.sweeps.config import SweepStep, workflow_of

    blocks = []
    for name, config in workflow.configs.items():
        if step not in (None, name):
            continue
        hidden = {f"{name}.type"} | ({f"{name}.steps"} if isinstance(config, SweepStep) else set())
        found = [row for row in _rows(name, config, config.model_dump(mode="json")) if row[0] not in hidden]
        width = max(len(f"{key}={value}") for key, value, _ in found)
        lines = [f"  {f'{key}={value}':<{min(width, 64)}}  {others}".rstrip() for key, value, others in found]
        blocks.append("\n".join([f"{name} ({config.type}): {first_sentence(type(config).__doc__)}", *lines]))
        if isinstance(config, SweepStep):
            blocks.append("Settings of every trial, for --set of `lt2 sweep`; what trials differ in is above:")
            blocks.append(describe_settings(workflow_of(config, "recipe", config.steps)))
    return "\n\n".join(blocks)


def _rows(key: str, config: Config, plain: dict[str, Any]) -> Iterator[tuple[str, str, str]]:
    """(key, value, other values it takes) of every field, those of configs inside it too. plain: the config as JSON."""
    for name, field in type(config).model_fields.items():
        value, here = getattr(config, name), f"{key}.{name}"
        if not isinstance(value, Config):
            kinds = _kinds(config) if name == "type" else _literals(field.annotation)
            yield here, _text(plain[name]), _either([each for each in kinds if each != value])
            continue
        tags = _tags(field.annotation)
        for inner, text, others in _rows(here, value, plain[name]):
            is_kind = inner == f"{here}.type" and tags
            yield inner, text, _either([tag for tag in tags if tag != text]) if is_kind else others


def _text(value: Any) -> str:
    """The value as it is written after `--set key=`."""
    return value if isinstance(value, str) else json.dumps(value)


def _either(values: list[Any]) -> str:
    return f"or {', '.join(_text(value) for value in values)}" if values else ""


def _literals(annotation: Any) -> list[Any]:
    """The values of the Literals in an annotation, and of a bool beside others."""
    if get_origin(annotation) is Literal:
        return list(get_args(annotation))
    return [value for part in get_args(annotation) for value in ([False, True] if part is bool else _literals(part))]


def _tags(annotation: Any) -> list[str]:
    """The `type`s of the configs that an annotation names."""
    if isinstance(annotation, type) and issubclass(annotation, Config) and not issubclass(annotation, Extension):
        tag = annotation.model_fields.get("type")
        return [tag.default] if tag is not None and isinstance(tag.default, str) else []
    return [tag for part in get_args(annotation) for tag in _tags(part)]


def _kinds(config: Config) -> list[str]:
    """The kinds of an open config: of mixers, objectives, sources or tasks."""
    base = next((cls for cls in type(config).__mro__ if "noun" in cls.__dict__), None)
    return [] if base is None else sorted(base.kinds)  # type: ignore[attr-defined]
