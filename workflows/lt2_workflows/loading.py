"""From what the user typed to a `Workflow`: recipes and recorded workflows, with errors that help.

A recipe is a function without arguments that returns a Workflow. It is named by a shipped name, by
`path/to/file.py:function`, or replaced by the path of a resolved YAML or JSON record such as `workflows/<id>/dag.json`.
"""

from __future__ import annotations

import importlib
import inspect
import pkgutil
import sys
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from pathlib import Path
from typing import Any, cast

from pydantic import ValidationError

from lt2.config import ConfigError, load_source
from lt2.explain import explain, mistakes
from lt2.extension import SHIPPED, THEIRS, Extension
from lt2_platform.wording import nearest, one_line
from lt2_workflows.graph import STEP_TYPES, StepConfig, Workflow, configs_within
from lt2_workflows.overrides import apply_overrides, parse_override

RECORD_SUFFIXES = {".yaml", ".yml", ".json"}


def load_workflow(recipe: str, overrides: Sequence[str] = ()) -> Workflow:
    """The workflow that RECIPE and its `--set key=value` overrides describe. Raises ConfigError for any mistake.

    A shipped recipe may take one argument, as in pretrain_13b:gdn+dsa.
    """
    lines: dict[tuple[str, ...], int] = {}
    path, _, function = (recipe + ":" if recipe.endswith(".py") else recipe).rpartition(":")
    if Path(recipe).suffix in RECORD_SUFFIXES:
        record, lines = _read_record(recipe)
    elif path.endswith(".py"):
        record = _workflow_of(_function_in_file(path, function), recipe).record()
        record["recipe_file"] = str(Path(path).expanduser().resolve())
    else:
        record = _workflow_of(_shipped(recipe), recipe).record()
    apply_overrides(record["steps"], [parse_override(text) for text in overrides])
    return workflow_from_record(record, source=recipe, lines=lines)


def shipped_recipes() -> dict[str, Callable[..., Workflow]]:
    """Every function in lt2_workflows.recipes that is annotated to return a Workflow, by name."""
    from lt2_workflows import recipes

    found = {}
    for info in pkgutil.iter_modules(recipes.__path__):
        module = importlib.import_module(f"{recipes.__name__}.{info.name}")
        for name, function in inspect.getmembers(module, inspect.isfunction):
            own = function.__module__ == module.__name__ and not name.startswith("_")
            if own and _is_recipe(function):
                found[name] = function
    return found


def _is_recipe(value: Any) -> bool:
    return inspect.isfunction(value) and value.__annotations__.get("return") in (Workflow, "Workflow")


def workflow_from_record(
    record: dict[str, Any], *, source: str, lines: dict[tuple[str, ...], int] | None = None
) -> Workflow:
    """Validate a record {"workflow", "steps": {name: {"type", …}}}; `lines` maps key paths to lines of its file."""
    lines = lines or {}
    problems: list[str] = []
    configs = {}
    kinds = {name: raw.get("type") if isinstance(raw, dict) else raw for name, raw in record["steps"].items()}
    if not all(isinstance(kind, str) and kind in STEP_TYPES for kind in kinds.values()):
        from lt2_workflows import steps, sweeps  # noqa: F401  register the shipped types
    for name, raw in record["steps"].items():
        place = _place(source, lines, ("steps", name, "type"))
        if not isinstance(raw, dict):
            problems.append(f"{place}: {name}: a step is a type and its fields, {{type: …, name: value, …}}, not {raw}")
            continue
        if not isinstance(kind := raw.get("type"), str) or kind not in STEP_TYPES:
            problems.append(f"{place}: {name}.type: unknown step type {kind!r}{nearest(kind, STEP_TYPES)}")
            continue
        try:
            configs[name] = STEP_TYPES[kind].config.model_validate(raw)
        except ValidationError as error:
            problems += _explain(error, name, raw, source, lines)
            continue
        for keys, extension in without_source(configs[name]):
            where = f"{_place(source, lines, ('steps', name, *keys))}: {'.'.join((name, *keys))}"
            problems.append(
                f"{where}: {extension.noun} type {extension.type!r} is of a file of yours; give that file as its "
                f"source ({sys.modules[type(extension).__module__].__file__}), since other processes load it from there"
            )
    if problems:
        raise ConfigError("\n".join(problems))
    place = {name: record[name] for name in ("recipe_file", "part_of", "shared") if name in record}
    workflow = Workflow(record["workflow"], configs, **place)
    _ = workflow.steps  # checks names, references and cycles
    return workflow


