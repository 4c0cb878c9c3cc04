"""What is wrong with a config, in the words of those who write YAML and JSON. Importable without torch."""

from __future__ import annotations

import re
from difflib import get_close_matches
from typing import Any

from pydantic import ValidationError

from lt2.extension import Config, Extension

WANTED = {  # where pydantic speaks of Python's classes
    "tuple_type": "a list, such as [1, 2]",
    "model_type": "fields, {name: value, …}",
    "model_attributes_type": "a type and its fields, {type: …, name: value, …}",
}


def explain(error: ValidationError, source: str = "config") -> str:
    """One line per problem of a pydantic error: where, what is wrong, and the nearest valid key."""
    lines = []
    for item in mistakes(error):
        where = ": ".join([source, ".".join(str(part) for part in item["loc"])] if item["loc"] else [source])
        if item["type"] == "extra_forbidden":
            key = str(item["loc"][-1])
            siblings = _siblings(error, item["loc"])
            owners = sorted({_type_of(cls) for cls in siblings if key in cls.model_fields} - {""})
            names = {name for cls in siblings for name in cls.model_fields}
            near = [] if owners else get_close_matches(key, names, n=1)
            known = f"; types with it: {', '.join(owners)}" if owners else ""
            hint = f"; did you mean {near[0]!r}?" if near else known
            lines.append(f"{where}: unknown key {key!r}{hint}")
        elif item["type"] in WANTED:
            given, wanted = str(item["input"]), WANTED[item["type"]]
            if item.get("ctx", {}).get("class_name") in {cls.__name__ for cls in _subclasses(Extension)}:
                wanted = WANTED["model_attributes_type"]
            if item["type"] == "tuple_type" and isinstance(item["input"], str | int | float):
                wanted = f"a list, such as [{given[:40]}]"
            lines.append(f"{where}: give {wanted}, not {given[:40] + '…' * (len(given) > 40)}")
        else:
            message = item["msg"].removeprefix("Value error, ")
            lines.append(f"{where}: {message}")
    return "\n".join(lines)


def mistakes(error: ValidationError) -> list[Any]:
    """pydantic's errors, without those that follow from others: a list is too short because its items are wrong."""
    found = error.errors()

    def follows(item: Any) -> bool:
        inside = (other["loc"] for other in found if len(other["loc"]) > len(item["loc"]))
        return item["type"] == "too_short" and any(loc[: len(item["loc"])] == item["loc"] for loc in inside)

    return [item for item in found if not follows(item)]


def _siblings(error: ValidationError, loc: tuple[Any, ...]) -> set[type[Config]]:
    """Configs that may stand where a key is unknown: follow the path of the error through the field annotations."""
    known = {cls.__name__: cls for cls in _subclasses(Config)}
    here = {known[error.title]} if error.title in known else set(known.values())
    for part in loc[:-1]:
        tagged = {cls for cls in here if _type_of(cls) == part}
        if tagged:
            here = tagged
            continue
        below = " ".join(str(cls.model_fields[part].annotation) for cls in here if part in cls.model_fields)
        named = {cls for name, cls in known.items() if re.search(rf"\b{name}\b", below)}
        here = {sub for cls in named for sub in _subclasses(cls)} or here
    return here


def _type_of(cls: type[Config]) -> str:
    """The `type` that names a config; "" if it has none."""
    name = getattr(cls.model_fields.get("type"), "default", None)
    return name if isinstance(name, str) else ""


def _subclasses(cls: type) -> set[type]:
    return {cls}.union(*(_subclasses(sub) for sub in cls.__subclasses__()))
