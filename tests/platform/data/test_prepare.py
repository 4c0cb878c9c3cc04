"""prepare() on a real local Ray: what comes out is what a plain loop over the documents says, whatever the spread."""

import hashlib
import json
import os
import signal
import subprocess
import sys
import time

import numpy as np
import pyarrow.parquet as pq
import pytest

from lt2.config import ConfigError
from lt2_platform.data.pack import START, document_hash, entropy, frame, holdout_threshold, join_framed, pack
from lt2_platform.data.prepare import PrepareConfig, prepare
from lt2_platform.data.sources import listing as sources
from lt2_platform.data.sources.listing import PIECE_BYTES
from lt2_platform.data.spread import spread
from lt2_platform.data.tokenizers.tokenize import load_tokenizer
from lt2_platform.fence import FENCE, OvertakenError
from lt2_platform.storage import Storage

pytestmark = pytest.mark.ray
CONFIG = {"seq_len": 63, "validation_fraction": 0.2, "seed": 5, "shard_sequences": 2112}


def shards(out, split):
    tables = [pq.read_table(path) for path in sorted((out / split).glob("*.parquet"))]
    columns = [np.concatenate([np.stack(table[name].to_numpy()) for table in tables]) for name in ("tokens", "doc_ids")]
    return *columns, np.concatenate([table["sequence_id"].to_numpy() for table in tables])


def content(out):
    """Every file's hash, so that equality means byte equality."""
    files = sorted(path for path in out.rglob("*") if path.is_file())
    return {str(path.relative_to(out)): hashlib.sha256(path.read_bytes()).hexdigest() for path in files}


def expected_streams(texts, seed, fraction):
    byte, threshold = load_tokenizer("byte"), holdout_threshold(fraction)
    sides = {"train": [], "validation": []}
    for text in texts:
        held = document_hash(text.encode(), seed) < threshold
        (ids,) = byte.encode_batch([text])
        sides["validation" if held else "train"].append(frame(ids, byte.bos_id, byte.eos_id))
    return {split: join_framed(documents) for split, documents in sides.items()}


@pytest.fixture(scope="module")
def prepared(corpus, local_ray, tmp_path_factory):
    """(folder, manifest) of the whole corpus with the settings CONFIG."""
    out = tmp_path_factory.mktemp("prepared") / "out"
    return out, prepare(PrepareConfig(source=str(corpus[0]), **CONFIG), str(out))


def test_every_token_appears_once_and_in_order(prepared, corpus):
    out, manifest = prepared
    texts = [text for _, documents in corpus[1] for text in documents]
    streams = expected_streams(texts, CONFIG["seed"], CONFIG["validation_fraction"])
    for split, stream in streams.items():
        dropped = len(stream) % 64 if split == "train" else 0
        tokens, doc_ids = pack(stream[: len(stream) - dropped], 64, 258)
        found_tokens, found_ids, sequence_ids = shards(out, split)
        assert np.array_equal(found_tokens, tokens)
        assert np.array_equal(found_ids, doc_ids)
        assert sequence_ids.tolist() == list(range(len(tokens)))
        record = manifest["splits"][split]
        assert record["sequences"] == len(tokens)
        assert record["tokens"] == len(stream) - dropped
        assert record["dropped_tokens"] == dropped
        assert record["documents"] == int((stream & START != 0).sum())
        counts = np.bincount(tokens[doc_ids >= 0])
        assert record["unigram_entropy"] == pytest.approx(entropy(counts), abs=1e-12)
    assert len(manifest["splits"]["train"]["files"]) >= 3
    assert (shards(out, "validation")[1][-1] == -1).any()


def test_manifest_describes_the_folder(prepared, corpus):
    out, manifest = prepared
    assert json.loads((out / "manifest.json").read_text()) == manifest
    assert manifest["schema_version"] == 1
    assert manifest["tokenizer"]["vocab_size"] == 259
    assert (manifest["seq_len"], manifest["seed"]) == (63, 5)
    assert manifest["quarantine"] == {"rows": 0, "reasons": {}, "files": 0}
    assert [(source["path"].rsplit("/", 1)[-1], source["documents"]) for source in manifest["sources"]] == [
        (name, len(documents)) for name, documents in corpus[1]
    ]
    hashes = {name: digest for name, digest in content(out).items() if name != "manifest.json"}
    listed = [file for split in manifest["splits"].values() for file in split["files"]]
    assert {file["path"]: file["sha256"] for file in listed} == hashes
    assert all(file["sequences"] == 2112 for file in manifest["splits"]["train"]["files"][:-1])


