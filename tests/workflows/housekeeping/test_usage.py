"""What takes the room in a storage root."""

from __future__ import annotations

import pytest

from lt2_platform.storage import Storage
from lt2_platform.wording import size
from lt2_workflows.housekeeping.deletion import Deletion, delete
from lt2_workflows.housekeeping.usage import usage
from tests.workflows.housekeeping.stores import LEASE, files, step, workflow


@pytest.fixture
def storage(tmp_path):
    return Storage(str(tmp_path))


def test_what_takes_the_room(storage):
    workflow(storage, "a-1", "prepare-0", "train-1")
    workflow(storage, "b-1", "prepare-0")
    step(storage, "lost-1", done=False, made=50_000)
    storage.write_bytes("runs/first/checkpoints/step-1/data", b"x" * 90_000)
    storage.write_bytes("runs/train-1/metrics/part", b"x" * 10)
    storage.write_bytes("results/tables/t", b"x" * 10)
    storage.write_json("steps/gone-1/attempts/2/lease.json", LEASE)
    rows = {row["what"]: row for row in usage(storage)}
    assert list(rows)[:2] == ["runs/first", "steps/lost-1"]
    assert rows["steps/prepare-0"]["workflows"] == ["a-1", "b-1"]
    assert (rows["steps/prepare-0"]["state"], rows["steps/prepare-0"]["ended"]) == ("done", 5.0)
    assert (rows["steps/lost-1"]["state"], rows["steps/lost-1"]["workflows"]) == ("failed", [])
    assert (rows["numbers"]["bytes"], rows["numbers"]["files"]) == (20, 2)
    assert rows["what is left of deleted steps"]["files"] == 1
    assert sum(row["bytes"] for row in rows.values()) == sum(storage.sizes().values())


def test_damaged_records_hide_no_sizes(storage, caplog):
    workflow(storage, "a-1", "train-1")
    storage.write_bytes("steps/train-1/done.json", b"{")
    storage.write_bytes("workflows/b-1/dag.json", b"{")
    rows = {row["what"]: row for row in usage(storage)}
    assert (rows["steps/train-1"]["state"], rows["steps/train-1"]["workflows"]) == ("unreadable", ["a-1"])
    assert "b-1/dag.json is not readable" in caplog.text
    delete(storage, Deletion(("train-1",), ("a-1",), {}))  # a step's own damage does not keep it
    assert files(storage, "steps/train-1") == ["steps/train-1/attempts/2/lease.json"]


@pytest.mark.parametrize(
    ("bytes_", "shown"), [(0, "0B"), (982, "982B"), (716_000, "716kB"), (1.2e9, "1.2GB"), (3e13, "30TB")]
)
def test_sizes_in_words(bytes_, shown):
    assert size(bytes_) == shown
