"""`--set key=value`: what it says, and where in a workflow's record it goes."""

from __future__ import annotations

import json
from collections.abc import Sequence
from typing import Any

from lt2.config import ConfigError
from lt2_platform.wording import nearest


def parse_override(text: str) -> tuple[str, Any]:
    """'a.b=3e-4' -> ('a.b', 0.0003). The value is YAML 1.2; what is not a number, list, … is taken literally."""
    key, equals, raw = text.partition("=")
    if not equals or not key or any(not part for part in key.split(".")):
        raise ConfigError(f"--set {text}: expected key=value, e.g. --set pretrain.train.lr=3e-4")
    from ruamel.yaml import YAML
    from ruamel.yaml.error import YAMLError

    try:
        value = YAML(typ="safe", pure=True).load(raw)
    except YAMLError:
        return key, raw  # '*.txt' and the like
    quoted = raw.startswith(("'", '"'))
    nothing = value is None and raw.strip().lower() not in ("null", "~")  # an empty text, or '#5', a comment
    literal = (isinstance(value, str) and not quoted) or nothing or not _is_json(value)
    return key, raw if literal else value


def apply_overrides(steps: dict[str, Any], overrides: Sequence[tuple[str, Any]]) -> None:
    """Set values in the record in place. `type` goes first; when it changes, the keys of the old type are dropped."""
    keys = [key for key, _ in overrides]
    for key in keys:
        if keys.count(key) > 1:
            raise ConfigError(f"--set {key} is given more than once; keep one")
        name = key.split(".")[0]
        if name not in steps:
            raise ConfigError(f"--set {key}: unknown step {name!r}{nearest(name, steps)}")
    by_type_then_depth = sorted(overrides, key=lambda item: (not item[0].endswith(".type"), item[0].count(".")))
    for key, value in by_type_then_depth:
        _set(steps, key, value)


def _set(steps: dict[str, Any], key: str, value: Any) -> None:
    here: Any = steps
    parts = key.split(".")
    for depth, part in enumerate(parts[:-1]):
        if parts[depth + 1 :] == ["type"] and isinstance(here, dict) and isinstance(here.get(part), str):
            here[part] = {}  # a plain spelling, such as a path for a source, makes way for a config
        here = _enter(here, part, key, ".".join(parts[:depth]))
    last = parts[-1]
    if isinstance(here, list):
        _enter(here, last, key, ".".join(parts[:-1]))
        here[int(last)] = value
        return
    if not isinstance(here, dict):
        raise ConfigError(f"--set {key}: {'.'.join(parts[:-1])} is {here!r}, which has no keys")
    if last == "type" and here.get("type") != value:
        here.clear()
    here[last] = value


def _enter(here: Any, part: str, key: str, parent: str) -> Any:
    if isinstance(here, dict):
        if here.get(part) is None:
            here[part] = {}
        return here[part]
    if isinstance(here, list):
        if not part.isdecimal() or int(part) >= len(here):
            raise ConfigError(f"--set {key}: {parent} has {len(here)} items; {part!r} is not the index of one")
        return here[int(part)]
    raise ConfigError(f"--set {key}: {parent} is {here!r}, which has no keys")


def _is_json(value: Any) -> bool:
    try:
        json.dumps(value)
    except TypeError:
        return False
    return True
