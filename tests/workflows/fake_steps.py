"""Small step types and recipes for the engine's tests. A recipe file: attempts import it in their own process."""

from __future__ import annotations

import hashlib
import os
import signal
import time
from pathlib import Path
from typing import ClassVar, Literal

from pydantic import Field

from lt2.config import Config, ConfigError
from lt2_workflows.graph import Ref, Resources, StepConfig, Workflow, step_type


class PreemptedError(RuntimeError):
    """As lt2.train.loop's, without torch."""


class TextRef(Ref):
    accepts: ClassVar[str] = "text"


class Part(Config):
    """Something nested, with a default."""

    size: int = 1
    sources: tuple[TextRef, ...] = ()


class WriteStep(StepConfig):
    """Writes `lines` lines one by one, continuing where an earlier attempt stopped; the last line hashes the inputs."""

    produces: ClassVar[str] = "text"
    type: Literal["write"] = "write"
    text: str = "line"
    lines: int = 3
    pause_s: float = 0.0
    pause_times: int = 1000
    loss: float = 1.0
    part: Part = Part()
    fail: Literal["no", "error", "bad_input", "kill", "segfault"] = "no"
    fail_times: int = 1000
    saves: Literal["no", "yes", "never"] = Field("no", description="ends when asked to; or says so and never does")
    trace: str = Field("", description="a local folder in which each attempt leaves a file, outside storage")


@step_type(WriteStep)
def write(config: WriteStep, context) -> dict[str, str]:
    attempt = _count(config, context)
    if config.fail != "no" and attempt <= config.fail_times:
        _fail(config.fail)
    path = f"{context.step.folder}/out/lines"
    storage = context.storage
    done = storage.read_bytes(path).decode().splitlines() if storage.exists(path) else []
    print(f"attempt {attempt} continues at line {len(done)}")
    print(f"cores {os.environ.get('LT2_CORES')}, threads {os.environ.get('OMP_NUM_THREADS')}")
    for number in range(len(done), config.lines):
        done.append(f"{config.text} {number}")
        storage.write_bytes(path, "\n".join(done).encode())
        context.progress({"step": number + 1, "steps": config.lines, "loss": config.loss / (number + 1)})
        _mark(config, f"{context.step.name}.line{number}")
        if config.saves != "no":
            context.stop.possible.set()
            _mark(config, f"{context.step.name}.saves")
        if config.saves == "yes":
            if context.stop.asked.wait(config.pause_s):
                raise PreemptedError(f"stopped as asked after line {number}, which is saved")
        elif attempt <= config.pause_times:
            time.sleep(config.pause_s)
    inputs = [context.result(ref)["digest"] for ref in config.part.sources]
    return {"digest": hashlib.sha256("\n".join(done + inputs).encode()).hexdigest()}


def _count(config: WriteStep, context) -> int:
    if not config.trace:
        return 1
    name = context.step.name
    attempt = len(list(Path(config.trace).glob(f"{name}.attempt*"))) + 1
    _mark(config, f"{name}.attempt{attempt}")
    return attempt


def _mark(config: WriteStep, name: str) -> None:
    if config.trace:
        (Path(config.trace) / name).write_text(str(os.getpid()))


def _fail(how: str) -> None:
    if how == "bad_input":
        raise ConfigError("the corpus is empty; give a source with text")
    if how == "kill":
        os.kill(os.getpid(), signal.SIGKILL)
    if how == "segfault":
        os.kill(os.getpid(), signal.SIGSEGV)
    raise ValueError("this step fails")


def chain() -> Workflow:
    return Workflow(
        "chain",
        {
            "first": WriteStep(),
            "second": WriteStep(part=Part(sources=(TextRef(step="first"),))),
            "third": WriteStep(part=Part(sources=(TextRef(step="second"),))),
        },
    )


def branches() -> Workflow:
    """root -> (left -> leaf, right)"""
    quick = Resources(retries=0)
    return Workflow(
        "branches",
        {
            "root": WriteStep(resources=quick),
            "left": WriteStep(part=Part(sources=(TextRef(step="root"),)), resources=quick),
            "right": WriteStep(part=Part(sources=(TextRef(step="root"),)), text="right", resources=quick),
            "leaf": WriteStep(part=Part(sources=(TextRef(step="left"),)), resources=quick),
        },
    )