@pytest.mark.parametrize(("parallelism", "unit_pieces"), [(1, 32), (1, 1), (2, 1), (2, 2)])
def test_bytes_do_not_depend_on_the_spread(prepared, corpus, tmp_path, monkeypatch, parallelism, unit_pieces):
    monkeypatch.setattr(sources, "UNIT_BYTES", unit_pieces * PIECE_BYTES)
    prepare(PrepareConfig(source=str(corpus[0]), **CONFIG), str(tmp_path / "out"), parallelism=parallelism)
    assert content(tmp_path / "out") == content(prepared[0])


def test_seed_moves_documents_between_splits(prepared, corpus, tmp_path):
    other = prepare(PrepareConfig(source=str(corpus[0]), **{**CONFIG, "seed": 6}), str(tmp_path / "out"))
    assert other["splits"]["validation"]["documents"] != prepared[1]["splits"]["validation"]["documents"]
    total = sum(split["documents"] for split in prepared[1]["splits"].values())
    assert sum(split["documents"] for split in other["splits"].values()) == total


def test_copies_of_a_document_are_on_one_side(local_ray, tmp_path):
    texts = [f"document number {i % 20} " * 5 for i in range(200)]
    (tmp_path / "x.jsonl").write_text("".join(json.dumps({"text": text}) + "\n" for text in texts))
    config = PrepareConfig(source=str(tmp_path / "x.jsonl"), seq_len=31, validation_fraction=0.3)
    manifest = prepare(config, str(tmp_path / "out"))
    rows = [shards(tmp_path / "out", split)[0].reshape(-1) for split in manifest["splits"]]
    sides = [bytes(token for token in row if token < 256) for row in rows]
    numbers = [{i for i in range(20) if f"number {i} ".encode() in side} for side in sides]
    assert numbers[0] | numbers[1] == set(range(20))
    assert not numbers[0] & numbers[1]
    assert numbers[1]


@pytest.mark.parametrize(("count", "fraction", "held"), [(30, 1e-6, 1), (2, 0.999999, 1), (1, 0.5, 0), (30, 0.0, 0)])
def test_both_splits_get_a_document_when_they_can(local_ray, tmp_path, count, fraction, held):
    for index in range(count):
        (tmp_path / f"{index}.txt").write_text(f"text {index} " * 10)
    config = PrepareConfig(source=f"{tmp_path}/*.txt", seq_len=15, validation_fraction=fraction)
    splits = prepare(config, str(tmp_path / "out"))["splits"]
    assert splits["validation"]["documents"] == held
    assert splits["train"]["documents"] == count - held


def test_bad_rows_are_set_aside_with_their_place(local_ray, tmp_path, monkeypatch):
    monkeypatch.setattr(sources, "UNIT_BYTES", PIECE_BYTES)
    rows = [json.dumps({"text": f"row {i} " + "x" * 1000}) for i in range(400)]
    rows[3], rows[250], rows[399] = '{"text": null}', '{"text": "\\ud800"}', "{broken"
    rows[251] = ""
    (tmp_path / "x.jsonl").write_text("\n".join(rows))
    manifest = prepare(PrepareConfig(source=str(tmp_path / "x.jsonl"), seq_len=63), str(tmp_path / "out"))
    reasons = {"invalid json": 1, "lone surrogate": 1, "null text": 1}
    assert manifest["quarantine"] == {"rows": 3, "reasons": reasons, "files": 3}
    parts = sorted((tmp_path / "out" / "quarantine").iterdir())
    assert [part.name for part in parts] == [f"part-{i:05d}.jsonl" for i in range(3)]
    bad = [json.loads(line) for part in parts for line in part.read_text().splitlines()]
    source = str(tmp_path / "x.jsonl")
    assert bad == [
        {"source": source, "row": 3, "reason": "null text", "sample": '{"text": null}'},
        {"source": source, "row": 250, "reason": "lone surrogate", "sample": '{"text": "\\ud800"}'},
        {"source": source, "row": 399, "reason": "invalid json", "sample": "{broken"},
    ]
    assert manifest["sources"][0]["documents"] == 396


