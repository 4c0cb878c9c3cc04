"""A results store, local or on S3, and how tests look into it."""

from __future__ import annotations

import pytest

from lt2_platform.results.store import ResultsStore, RunWriter
from lt2_platform.storage import Storage


class Clock:
    """Unix seconds that a test moves by hand."""

    def __init__(self, now: float = 1_000.0):
        self.now = now

    def __call__(self) -> float:
        return self.now


@pytest.fixture
def local(tmp_path) -> ResultsStore:
    return ResultsStore(Storage(str(tmp_path / "store")))


@pytest.fixture(params=["local", "s3"])
def root(request, tmp_path):
    if request.param == "local":
        return str(tmp_path / "root")
    return request.getfixturevalue("s3_root")


@pytest.fixture
def storage(root):
    return Storage(root)


def values(store: ResultsStore, run_id: str, metric: str) -> dict[int, float]:
    table = store.metrics(run_id, [metric])
    return dict(zip(table["step"].to_pylist(), table["value"].to_pylist()))


def parts(store: ResultsStore, run_id: str) -> list[str]:
    return store.storage.list(f"runs/{run_id}/metrics")


def log_and_wait(writer: RunWriter, step: int, metrics: dict[str, float]) -> None:
    """`writer.log`, until what it has a thread write is written."""
    writer.log(step, metrics)
    if writer.flushing is not None:
        writer.flushing.wait()
