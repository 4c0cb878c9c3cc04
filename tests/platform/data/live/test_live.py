"""Tokenising while training: every document once per epoch, in an order that no crash and no worker count changes."""

import errno
import itertools
import json
import subprocess
import sys
import time
from pathlib import Path

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
import zstandard

from lt2.config import ConfigError
from lt2_platform.data.live.lanes import live_batches
from lt2_platform.data.live.live import LiveDataset, read_cursors, write_cursors
from lt2_platform.data.live.on_the_fly import KEY, Listing, live_plan
from lt2_platform.data.prepare import PrepareConfig, prepare
from lt2_platform.data.sources import listing as sources
from lt2_platform.data.stream import PackedDataset
from tests.ranks import PATHS, ROOT

LANES, WIDTH, BOS = 4, 24, 256


@pytest.fixture
def small_units(monkeypatch):
    """Units of about 1,000 bytes, so that a small corpus has dozens of them."""
    monkeypatch.setattr(sources, "UNIT_BYTES", 1000)
    monkeypatch.setattr(sources, "PIECE_BYTES", 1000)


def write_corpus(folder, first=0, n=400) -> None:
    """Documents that say their number, in jsonl (with bad rows and blank lines), .zst and parquet."""
    texts = [f"<{number}> " + "word " * (number * 7 % 23) for number in range(first, first + n)]
    part = n // 4
    lines = [json.dumps({"text": text}) + "\n" for text in texts]
    lines[30] += "not json\n\n"
    (folder / "a.jsonl").write_text("".join(lines[: 2 * part]))
    (folder / "b.jsonl.zst").write_bytes(zstandard.compress("".join(lines[2 * part : 3 * part]).encode()))
    pq.write_table(pa.table({"text": texts[3 * part :]}), folder / "c.parquet", row_group_size=9)


@pytest.fixture
def dataset(tmp_path, no_ray, small_units):
    (tmp_path / "corpus").mkdir()
    write_corpus(tmp_path / "corpus")
    return make(tmp_path / "data", source=f"{tmp_path}/corpus")


def make(out, **fields):
    prepare(PrepareConfig(**{"seq_len": WIDTH - 1, "tokenize": "on_the_fly"} | fields), str(out))
    return LiveDataset(str(out))


def plan_of(dataset, **options):
    config = PrepareConfig.model_validate(dataset.manifest["config"])
    return live_plan(dataset.uri, dataset.manifest, config, seed=3, **options)


def stream(plan, *, position=0, first=0, last=LANES, cursors=None):
    return live_batches(plan, position=position, global_batch_size=LANES, first=first, last=last, cursors=cursors or {})


def documents(rows):
    """Numbers of the documents that begin in a concatenation of rows, those with a readable number."""
    text = bytes(token if token < BOS else ord("|") for token in np.concatenate(rows).tolist()).decode()
    return [int(part[1 : part.index(">")]) for part in text.split("|") if part.startswith("<") and ">" in part]


def own_documents(plan, number):
    """What unit `number` of the only source holds, read with the readers alone."""
    from lt2_platform.data.sources.readers import read_rows

    _, slices = plan.unit(0, number)
    rows = [row for part in slices for row in read_rows(plan.files[part.file], part, plan.sources[0])]
    return [int(row.text[1 : row.text.index(">")]) for row in rows if isinstance(row.text, str)]


def test_every_document_comes_once_per_epoch_through_crashes_with_other_numbers_of_workers(dataset):
    plan = plan_of(dataset)
    n = len(plan.units[0])
    held_out = set(documents(PackedDataset(dataset.uri, "validation").batch(range(5))["tokens"]))
    each = [own_documents(plan, number) for number in range(3 * n)]
    assert n > 4 * LANES
    epochs = [sorted(sum(each[epoch * n : (epoch + 1) * n], [])) for epoch in range(3)]
    assert epochs[0] == epochs[1] == sorted(set(epochs[0]))  # every document of the training units, once
    assert set(range(400)) - set(epochs[0]) > held_out > set()
    assert each[:n] != each[n : 2 * n]

    whole = list(itertools.islice(stream(plan), 900))
    lanes: dict[int, list] = {lane: [] for lane in range(LANES)}
    position, step, saved, workers = 0, 0, None, itertools.cycle([1, 4, 2])
    while step < 900:
        world_size, kept, lost = next(workers), 37, 5  # steps up to the checkpoint, and those that the crash undoes
        share = LANES // world_size
        cursors = read_cursors(saved, position, LANES)
        ranks = [
            stream(plan, position=position, first=rank * share, last=(rank + 1) * share, cursors=cursors)
            for rank in range(world_size)
        ]
        made = [list(zip(*itertools.islice(rank, kept + lost), strict=True)) for rank in ranks]
        for at in range(min(kept, 900 - step)):
            batches = [batches[at] for batches, _ in made]
            expected = whole[step + at][0]
            for name, values in expected.items():
                assert np.array_equal(np.concatenate([batch[name] for batch in batches]), values)
            for lane, row in enumerate(expected["tokens"]):
                lanes[lane].append(row)
        step, position = step + kept, position + kept * LANES
        saved = write_cursors(position, LANES, [after[kept - 1] for _, after in made])
    for lane, rows in lanes.items():
        found = documents(rows)
        expected = sum((own_documents(plan, number) for number in range(lane, 6 * n, LANES)), [])
        assert len(found) > 2 * 370 / LANES  # more than two epochs
        assert found == expected[: len(found)]


