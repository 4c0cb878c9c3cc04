"""Driving the real `lt2` command in a process of its own, on the fake steps of `fake_steps.py`."""

from __future__ import annotations

import os
import subprocess
import sys
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path

import pytest

from lt2_platform.storage import Storage
from lt2_workflows.graph import Workflow
from lt2_workflows.loading import load_workflow

FAKE_STEPS = str(Path(__file__).with_name("fake_steps.py"))


def wait_until(condition: Callable[[], object], what: str, timeout_s: float = 30.0) -> None:
    """Poll quickly; fail loudly."""
    deadline = time.monotonic() + timeout_s
    while not condition():
        assert time.monotonic() < deadline, f"timed out waiting for {what}"
        time.sleep(0.005)


def as_at_a_terminal() -> dict[str, str]:
    """The environment of a command that shall start a Ray of its own, as a user's does."""
    ours = {name: value for name, value in os.environ.items() if not name.startswith("RAY_")}
    return ours | {"OMP_NUM_THREADS": "1", "RAY_USAGE_STATS_ENABLED": "0"}


@dataclass
class Run:
    """`lt2 run fake_steps.py:<recipe>` on one storage root and one trace folder."""

    root: str
    trace: Path
    recipe: str = "chain"
    steps: tuple[str, ...] = ("first", "second", "third")
    settings: tuple[str, ...] = ()
    options: tuple[str, ...] = ("--lease-ttl", "1.5")
    started: list[subprocess.Popen] = field(default_factory=list)

    @property
    def overrides(self) -> list[str]:
        return [f"{name}.trace={self.trace}" for name in self.steps] + list(self.settings)

    def workflow(self) -> Workflow:
        return load_workflow(f"{FAKE_STEPS}:{self.recipe}", self.overrides)

    def start(self, *more: str) -> subprocess.Popen:
        self.trace.mkdir(exist_ok=True)
        command = [sys.executable, "-m", "lt2_workflows.cli", "run", f"{FAKE_STEPS}:{self.recipe}"]
        command += ["--storage", self.root, *self.options, *more]
        command += [part for item in self.overrides for part in ("--set", item)]
        driver = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True)
        self.started.append(driver)
        return driver

    def finish(self, driver: subprocess.Popen | None = None, timeout_s: float = 60) -> tuple[int, str]:
        """(exit code, output) of `driver`, or of a new one."""
        driver = driver or self.start()
        output, _ = driver.communicate(timeout=timeout_s)
        return driver.returncode, output

    def results(self) -> dict[str, object]:
        """Result and output bytes of every step: what must not depend on what happened on the way."""
        storage = Storage(self.root)
        found = {}
        for name in self.steps:
            (done,) = storage.glob(f"steps/{name}-*/done.json")
            (lines,) = storage.glob(f"steps/{name}-*/out/lines")
            found[name] = (storage.read_json(done)["result"], storage.read_bytes(lines))
        return found

    def attempts(self, name: str) -> int:
        return len(list(self.trace.glob(f"{name}.attempt*")))

    def seen(self, mark: str) -> bool:
        return (self.trace / mark).exists()

    def pid(self, mark: str) -> int:
        """The attempt process that left `mark`."""
        wait_until(lambda: self.seen(mark) and (self.trace / mark).read_text(), mark)
        return int((self.trace / mark).read_text())


@pytest.fixture
def make_run(tmp_path):
    """Builds `Run`s; the drivers they started are ended with the test."""
    runs: list[Run] = []

    def make(root: str | None = None, name: str = "a", **options) -> Run:
        runs.append(Run(root or str(tmp_path / f"storage-{name}"), tmp_path / f"trace-{name}", **options))
        return runs[-1]

    yield make
    for driver in (driver for run in runs for driver in run.started):
        if driver.poll() is None:
            driver.kill()
        driver.wait(10)
        if driver.stdout:
            driver.stdout.close()


@pytest.fixture(params=["local", "s3"])
def any_root(request, tmp_path) -> str:
    """A storage root on a local folder and on S3."""
    return str(tmp_path / "storage") if request.param == "local" else request.getfixturevalue("s3_root")
