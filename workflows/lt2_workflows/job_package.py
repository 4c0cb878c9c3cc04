"""What travels with a submitted job: a snapshot of the code, the resolved recipe, and the user's files it names.

The only place that builds a `runtime_env`. Secrets are not part of it: the job gets them from its node's environment or
IAM role, and `refuse_secrets` stops a recipe that carries one.
"""

from __future__ import annotations

import hashlib
import importlib.util
import os
import re
import shutil
import sys
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

from lt2.config import Config, ConfigError
from lt2_platform.source_files import is_inside, is_python_file
from lt2_workflows.engine.records import json_bytes
from lt2_workflows.graph import Workflow
from lt2_workflows.provenance import SNAPSHOT, provenance

PACKAGES = ("lt2", "lt2_platform", "lt2_workflows", "lt2_dashboards")
RECORD = "workflow.json"
# How long a cancelled job may take to save a checkpoint and its records before Ray kills it: the executor allows 60 s
# for the one and 20 s for the other.
STOP_WAIT_S = 90
SECRET_NAME = re.compile(
    r"(SECRET|TOKEN(?!IZ)|PASSWORD|PASSWD|CREDENTIAL|API_?KEY|ACCESS_?KEY|PRIVATE_?KEY)", re.IGNORECASE
)


def pack(workflow: Workflow, folder: Path) -> tuple[dict[str, Any], str]:
    """Fill `folder` (empty, must live until the upload); the runtime_env that ships it, and the workflow's id there.

    The packages go as py_modules, so that workers import this snapshot and not what happens to be installed or checked
    out where they run. The working directory holds RECORD, the recipe file and every `source` file of a config. A
    source from elsewhere has another name there, and the steps that name it another identity.
    """
    code, work = folder / "code", folder / "work"
    for name in PACKAGES:
        shutil.copytree(_package_folder(name), code / name, ignore=shutil.ignore_patterns("__pycache__", "*.pyc", ".*"))
    made_by = {key: provenance()[key] for key in ("git", "dirty")}
    (code / "lt2_workflows" / SNAPSHOT).write_bytes(json_bytes(made_by))
    work.mkdir()
    job = replace(workflow, configs={name: _ship_files(config, work) for name, config in workflow.configs.items()})
    record = job.record()
    if record["recipe_file"]:
        record["recipe_file"] = _copy(Path(record["recipe_file"]), work, Path("recipes"))
    (work / RECORD).write_bytes(json_bytes(record))
    refuse_secrets({str(path.relative_to(work)): path.read_text("utf-8") for path in work.rglob("*") if path.is_file()})
    environment = {
        "working_dir": str(work),
        "py_modules": [str(code / name) for name in PACKAGES],
        # Nothing is imported from the directory a process happens to start in.
        "env_vars": {"PYTHONSAFEPATH": "1", "RAY_JOB_STOP_WAIT_TIME_S": str(STOP_WAIT_S)},
    }
    return environment, job.id


def refuse_secrets(texts: Mapping[str, str], environment: Mapping[str, str] = os.environ) -> None:
    """Raise ConfigError when a text holds the value of a variable of `environment` that is named like a secret."""
    for variable, value in environment.items():
        if len(value) < 8 or not SECRET_NAME.search(variable) or variable.endswith("_PATH"):
            continue
        for name, text in texts.items():
            if value in text:
                raise ConfigError(
                    f"{name} contains the value of ${variable}, which would be stored with the job; "
                    "set it in the environment of the cluster's nodes instead"
                )


def _package_folder(name: str) -> Path:
    spec = importlib.util.find_spec(name)
    assert spec is not None
    assert spec.origin is not None
    return Path(spec.origin).parent


def _ship_files(value: Any, work: Path) -> Any:
    """`value`, of a config, with every existing `source` file in Python shipped and named by its place there."""
    if isinstance(value, Config):
        items = {name: getattr(value, name) for name in type(value).model_fields}
        # Not read anew: that would import the files once more, from their copies.
        return value.model_copy(update=_ship_files(items, work))
    if isinstance(value, Mapping):
        return {
            key: _ship_source(item, work) if key == "source" and is_python_file(item) else _ship_files(item, work)
            for key, item in value.items()
        }
    if isinstance(value, list | tuple):
        return type(value)(_ship_files(item, work) for item in value)
    return value


def _ship_source(source: str, work: Path) -> str:
    # A relative path keeps its name, since a step's identity contains it.
    path = Path(source)
    if not is_inside(source):
        text = path.expanduser().read_bytes()
        return _copy(path.expanduser(), work, Path("files") / hashlib.sha256(text).hexdigest()[:8])
    return _copy(path, work, path.parent)


def _copy(path: Path, work: Path, parent: Path) -> str:
    # Ray puts the working directory on sys.path: a stat.py in it would keep every worker from starting.
    if parent == Path() and _hides_a_module(path):
        raise ConfigError(f"{path} hides the module {path.stem!r} on the cluster; rename it or put it in a folder")
    data = path.read_bytes()
    try:
        data.decode()
    except UnicodeDecodeError as error:
        raise ConfigError(f"{path} is not UTF-8 (byte {error.start}); save it as that") from None
    target = work / parent / path.name
    target.parent.mkdir(parents=True, exist_ok=True)
    target.write_bytes(data)
    return str(parent / path.name)


def _hides_a_module(path: Path) -> bool:
    if "." in path.stem:  # gate.v2.py: no module can be called so
        return False
    if path.stem in sys.stdlib_module_names:
        return True
    spec = importlib.util.find_spec(path.stem)
    # With the working directory on sys.path the file finds itself.
    return spec is not None and (spec.origin is None or Path(spec.origin).resolve() != path.resolve())
