"""Ray Data as the reader of packed shards: the same batches as the reader without Ray, whatever is busy or broken."""

import itertools
from pathlib import Path

import numpy as np
import pytest
import ray

from lt2.config import ConfigError
from lt2_platform.data import ray_stream
from lt2_platform.data.ray_stream import ray_batches
from lt2_platform.data.stream import PackedDataset
from lt2_platform.storage_errors import is_away
from tests.platform.train.packed import write_dataset

pytestmark = [pytest.mark.ray, pytest.mark.timeout(600)]


@pytest.fixture
def dataset(tmp_path):
    return PackedDataset(write_dataset(tmp_path / "data", n=700))


def assert_same(found, expected):
    assert len(found) == len(expected)
    for ours, theirs in zip(found, expected, strict=True):
        assert ours.keys() == theirs.keys()
        assert all(np.array_equal(ours[name], theirs[name]) for name in theirs)
        assert all(ours[name].dtype == theirs[name].dtype and ours[name].flags.writeable for name in theirs)


@pytest.mark.parametrize(("rank", "world_size", "position", "chunk_bytes"), [(0, 1, 0, 2**25), (1, 3, 660, 20_000)])
def test_the_batches_of_the_direct_reader(local_ray, dataset, monkeypatch, rank, world_size, position, chunk_bytes):
    """Across the ends of chunks, executions and epochs; and it ends by itself."""
    monkeypatch.setattr(ray_stream, "CHUNK_BYTES", chunk_bytes)
    monkeypatch.setattr(ray_stream, "SEGMENT", 3)
    where = {"position": position, "global_batch_size": 12, "rank": rank, "world_size": world_size, "seed": 5}
    found = list(ray_batches(dataset, **where, limit=130))
    assert_same(found, list(itertools.islice(dataset.batches(**where), 130)))


def test_workers_that_hold_every_cpu_do_not_starve_it(local_ray, dataset):
    @ray.remote(num_cpus=2)
    class Worker:
        def train(self, uri):
            batches = ray_batches(PackedDataset(uri), position=0, global_batch_size=8, limit=20)
            return sum(len(batch["ids"]) for batch in batches)

    worker = Worker.remote()
    assert ray.get(worker.train.remote(dataset.uri)) == 160
    ray.kill(worker)


def test_closing_early(local_ray, dataset):
    batches = ray_batches(dataset, position=0, global_batch_size=8, limit=1000)
    next(batches)
    batches.close()
    with pytest.raises(StopIteration):
        next(batches)


def test_a_damaged_shard_is_named_as_by_the_direct_reader(local_ray, dataset):
    Path(dataset.uri, dataset.paths[0]).write_bytes(b"PAR1")
    with pytest.raises(ConfigError, match=r"^.*part-00000\.parquet is damaged \(.*; delete the dataset and prepare"):
        list(ray_batches(PackedDataset(dataset.uri), position=0, global_batch_size=8, limit=10))
    with pytest.raises(ConfigError, match=r"^global_batch_size 2 is smaller than 3 workers; raise it$"):
        ray_batches(dataset, position=0, global_batch_size=2, limit=1, world_size=3)


def test_a_store_that_is_away_is_told_as_such(dataset, monkeypatch):
    """Not as a failure of Ray Data's: the engine then tries again without counting it."""

    def refuse(*_):
        raise OSError("When reading object: AWS Error NETWORK_CONNECTION during GetObject operation: curlCode: 7")

    def blocks(share, begin, end, chunk_bytes):
        yield from (ray_stream._read(share, {"chunk": np.array([number])}) for number in range(begin, end))

    monkeypatch.setattr(ray_stream, "_dataset", refuse)
    monkeypatch.setattr(ray_stream, "_blocks", blocks)
    with pytest.raises(OSError, match="NETWORK_CONNECTION") as raised:
        next(ray_batches(dataset, position=0, global_batch_size=8, limit=4))
    assert is_away(raised.value)
    assert any("in _read" in note for note in raised.value.__notes__)  # where it was raised, over there