def test_rows_are_the_documents_end_to_end(dataset):
    plan = plan_of(dataset)
    batches = [batch for batch, _ in itertools.islice(stream(plan), 50)]
    assert [batch["ids"].tolist() for batch in batches[:2]] == [[0, 1, 2, 3], [4, 5, 6, 7]]
    for batch in batches:
        assert (batch["tokens"].dtype, batch["doc_ids"].dtype) == (np.int64, np.int32)
        starts = batch["tokens"][:, 1:] == BOS
        assert np.array_equal(np.diff(batch["doc_ids"], axis=1), starts.astype(np.int32))
        assert (batch["doc_ids"][:, 0] == 0).all()


def test_a_mixture_keeps_its_weights_masks_and_place(three, tmp_path, no_ray, small_units):
    three.pop("validation_fraction")
    three["source"]["sources"] = three["source"]["sources"][::2]  # letters 2 : conversations 1
    lines = (tmp_path / "chat.jsonl").read_text()
    (tmp_path / "chat.jsonl").write_text(lines * 9)
    dataset = make(tmp_path / "out", **three, max_document_tokens=100)
    plan = plan_of(dataset)
    made = list(itertools.islice(stream(plan), 300))
    chats = [(row == ord("Q")).any() or (row == ord("R")).any() for batch, _ in made for row in batch["tokens"]]
    assert np.mean(chats) == pytest.approx(1 / 3, abs=0.01)
    assert 0.2 < np.mean(chats[:60]) < 0.45
    for batch, _ in made:
        learned, tokens = batch["loss_mask"], batch["tokens"]
        assert learned[tokens == ord("R")].all()
        assert not learned[tokens == ord("Q")].any()
        assert learned[tokens == ord("b")].all()
    starts = np.flatnonzero(np.concatenate([b["tokens"][0] for b, c in made if c.keys() >= {"0/0"}]) == BOS)
    assert len(starts) > 20  # a document of letters alone is 900 tokens long
    for step in (1, 7, 150):
        again = itertools.islice(stream(plan, position=step * LANES, cursors=made[step - 1][1]), 20)
        for (batch, cursors), (expected, after) in zip(again, made[step:], strict=False):
            assert all(np.array_equal(batch[name], expected[name]) for name in expected)
            assert cursors == after


def test_bad_rows_are_set_aside_unit_by_unit(dataset, tmp_path):
    plan = plan_of(dataset, quarantine=str(tmp_path / "bad"))
    for _ in itertools.islice(stream(plan), 900):
        pass
    (file,) = (tmp_path / "bad").iterdir()
    (fault,) = map(json.loads, file.read_text().splitlines())
    assert (fault["reason"], fault["sample"]) == ("invalid json", "not json")
    rest = Path(fault["source"]).read_bytes()[fault["start"] :].split(b"\n")  # a slice begins with the next whole line
    assert rest[fault["row"] + 1] == b"not json"


def test_bad_rows_of_held_out_units_are_found_by_their_slice(tmp_path, no_ray, small_units):
    rows = [f"bad {i}" if i % 3 else json.dumps({"text": f"<{i}> " + "word " * 5}) for i in range(1500)]
    (tmp_path / "a.jsonl").write_text("\n".join(rows))
    dataset = make(tmp_path / "data", source=f"{tmp_path}/a.jsonl", validation_fraction=0.1)
    faults = [
        json.loads(line) for file in (tmp_path / "data/quarantine").iterdir() for line in file.read_text().splitlines()
    ]
    assert dataset.manifest["quarantine"]["rows"] == len(faults) > 50
    content = (tmp_path / "a.jsonl").read_bytes()
    for fault in faults:
        skipped = 1 if fault["start"] else 0  # a slice begins with the next whole line
        rest = content[max(0, fault["start"] - 1) :].split(b"\n")
        assert rest[fault["row"] + skipped].decode() == fault["sample"]


def test_a_lane_gives_up_only_when_it_has_seen_every_unit_empty(tmp_path, no_ray, small_units):
    """Of three units one has text: a lane may well meet the two others three times in a row and more."""
    (tmp_path / "corpus").mkdir()
    for name in "abc":
        (tmp_path / f"corpus/{name}.jsonl").write_text("not json\n" * 200)
    bad = make(tmp_path / "bad", source=f"{tmp_path}/corpus", validation_fraction=0)
    with pytest.raises(ConfigError, match=r"^no usable document in 6 units of the corpus; check the source's type$"):
        next(stream(plan_of(bad)))
    (tmp_path / "corpus/b.jsonl").write_text(json.dumps({"text": "<7> " + "word " * 300}) + "\n")
    dataset = make(tmp_path / "data", source=f"{tmp_path}/corpus", validation_fraction=0)
    plan = plan_of(dataset)
    assert len(plan.units[0]) == 6
    batches = [batch["tokens"] for batch, _ in itertools.islice(stream(plan), 400)]
    for lane in range(LANES):
        assert set(documents([rows[lane] for rows in batches])) == {7}


