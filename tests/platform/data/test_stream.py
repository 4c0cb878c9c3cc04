"""The training order: a permutation per epoch, one integer to resume, any number of ranks."""

import itertools
import json
import threading
import time

import numpy as np
import pyarrow.parquet as pq
import pytest

from lt2.config import ConfigError
from lt2_platform.data import stream
from lt2_platform.data.prepare import PrepareConfig, prepare
from lt2_platform.data.stream import PackedDataset, _splitmix64, indices_at, order, read_ahead, shuffled

SIZES = [1, 2, 63, 64, 65, 200, 4095, 4096, 4097, 4160, 9000]


@pytest.fixture
def dataset_path(tmp_path, no_ray):
    """331 training sequences of 16 tokens in shards of 70, validation with a padded last row."""
    for index in range(120):
        (tmp_path / f"{index:03d}.txt").write_text(f"document {index}: " + "words " * (index % 13))
    config = PrepareConfig(source=f"{tmp_path}/*.txt", seq_len=15, validation_fraction=0.1, shard_sequences=70)
    prepare(config, str(tmp_path / "out"))
    return str(tmp_path / "out")


def take(dataset, steps, **arguments):
    return list(itertools.islice(dataset.batches(**arguments), steps))


@pytest.mark.parametrize("n", SIZES)
def test_epoch_is_a_permutation_and_every_cut_of_it_agrees(n):
    whole = order(3, 1, n)
    assert np.array_equal(np.sort(whole), np.arange(n))
    for start, stop in [(0, n), (n // 3, n // 2 + 1), (n - 1, n), (0, 1), (min(4000, n), min(4200, n)), (n, n)]:
        assert np.array_equal(order(3, 1, n, start, stop), whole[start:stop])


def test_order_depends_on_seed_and_epoch():
    orders = [order(seed, epoch, 200).tolist() for seed in (0, 1, -1) for epoch in (0, 1)]
    assert len({tuple(one) for one in orders}) == 6


def test_order_is_pinned():
    """A checkpoint's position means this order: changing it would repeat and skip data after a resume."""
    assert order(7, 0, 10).tolist() == [0, 2, 6, 3, 9, 1, 4, 5, 8, 7]
    assert order(7, 2, 20_000, 9_000, 9_004).tolist() == [331, 17167, 13083, 13658]
    assert (
        int(_splitmix64(np.zeros(1, np.uint64))[0]) == 0xE220A8397B1DCDAF
    )  # first output of the published generator, seed 0


def test_shuffle_is_uniform():
    """Each of 5 values lands on each of 5 places equally often: chi-squared, 16 degrees of freedom, p = 1e-6."""
    counts = np.zeros((5, 5))
    for key in range(5_000):
        counts[np.arange(5), shuffled(5, 0, key)] += 1
    assert ((counts - 1000) ** 2 / 1000).sum() < 61.6


def test_large_corpora_are_mixed_across_blocks_and_read_in_row_groups():
    n = 100_000
    whole = order(0, 0, n)
    window = whole[:4096] // 64
    assert len(set(window.tolist())) == 64  # 64 row groups serve 4,096 sequences …
    assert np.ptp(window) > 1000  # … from all over the corpus
    assert (np.diff(whole) == 1).mean() < 0.01


def test_indices_cross_epochs():
    expected = np.concatenate([order(1, epoch, 10) for epoch in range(4)])
    for start in range(25):
        for stop in range(start, 40):
            assert np.array_equal(indices_at(1, 10, start, stop), expected[start:stop])


def test_batch_is_what_the_shards_hold(dataset_path):
    for split in ("train", "validation"):
        dataset = PackedDataset(dataset_path, split)
        tables = [pq.read_table(f"{dataset_path}/{path}") for path in dataset.paths]
        rows = [row for table in tables for row in table.to_pylist()]
        assert [row["sequence_id"] for row in rows] == list(range(dataset.n_sequences))
        wanted = [dataset.n_sequences - 1, 0, dataset.n_sequences // 2, 0]
        batch = dataset.batch(wanted)
        assert batch["tokens"].tolist() == [rows[i]["tokens"] for i in wanted]
        assert batch["doc_ids"].tolist() == [rows[i]["doc_ids"] for i in wanted]
        assert batch["ids"].tolist() == wanted
        assert (batch["tokens"].dtype, batch["doc_ids"].dtype, batch["ids"].dtype) == (np.int64, np.int32, np.int64)
    assert len(PackedDataset(dataset_path).paths) > 3


def test_documents_change_where_a_bos_is(dataset_path):
    dataset = PackedDataset(dataset_path)
    batch = dataset.batch(range(dataset.n_sequences))
    starts = batch["tokens"][:, 1:] == 256
    assert np.array_equal(np.diff(batch["doc_ids"], axis=1), starts.astype(np.int32))
    assert (batch["doc_ids"][:, 0] == 0).all()


def test_a_small_cache_changes_nothing(dataset_path):
    small, large = PackedDataset(dataset_path, cache_bytes=1), PackedDataset(dataset_path)
    indices = order(0, 0, large.n_sequences)
    assert np.array_equal(small.batch(indices)["tokens"], large.batch(indices)["tokens"])
    assert len(small._groups) == 1


@pytest.mark.parametrize("prefetch", [0, 3])
def test_resume_at_any_position_continues_the_same_sequence(dataset_path, prefetch):
    dataset = PackedDataset(dataset_path)
    whole = take(dataset, 60, position=0, global_batch_size=12, seed=4, prefetch=prefetch)
    assert 2 * dataset.n_sequences < 60 * 12
    for step in range(0, 60, 7):
        rest = take(PackedDataset(dataset_path), 3, position=step * 12, global_batch_size=12, seed=4, prefetch=prefetch)
        for found, expected in zip(rest, whole[step : step + 3], strict=False):
            assert all(np.array_equal(found[key], expected[key]) for key in expected)


def test_change_of_ranks_and_batch_size_repeats_and_skips_nothing(dataset_path):
    n = PackedDataset(dataset_path).n_sequences
    seen, position = [], 0
    for world_size, size, steps in [(1, 10, 5), (3, 10, 7), (2, 16, 4), (8, 8, 60)]:
        ranks = [
            take(
                PackedDataset(dataset_path), steps, position=position, global_batch_size=size, rank=rank,
                world_size=world_size, seed=2,
            )
            for rank in range(world_size)
        ]  # fmt: skip
        for step in range(steps):
            shares = [ranks[rank][step]["ids"] for rank in range(world_size)]
            assert max(map(len, shares)) - min(map(len, shares)) <= 1
            seen += np.concatenate(shares).tolist()
        position += size * steps
    assert seen == indices_at(2, n, 0, position).tolist()
    assert sorted(seen[:n]) == list(range(n))


@pytest.mark.parametrize(("before", "after"), [(1, 2), (2, 1), (3, 4), (4, 3), (8, 5)])
def test_every_id_once_per_epoch_after_a_crash_anywhere(dataset_path, before, after):
    """Three epochs of checkpoints, crashes some steps later, and resumes with another number of workers."""
    n = PackedDataset(dataset_path).n_sequences
    size, learned, position, workers = 8, [], 0, before
    while position < 3 * n:
        ranks = [
            PackedDataset(dataset_path).batches(
                position=position, global_batch_size=size, rank=rank, world_size=workers, seed=9, prefetch=1
            )
            for rank in range(workers)
        ]
        saved, lost = 23, 6  # steps up to the checkpoint, and those after it that the crash undoes
        for step in range(saved + lost):
            ids = np.concatenate([next(rank)["ids"] for rank in ranks]).tolist()
            learned += ids if step < saved else []
        for rank in ranks:
            rank.close()
        position += saved * size
        workers = after if workers == before else before
    for epoch in range(3):
        assert sorted(learned[epoch * n : (epoch + 1) * n]) == list(range(n))
    assert learned[:n] != learned[n : 2 * n]


def test_reads_s3(dataset_path, s3_root, tmp_path):
    from lt2_platform.storage import Storage

    remote = Storage(s3_root)
    for path in sorted((tmp_path / "out").rglob("*")):
        if path.is_file():
            remote.write_bytes(str(path.relative_to(tmp_path / "out")), path.read_bytes())
    here, there = PackedDataset(dataset_path), PackedDataset(s3_root)
    there.verify()
    indices = range(here.n_sequences)
    assert np.array_equal(here.batch(indices)["tokens"], there.batch(indices)["tokens"])


def test_damage_is_noticed(dataset_path, tmp_path):
    dataset = PackedDataset(dataset_path)
    dataset.verify()
    first, second, third = (tmp_path / "out" / path for path in dataset.paths[:3])
    content = bytearray(first.read_bytes())
    content[pq.read_metadata(first).row_group(0).column(1).data_page_offset + 60] ^= 1
    first.write_bytes(content)
    pq.write_table(pq.read_table(second).slice(0, 3), second)
    third.unlink()
    again = r"; delete the dataset and prepare it again$"
    with pytest.raises(ConfigError, match=rf"train/part-00000\.parquet is damaged \(its sha256 is not .*\){again}"):
        dataset.verify()
    with pytest.raises(ConfigError, match=rf"part-00000\.parquet is damaged \(.*checksum.*\){again}"):
        PackedDataset(dataset_path).batch([0])
    with pytest.raises(ConfigError, match=rf"part-00001\.parquet is damaged \(3 rows, the manifest says 70\){again}"):
        PackedDataset(dataset_path).batch([75])
    with pytest.raises(ConfigError, match=rf"part-00002\.parquet is damaged \(.*No such file.*\){again}"):
        PackedDataset(dataset_path).batch([145])


def test_a_store_that_fails_is_no_damage(dataset_path, monkeypatch):
    away = OSError("AWS Error NETWORK_CONNECTION during GetObject operation: curlCode: 7, Couldn't connect to server")

    def fail(*_, **__):
        raise away

    monkeypatch.setattr(pq, "ParquetFile", fail)
    with pytest.raises(OSError, match="NETWORK_CONNECTION") as raised:  # a ConfigError would not be tried again
        PackedDataset(dataset_path).batch([0])
    assert raised.value is away


def test_a_manifest_that_is_cut_is_said_to_be(dataset_path, tmp_path):
    manifest = tmp_path / "out/manifest.json"
    manifest.write_text(manifest.read_text()[:100])
    with pytest.raises(
        ConfigError, match=r"out/manifest\.json is damaged \(no JSON: .*\); prepare it again in another"
    ):
        PackedDataset(dataset_path)


def test_the_dataset_of_a_step_is_made_again_by_its_workflow(dataset_path, tmp_path):
    step = tmp_path / "steps" / "prepare-12345678"
    step.mkdir(parents=True)
    damaged = (tmp_path / "out").rename(step / "out")
    (damaged / PackedDataset(str(damaged)).paths[0]).unlink()
    (step / "spec.json").write_text("{}")
    (step / "done.json").write_text("{}")
    with pytest.raises(ConfigError, match=rf"{step} is not a finished dataset .*; give {damaged}$"):
        PackedDataset(str(step))  # the folder of a run's step would do
    advice = rf"; remove the finished step's folder \(rm -r {step}\) and run its workflow again$"
    with pytest.raises(ConfigError, match=rf"is damaged .*{advice}"):
        PackedDataset(str(damaged)).verify()
    (damaged / "manifest.json").unlink()
    with pytest.raises(ConfigError, match=rf"is not a finished dataset .*{advice}"):
        PackedDataset(str(damaged))
    (step / "done.json").unlink()
    with pytest.raises(ConfigError, match="; its step has not finished: run its workflow$"):
        PackedDataset(str(damaged))


def test_wrong_datasets(dataset_path, tmp_path):
    with pytest.raises(ConfigError, match=r"has no split 'test'; use train or validation$"):
        PackedDataset(dataset_path, "test")
    with pytest.raises(ConfigError, match=r"is not a finished dataset \(no manifest\.json\); run prepare"):
        PackedDataset(str(tmp_path / "nowhere"))
    manifest = json.loads((tmp_path / "out" / "manifest.json").read_text())
    (tmp_path / "out" / "manifest.json").write_text(json.dumps({**manifest, "schema_version": 2}))
    with pytest.raises(ConfigError, match=r"has schema version 2, this LT2 reads 1; prepare it again$"):
        PackedDataset(dataset_path)


def test_wrong_requests(dataset_path):
    dataset = PackedDataset(dataset_path)
    with pytest.raises(IndexError, match=rf"^sequence {dataset.n_sequences} of {dataset.n_sequences} in"):
        dataset.batch([0, dataset.n_sequences])
    with pytest.raises(IndexError, match=r"^sequence -1 of"):
        dataset.batch([-1])
    with pytest.raises(ConfigError, match=r"^global_batch_size 2 is smaller than 3 workers; raise it$"):
        dataset.batches(position=0, global_batch_size=2, world_size=3)


def test_empty_split_is_named(tmp_path, no_ray):
    (tmp_path / "x.txt").write_text("only one document, so nothing can be held out")
    prepare(PrepareConfig(source=str(tmp_path / "x.txt"), seq_len=7), str(tmp_path / "out"))
    dataset = PackedDataset(str(tmp_path / "out"), "validation")
    assert dataset.n_sequences == 0
    with pytest.raises(ConfigError, match=r"has no validation sequence; prepare more text$"):
        dataset.batches(position=0, global_batch_size=1)


def test_read_ahead_keeps_order_and_stays_within_its_depth():
    produced = []

    def source():
        for item in range(20):
            produced.append(item)
            yield item

    ahead = read_ahead(source(), depth=3)
    for item in range(5):
        assert next(ahead) == item
        deadline = time.monotonic() + 10
        while len(produced) < item + 5 and time.monotonic() < deadline:
            time.sleep(0.001)
        assert len(produced) <= item + 5  # handed over + queued 3 + the one waiting to be queued
    assert len(produced) == 9
    assert list(ahead) == list(range(5, 20))


class Panic(BaseException):
    """What Rust's panics are in Python, those of tokenizers too."""


@pytest.mark.timeout(30)  # an error that is lost leaves the reader waiting
@pytest.mark.parametrize("kind", [ConfigError, Panic])
def test_read_ahead_raises_the_sources_error_after_its_items(kind):
    def source():
        yield 1
        raise kind("shard 3 is damaged")

    ahead = read_ahead(source(), depth=2)
    assert next(ahead) == 1
    with pytest.raises(kind, match="shard 3 is damaged"):
        next(ahead)


def test_closing_ends_the_thread(dataset_path):
    before = threading.active_count()
    batches = PackedDataset(dataset_path).batches(position=0, global_batch_size=4, prefetch=2)
    next(batches)
    assert threading.active_count() == before + 1
    batches.close()
    assert threading.active_count() == before


def test_window_and_cache_fit():
    """The default cache holds a whole window at 4,096 tokens, so no row group is read twice in it."""
    assert stream.WINDOW_BLOCKS * stream.ROW_GROUP * 4097 * 8 <= stream.CACHE_BYTES