def without_source(config: StepConfig) -> Iterator[tuple[tuple[str, ...], Extension]]:
    """The parts of a config, and their keys, whose class is in a user's file that they do not name as `source`: other
    processes (workers, readers of checkpoints) could not load them.

    Tasks are left out: the step's own process runs them, and it has read the recipe's file.
    """
    from lt2_platform.evaluate.config import TaskConfig

    for keys, part in configs_within(config):
        if not isinstance(part, Extension) or isinstance(part, TaskConfig) or part.source:
            continue
        if not type(part).__module__.startswith(SHIPPED):
            yield keys, part


def _shipped(recipe: str) -> Callable[[], Workflow]:
    name, _, argument = recipe.partition(":")
    recipes = shipped_recipes()
    if name not in recipes:
        raise ConfigError(
            f"unknown recipe {name!r}{nearest(name, recipes)}; see `lt2 recipes`, or give file.py:function"
        )
    if not argument:
        return recipes[name]
    if not inspect.signature(recipes[name]).parameters:
        raise ConfigError(f"recipe {name} takes no argument, so {recipe!r} means nothing; use --set")
    return partial(recipes[name], argument)


def _function_in_file(path: str, function: str) -> Callable[[], Workflow]:
    file = Path(path).expanduser()
    if not file.is_file():
        raise ConfigError(f"recipe file {path} does not exist")
    load_source(str(file))
    resolved = str(file.resolve())
    named = ((name, getattr(loaded, "__file__", None)) for name, loaded in sys.modules.items())
    module = sys.modules[next(name for name, path in named if name.startswith(THEIRS) and path == resolved)]
    found = getattr(module, function, None)
    if not callable(found):
        names = [name for name, value in vars(module).items() if callable(value) and not name.startswith("_")]
        if not function:
            own = [name for name, _ in inspect.getmembers(module, _is_recipe)] or [
                name for name in names if getattr(vars(module)[name], "__module__", None) == module.__name__
            ]
            raise ConfigError(f"{path}: say which of its functions is the recipe, {path}:NAME{nearest('', own)}")
        raise ConfigError(f"{path} has no function {function!r}{nearest(function, names)}")
    return cast(Callable[[], Workflow], found)


def _workflow_of(function: Callable[[], Workflow], recipe: str) -> Workflow:
    required = [p.name for p in inspect.signature(function).parameters.values() if p.default is p.empty]
    if required:
        raise ConfigError(f"recipe {recipe} needs arguments {required}; a recipe takes none, use --set")
    try:
        workflow = function()
    except ValidationError as error:
        raise ConfigError(explain(error, recipe)) from None
    if not isinstance(workflow, Workflow):
        raise ConfigError(f"recipe {recipe} returned {type(workflow).__name__}; it must return a Workflow")
    return workflow