def test_the_process_beside_the_worker_gives_the_same_and_remembers_where(dataset):
    expected = list(itertools.islice(stream(plan_of(dataset)), 12))
    batches = dataset.batches(position=0, global_batch_size=LANES, rank=1, world_size=2, seed=3, prefetch=2)
    for step, (whole, cursors) in enumerate(expected, start=1):
        batch = next(batches)
        assert all(np.array_equal(batch[name], whole[name][2:]) for name in whole)
        own = {name: cursor for name, cursor in cursors.items() if name[0] in "23"}
        assert dataset.cursors(step * LANES) == own
    batches.close()


def test_errors_of_the_process_are_raised_as_themselves(dataset, tmp_path):
    (tmp_path / "corpus/a.jsonl").unlink()
    batches = dataset.batches(position=0, global_batch_size=LANES)
    with pytest.raises(ConfigError, match=r"cannot read .*a\.jsonl .*; replace or remove that file$"):
        list(batches)


ORPHAN = """
import os, signal, sys
from lt2_platform.data.live.live import LiveDataset
if __name__ == "__main__":
    batches = LiveDataset(sys.argv[1]).batches(position=0, global_batch_size=4)
    next(batches)
    import multiprocessing
    (child,) = multiprocessing.active_children()
    os.kill(child.pid, signal.SIGTERM)
    for _ in range(50):
        next(batches)
    print(child.pid, flush=True)
    os.kill(os.getpid(), signal.SIGKILL)
"""


def test_the_process_outlives_sigterm_but_not_its_worker(dataset, tmp_path):
    (tmp_path / "orphan.py").write_text(ORPHAN)
    environment = {"PYTHONPATH": ":".join(map(str, PATHS)), "PATH": "/usr/bin:/bin"}
    ran = subprocess.run(
        [sys.executable, tmp_path / "orphan.py", dataset.uri], env=environment, cwd=ROOT, capture_output=True, text=True
    )
    child = Path("/proc", ran.stdout.strip())
    deadline = time.monotonic() + 60
    while child.exists() and "Z" not in (child / "stat").read_text().split()[2]:
        assert time.monotonic() < deadline, "the tokenising process lives on without its worker"
        time.sleep(0.02)


def test_a_changed_corpus_is_named_before_training(dataset, tmp_path):
    listing = Listing.read(dataset.manifest[KEY])
    listing.check_unchanged()
    path = tmp_path / "corpus/a.jsonl"
    content = path.read_bytes()
    path.write_bytes(content.replace(b"<7>", b"<8>"))
    again = r"; restore it, or prepare it again for a new run$"
    with pytest.raises(
        ConfigError, match=rf"^the corpus has changed since it was listed: .*a\.jsonl has other .*{again}"
    ):
        listing.check_unchanged()
    path.write_bytes(content + b"\n")
    with pytest.raises(ConfigError, match=rf"has {len(content) + 1:,} bytes instead of {len(content):,}{again}"):
        listing.check_unchanged()
    path.unlink()
    (tmp_path / "corpus/c.parquet").unlink()
    with pytest.raises(ConfigError, match=rf"a\.jsonl is missing and 1 more files{again}"):
        listing.check_unchanged()


def test_a_corpus_out_of_reach_is_not_called_changed(dataset, monkeypatch):
    def refuse(path, *, sampled):
        raise PermissionError(errno.EACCES, "Permission denied")

    monkeypatch.setattr(sources, "version_of", refuse)
    with pytest.raises(ConfigError, match=r"a\.jsonl cannot be read \(Permission denied\); give another path$"):
        Listing.read(dataset.manifest[KEY]).check_unchanged()


def test_bad_input_is_one_line(dataset, tmp_path):
    with pytest.raises(ConfigError, match=r"has no packed train split: it is tokenised while training$"):
        PackedDataset(dataset.uri)
    with pytest.raises(ConfigError, match=r"^the checkpoint has no cursors\.json: its run read packed shards"):
        dataset.batches(position=8, global_batch_size=LANES)
    with pytest.raises(ConfigError, match=r"^cursors\.json is for lanes 4, the run is at 8; damaged checkpoint$"):
        dataset.batches(position=8, global_batch_size=8, cursors=write_cursors(8, 4, []))
    with pytest.raises(ValueError, match="max_documents keeps a few documents"):
        PrepareConfig(tokenize="on_the_fly", max_documents=3)
    (tmp_path / "one.txt").write_text("a small book")
    with pytest.raises(ConfigError, match=r"^a source of 1 unit\(s\) is too small to tokenise on the fly .* to ahead$"):
        make(tmp_path / "small", source=f"{tmp_path}/one.txt")