@pytest.mark.parametrize("limit", [1, 57, 130])
def test_max_documents_keeps_the_first(corpus, local_ray, tmp_path, monkeypatch, limit):
    monkeypatch.setattr(sources, "UNIT_BYTES", PIECE_BYTES)
    config = PrepareConfig(source=str(corpus[0]), max_documents=limit, seq_len=7, validation_fraction=0)
    prepare(config, str(tmp_path / "out"))
    texts = [text for _, documents in corpus[1] for text in documents][:limit]
    stream = expected_streams(texts, 0, 0)["train"] & ~START
    found = shards(tmp_path / "out", "train")[0].reshape(-1)
    assert np.array_equal(found, stream[: len(stream) // 8 * 8])


def test_finished_dataset_is_not_made_again(prepared, corpus):
    out, manifest = prepared
    before = {path: path.stat().st_mtime_ns for path in out.rglob("*")}
    assert prepare(PrepareConfig(source=str(corpus[0]), **CONFIG), str(out)) == manifest
    assert {path: path.stat().st_mtime_ns for path in out.rglob("*")} == before


KILLED_RUN = """
import logging, os, signal, sys
from lt2_platform.data.sources import listing as sources
from lt2_platform.data.prepare import PrepareConfig, prepare

class Kill(logging.Handler):
    def emit(self, record):
        if record.getMessage().startswith(sys.argv[3]):
            os.kill(os.getpid(), signal.SIGKILL)

logging.getLogger("lt2_platform.data").addHandler(Kill())
logging.getLogger("lt2_platform.data").setLevel(logging.INFO)
sources.UNIT_BYTES = sources.PIECE_BYTES
prepare(PrepareConfig.model_validate_json(sys.argv[1]), sys.argv[2], parallelism=1)
"""


@pytest.mark.parametrize(("moment", "own_ray"), [("tokenised 2 of", True), ("wrote 1 of", False)])
def test_killed_run_goes_on_and_ends_the_same(prepared, corpus, tmp_path, monkeypatch, moment, own_ray):
    """The child dies while units are being made, on a Ray of its own, as a user without one has, which ends with it; or
    shards, on one that lives on."""
    import ray

    out = tmp_path / "out"
    config = PrepareConfig(source=str(corpus[0]), **CONFIG)
    address = {} if own_ray else {"RAY_ADDRESS": ray.get_runtime_context().gcs_address}
    command = [sys.executable, "-c", KILLED_RUN, config.model_dump_json(), str(out), moment]
    child = subprocess.run(command, env=os.environ | address, timeout=120)
    assert child.returncode == -signal.SIGKILL
    assert not (out / "manifest.json").exists()
    assert (out / "train").exists() == (moment == "wrote 1 of")
    (records,) = (out / ".staging").glob("*/record")
    done = {name: os.stat(records / name).st_mtime_ns for name in os.listdir(records) if not name.startswith(".")}
    assert len(done) >= 2

    monkeypatch.setattr(sources, "UNIT_BYTES", PIECE_BYTES)
    kept, delete = tmp_path / "kept", Storage.delete
    keep = {".staging": lambda storage, path: os.rename(storage.join(path), kept)}
    monkeypatch.setattr(Storage, "delete", lambda storage, path: keep.get(path, delete)(storage, path))
    prepare(config, str(out))
    assert content(out) == content(prepared[0])
    (records,) = kept.glob("*/record")
    assert {name: os.stat(records / name).st_mtime_ns for name in done} == done


def test_s3_in_and_out(prepared, corpus, s3_root, tmp_path):
    storage = Storage(s3_root)
    for name, _ in corpus[1]:
        storage.write_bytes(f"in/{name}", (corpus[0] / name).read_bytes())
    manifest = prepare(PrepareConfig(source=f"{s3_root}/in", **CONFIG), f"{s3_root}/out")
    names = [file["path"] for split in manifest["splits"].values() for file in split["files"]]
    local = content(prepared[0])
    found = {name: hashlib.sha256(storage.read_bytes(f"out/{name}")).hexdigest() for name in names}
    assert found == {name: local[name] for name in names}
    assert storage.list("out") == ["manifest.json", "train", "validation"]


def test_errors_of_tasks_arrive_as_they_are(local_ray, tmp_path):
    (tmp_path / "x.jsonl").write_text('{"text": "ok"}\n' + json.dumps({"text": "x" * 1000}) + "\n")
    config = PrepareConfig(source=f"{tmp_path}/x.jsonl", seq_len=31, shard_sequences=16)
    with pytest.raises(ConfigError, match=r"^document .*/x\.jsonl row 1 has 1,002 tokens, more than a shard holds"):
        prepare(config, str(tmp_path / "out"))
    assert not (tmp_path / "out").exists()


def test_runs_inside_a_step_of_a_job(prepared, corpus, tmp_path):
    """A workflow's step is itself a Ray task, without a CPU of its own."""
    import ray

    config = PrepareConfig(source=str(corpus[0]), **CONFIG)
    ray.get(ray.remote(num_cpus=0)(prepare).remote(config, str(tmp_path / "out")), timeout=120)
    assert content(tmp_path / "out") == content(prepared[0])


def test_a_mixture_does_not_depend_on_the_spread(three, tmp_path, local_ray, monkeypatch):
    three["source"]["stopping_strategy"] = "all_exhausted"
    config = PrepareConfig.model_validate(three)
    first = prepare(config, str(tmp_path / "one"), parallelism=1)
    monkeypatch.setattr(sources, "UNIT_BYTES", PIECE_BYTES)
    second = prepare(config, str(tmp_path / "two"), parallelism=2)
    assert first == second
    assert content(tmp_path / "one") == content(tmp_path / "two")
    assert [one["epochs"] > 1 for one in first["mixture"]] == [False, True, True]
    assert sum(one["held_out"] for one in first["mixture"]) == first["splits"]["validation"]["tokens"]


def test_two_tasks_run_at_once_and_a_limit_holds(local_ray, tmp_path):
    """Each of two tasks waits for the other to begin; under a limit of one, none ever sees another."""

    def meet(name, folder):
        (folder / name).touch()
        deadline = time.monotonic() + 60
        while len(list(folder.iterdir())) < 2 and time.monotonic() < deadline:
            time.sleep(0.01)
        return len(list(folder.iterdir()))

    def alone(name, folder):
        (folder / name).touch()
        time.sleep(0.05)
        seen = len(list(folder.iterdir()))
        (folder / name).unlink()
        return seen

    together, apart = tmp_path / "together", tmp_path / "apart"
    together.mkdir()
    apart.mkdir()
    assert list(spread(meet, ["a", "b"], together, None)) == [2, 2]
    assert list(spread(alone, [str(i) for i in range(6)], apart, 1)) == [1] * 6
    assert list(spread(alone, [], apart, 1)) == []


def test_a_task_whose_worker_dies_runs_again(local_ray, tmp_path):
    def die_once(number, folder):
        if number == 3 and not (folder / "died").exists():
            (folder / "died").touch()
            os.kill(os.getpid(), signal.SIGKILL)
        return number

    assert sorted(spread(die_once, range(6), tmp_path, 2)) == list(range(6))
    assert (tmp_path / "died").exists()


def test_tasks_of_an_attempt_that_was_taken_over_write_nothing(local_ray, tmp_path, monkeypatch):
    """They live on while their attempt's process stands still."""

    def write(number, root):
        Storage(root).write_bytes(f"out/{number}", b"made")

    fence = tmp_path / "attempts/2/lease.json"
    monkeypatch.setenv(FENCE, str(fence))
    list(spread(write, [0], str(tmp_path), None))
    fence.parent.mkdir(parents=True)
    fence.touch()
    with pytest.raises(OvertakenError):
        list(spread(write, [1], str(tmp_path), None))
    assert [path.name for path in (tmp_path / "out").iterdir()] == ["0"]


def test_after_an_error_no_task_writes(local_ray, tmp_path):
    def fail_or_write(number, folder):
        if number == 0:
            raise OSError("disk full")
        time.sleep(0.5)  # all of them would take 50 s
        (folder / str(number)).touch()

    with pytest.raises(OSError, match="disk full"):
        list(spread(fail_or_write, range(200), tmp_path, None))
    before = len(list(tmp_path.iterdir()))
    time.sleep(1)
    assert len(list(tmp_path.iterdir())) == before < 199
