"""Offline validation of rendered or hand-edited files against the schemas of the programs that read them."""

from __future__ import annotations

import json
from collections.abc import Iterator
from functools import cache
from pathlib import Path
from typing import Any

from lt2.config import ConfigError


def check_file(path: str) -> None:
    """Raise ConfigError, a line per problem, unless a RayCluster, RayJob or `ray up` file fits its schema."""
    from ruamel.yaml import YAML
    from ruamel.yaml.error import MarkedYAMLError

    try:
        documents = list(YAML(typ="safe", pure=True).load_all(Path(path).read_text()))
    except MarkedYAMLError as error:
        line = error.problem_mark.line + 1 if error.problem_mark else 0
        raise ConfigError(f"{path}:{line}: not valid YAML: {(error.problem or 'no YAML').splitlines()[0]}") from None
    if not documents:
        raise ConfigError(f"{path}: holds nothing; `lt2 cluster render` writes such files")
    problems = [f"{path}: {problem}" for document in documents for problem in problems_of(document)]
    if problems:
        raise ConfigError("\n".join(problems))


def problems_of(document: Any) -> Iterator[str]:
    """What is wrong with one document, as "spec.workerGroupSpecs.0: …"; nothing when it is valid."""
    from jsonschema import Draft7Validator, Draft202012Validator

    kind = document.get("kind") if isinstance(document, dict) else None
    if kind in ("RayCluster", "RayJob"):
        missing = [key for key in ("apiVersion", "metadata", "spec") if key not in document]
        if missing or document["apiVersion"] != "ray.io/v1":
            yield f"a {kind} has apiVersion: ray.io/v1, metadata and spec"
            return
        schema = _kuberay()
        validator, value, place = Draft202012Validator(schema | schema["$defs"][kind]), document["spec"], ["spec"]
    elif isinstance(document, dict) and "cluster_name" in document:
        validator, value, place = Draft7Validator(_ray_up()), document, []
    else:
        yield "neither a RayCluster, nor a RayJob, nor a cluster file of `ray up`"
        return
    for error in sorted(validator.iter_errors(value), key=lambda error: list(map(str, error.absolute_path))):
        yield f"{'.'.join([*place, *map(str, error.absolute_path)]) or 'top'}: {error.message}"


@cache
def _kuberay() -> dict[str, Any]:
    return json.loads(Path(__file__).with_name("kuberay.schema.json").read_text())


@cache
def _ray_up() -> dict[str, Any]:
    import ray

    return json.loads(Path(ray.__file__).with_name("autoscaler").joinpath("ray-schema.json").read_text())