def _read_record(path: str) -> tuple[dict[str, Any], dict[tuple[str, ...], int]]:
    from ruamel.yaml import YAML
    from ruamel.yaml.constructor import DuplicateKeyError
    from ruamel.yaml.error import MarkedYAMLError, YAMLError

    if not Path(path).is_file():
        raise ConfigError(f"recipe record {path} does not exist")
    try:
        loaded = YAML(typ="rt").load(Path(path).read_text(encoding="utf-8"))  # JSON is YAML 1.2
    except UnicodeDecodeError as error:
        raise ConfigError(f"{path} is not text in UTF-8 (byte {error.start}), so it is not a workflow record") from None
    except DuplicateKeyError as error:
        line = error.problem_mark.line + 1 if error.problem_mark else 0
        raise ConfigError(f"{path}:{line}: {(error.problem or 'duplicate key').splitlines()[0]}; keep one") from None
    except MarkedYAMLError as error:
        line = error.problem_mark.line + 1 if error.problem_mark else 0
        raise ConfigError(f"{path}:{line}: not valid YAML: {error.problem}") from None
    except YAMLError as error:  # of control characters
        raise ConfigError(f"{path}: not valid YAML: {one_line(error)}") from None
    steps = loaded.get("steps") if isinstance(loaded, dict) else None
    if not isinstance(steps, dict) or not isinstance(loaded.get("workflow"), str):
        raise ConfigError(f"{path}: a workflow record has the keys 'workflow' (a name) and 'steps' (name: config)")
    known = {"workflow", "recipe_file", "part_of", "shared", "steps", "id", "name", "ids"}
    lines = _lines(loaded)
    for key in loaded:
        if key not in known:
            hint = nearest(key, known)
            raise ConfigError(f"{_place(path, lines, (key,))}: unknown key {key!r}{hint}")
    record = {"workflow": loaded["workflow"], "recipe_file": loaded.get("recipe_file"), "steps": _plain(steps)}
    if record["recipe_file"]:
        kept = Path(path).with_name("recipe.py")  # what the engine recorded of it
        if kept.is_file() and not Path(record["recipe_file"]).is_file():
            record["recipe_file"] = str(kept)
        load_source(record["recipe_file"])
    return record, lines


def _lines(value: Any, path: tuple[str, ...] = ()) -> dict[tuple[str, ...], int]:
    found: dict[tuple[str, ...], int] = {}
    if isinstance(value, dict):
        for key, item in value.items():
            found[(*path, str(key))] = value.lc.key(key)[0] + 1  # type: ignore[attr-defined]  ruamel's CommentedMap
            found |= _lines(item, (*path, str(key)))
    elif isinstance(value, list):
        for index, item in enumerate(value):
            found[(*path, str(index))] = value.lc.item(index)[0] + 1  # type: ignore[attr-defined]
            found |= _lines(item, (*path, str(index)))
    return found


def _plain(value: Any) -> Any:
    """ruamel's round-trip containers and scalars as plain ones."""
    if isinstance(value, dict):
        return {str(key): _plain(item) for key, item in value.items()}
    if isinstance(value, list):
        return [_plain(item) for item in value]
    for kind in (bool, int, float, str):
        if isinstance(value, kind):
            return kind(value)
    return value


def _explain(error: ValidationError, step: str, raw: Any, source: str, lines: dict[tuple[str, ...], int]) -> list[str]:
    """`c.yaml:3: model.n_loop: unknown key 'n_loop'; did you mean 'n_loops'?` for each problem."""
    # `explain` begins each problem with the source; a mark that no message contains lets them be told apart.
    problems = explain(error, "\0").split("\0: ")[1:]
    found = []
    for item, problem in zip(mistakes(error), problems, strict=True):
        keys = _keys(item["loc"], raw)
        where = ".".join(str(part) for part in item["loc"])
        message = " ".join(problem.removeprefix(f"{where}: ").split())
        if item["type"] == "extra_forbidden" and "did you mean" not in message:
            message += f"; `lt2 recipes RECIPE {step}` lists the settings"
        found.append(f"{_place(source, lines, ('steps', step, *keys))}: {'.'.join((step, *keys))}: {message}")
    return found


def _keys(loc: tuple[int | str, ...], raw: Any) -> tuple[str, ...]:
    """An error's location as keys of the file: pydantic also lists the tags of the unions it went through."""
    keys: list[str] = []
    here = raw
    for index, part in enumerate(loc):
        if isinstance(here, dict) and part in here or isinstance(here, list) and part in range(len(here)):
            here = here[part]  # type: ignore[index]
        elif index < len(loc) - 1:
            continue
        keys.append(str(part))
    return tuple(keys)


def _place(source: str, lines: dict[tuple[str, ...], int], path: tuple[str, ...]) -> str:
    while path and path not in lines:
        path = path[:-1]
    return f"{source}:{lines[path]}" if path else source
