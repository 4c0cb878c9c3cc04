"""Preparing and streaming data: tokens/s beside a plain pyarrow + tokenizers loop and `datasets` streaming.

python benchmarks/data.py [--quick] [--tokenizer FILE] [--json FILE]. The corpus is the standard library's text in
parquet, the tokenizer a byte-level BPE trained on it (or FILE, a tokenizer.json or *.tiktoken). Work per core is in
tokens per CPU second, which a busy machine changes less than wall time; what runs in other processes is in tokens per
second, and at --quick's size mostly start-up. Everything is the median of interleaved repeats. "waiting" is the share
of the time that a loop waits for its batches.
"""

from __future__ import annotations

import argparse
import os
import statistics
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager, nullcontext
from itertools import islice
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
SEQ_LEN, BATCH = 1024, 8
STEP_S, LIVE_STEP_S = 0.02, 0.06  # the second asks for 137k tokens/s of one worker


def write_corpus(path: Path, size: int) -> None:
    """About `size` characters of the standard library as documents of 3,000 characters, in row groups of 500."""
    import pyarrow as pa
    import pyarrow.parquet as pq

    from lt2_platform.data.sources.paths import stdlib

    text = "".join(Path(path).read_text(errors="replace") for _, path in stdlib())
    text = (text * (size // len(text) + 1))[:size]
    documents = [text[at : at + 3000] for at in range(0, size, 3000)]
    pq.write_table(pa.table({"id": range(len(documents)), "text": documents}), path, row_group_size=500)


def train_tokenizer(path: Path, corpus: Path) -> None:
    import pyarrow.parquet as pq
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers

    texts = pq.read_table(corpus, columns=["text"])["text"].to_pylist()[:300]
    bpe = Tokenizer(models.BPE())
    bpe.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    bpe.decoder = decoders.ByteLevel()
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    bpe.train_from_iterator(
        texts, trainers.BpeTrainer(vocab_size=8192, special_tokens=["</s>"], initial_alphabet=alphabet)
    )
    bpe.save(str(path))


def plain_prepare(corpus: Path, tokenizer_path: str, out: Path) -> int:
    """The loop one would write: read, encode, append EOS, cut into rows, write parquet. Returns the tokens."""
    import numpy as np
    import pyarrow as pa
    import pyarrow.parquet as pq

    encode, eos = _plain_encoder(tokenizer_path)
    ids: list[np.ndarray] = []
    for batch in pq.ParquetFile(corpus).iter_batches(batch_size=256, columns=["text"]):
        ids += [np.array([*one, eos], dtype=np.int32) for one in encode(batch.column(0).to_pylist())]
    stream = np.concatenate(ids)
    rows = len(stream) // (SEQ_LEN + 1)
    column = pa.FixedSizeListArray.from_arrays(pa.array(stream[: rows * (SEQ_LEN + 1)]), SEQ_LEN + 1)
    pq.write_table(pa.table({"tokens": column}), out, row_group_size=64, compression="zstd", compression_level=1)
    return len(stream)


def _plain_encoder(path: str) -> tuple[Callable[[list[str]], list], int]:
    if path.endswith(".tiktoken"):
        from lt2_platform.data.tokenizers.tokenize import load_tokenizer

        loaded = load_tokenizer(path)
        return loaded.encode_batch, loaded.eos_id  # building a tiktoken encoding is not what is measured
    from tokenizers import Tokenizer

    bpe = Tokenizer.from_file(path)
    return lambda texts: [one.ids for one in bpe.encode_batch_fast(texts, add_special_tokens=False)], 0


@contextmanager
def without_ray() -> Iterator[None]:
    """prepare() in this process, one unit after another: what its tasks do, and nothing of Ray."""
    from lt2_platform.data import prepare

    kept = prepare.some_ray, prepare.spread
    prepare.some_ray = lambda parallelism: nullcontext()
    prepare.spread = lambda function, items, shared, limit: (function(item, shared) for item in items)
    try:
        yield
    finally:
        prepare.some_ray, prepare.spread = kept


def best(calls: dict[str, Callable[[], int]], clock: Callable[[], float], repeats: int) -> dict[str, float]:
    """Median tokens per unit of `clock` of each call, in turns, after one round of warm-up."""
    rates: dict[str, list[float]] = {name: [] for name in calls}
    for round_ in range(repeats + 1):
        for name, call in calls.items():
            begun = clock()
            tokens = call()
            if round_:
                rates[name].append(tokens / (clock() - begun))
    return {name: statistics.median(values) for name, values in rates.items()}


@contextmanager
def two_cpus() -> Iterator[None]:
    import ray

    # Ray's workers at the niceness of everything else here: at its default of 15 the machine's other work is measured.
    ray.init(
        address="local", num_cpus=2, include_dashboard=False, log_to_driver=False, _system_config={"worker_niceness": 0}
    )
    try:
        yield
    finally:
        ray.shutdown()


def prepare_rows(folder: Path, corpus: Path, characters: int, tokenizer: str, repeats: int) -> list[dict]:
    from comparison import row

    from lt2_platform.data.prepare import PrepareConfig, prepare

    config = PrepareConfig(source=str(corpus), tokenizer=tokenizer, seq_len=SEQ_LEN, validation_fraction=0.01)
    made = 0

    def ours(parallelism: int) -> int:
        nonlocal made
        made += 1
        splits = prepare(config, str(folder / f"out{made}"), parallelism=parallelism)["splits"].values()
        return sum(split["tokens"] + split["dropped_tokens"] for split in splits)

    def plain() -> int:
        return plain_prepare(corpus, tokenizer, folder / "plain.parquet")

    size = f"{corpus.stat().st_size / 1e6:.0f} MB parquet, rows of {SEQ_LEN}"
    with without_ray():
        found = best({"ours": lambda: ours(1), "plain": plain}, time.process_time, repeats)
    per_core = row(
        "prepare, per core", size, found["ours"], "pyarrow + tokenizers loop", found["plain"], "tok/CPU-s", "higher"
    )

    large = folder / "large.parquet"  # Ray Data takes two seconds to start, which a small corpus does not outlast
    write_corpus(large, 4 * characters)
    config, size = config.model_copy(update={"source": str(large)}), f"{large.stat().st_size / 1e6:.0f} MB parquet"
    with two_cpus():
        found = best({"two": lambda: ours(2), "one": lambda: ours(1)}, time.perf_counter, min(repeats, 2))
    return [per_core, row("prepare, 2 Ray tasks", size, found["two"], "1 Ray task", found["one"], "tok/s", "higher")]


def stream_rows(folder: Path, repeats: int) -> list[dict]:
    import numpy as np
    import pyarrow.parquet as pq
    from comparison import row
    from datasets import load_dataset

    from lt2_platform.data.ray_stream import ray_batches
    from lt2_platform.data.stream import PackedDataset

    uri = str(folder / "out1")
    dataset = PackedDataset(uri)
    files = [f"{uri}/{path}" for path in dataset.paths]
    steps = dataset.n_sequences // BATCH

    def ours() -> Iterator[np.ndarray]:
        loader = PackedDataset(uri).batches(position=0, global_batch_size=BATCH)
        return (batch["tokens"] for batch in islice(loader, steps))

    def by_ray() -> Iterator[np.ndarray]:
        loader = ray_batches(PackedDataset(uri), position=0, global_batch_size=BATCH, limit=steps)
        return (batch["tokens"] for batch in loader)

    def plain() -> Iterator[np.ndarray]:  # in file order: no shuffle, nothing to resume
        for path in files:
            for batch in pq.ParquetFile(path).iter_batches(batch_size=BATCH, columns=["tokens", "doc_ids"]):
                yield batch.column(0).flatten().to_numpy().reshape(-1, SEQ_LEN + 1).astype(np.int64)

    def streaming() -> Iterator[np.ndarray]:
        rows = load_dataset("parquet", data_files=files, split="train", streaming=True)
        rows = rows.shuffle(seed=0, buffer_size=4096).with_format("numpy")
        return (np.asarray(batch["tokens"], dtype=np.int64) for batch in rows.iter(batch_size=BATCH))

    def consumed(batches: Callable[[], Iterator[np.ndarray]]) -> Callable[[], int]:
        return lambda: sum(tokens.size for tokens in batches())

    ways = {"direct": ours, "Ray Data": by_ray, "datasets streaming": streaming, "pyarrow loop, unshuffled": plain}
    with two_cpus():
        found = best({name: consumed(one) for name, one in ways.items()}, time.perf_counter, repeats)
        waits = waiting({name: ways[name] for name in list(ways)[:3]}, repeats)
    size = f"{steps} batches of {BATCH} x {SEQ_LEN}, shuffled"
    peers = [("direct", list(ways)[2]), ("direct", list(ways)[3]), ("Ray Data", "direct"), ("Ray Data", list(ways)[2])]
    rows = [row(f"stream, {one}", size, found[one], peer, found[peer], "tok/s", "higher") for one, peer in peers]
    return rows + [wait_row(f"stream, {one}", waits, one, peer) for one, peer in peers if peer in waits]


def on_the_fly_rows(folder: Path, corpus: Path, tokenizer: str, repeats: int) -> list[dict]:
    """Tokenising while training, beside `datasets` streaming with a tokenising map; both endless, cut at 2M tokens."""
    import numpy as np
    from comparison import row
    from datasets import load_dataset

    from lt2_platform.data.live.live import LiveDataset
    from lt2_platform.data.prepare import PrepareConfig, prepare

    uri, encoders = str(folder / "live"), _plain_encoder(tokenizer)
    config = PrepareConfig(source=str(corpus), tokenizer=tokenizer, seq_len=SEQ_LEN, tokenize="on_the_fly")
    with without_ray():
        prepare(config, uri)
    steps = 2_000_000 // (BATCH * (SEQ_LEN + 1))

    def ours() -> Iterator[np.ndarray]:
        loader = LiveDataset(uri).batches(position=0, global_batch_size=BATCH)
        try:
            for _ in range(steps):
                yield next(loader)["tokens"]
        finally:
            loader.close()

    def streaming() -> Iterator[np.ndarray]:
        encode, eos = encoders
        rows = load_dataset("parquet", data_files=[str(corpus)], split="train", streaming=True, columns=["text"])
        rows = rows.shuffle(seed=0, buffer_size=1000)
        width, rest = SEQ_LEN + 1, np.empty(0, dtype=np.int64)
        for batch in rows.iter(batch_size=64):
            rest = np.concatenate([rest, *(np.array([*ids, eos], dtype=np.int64) for ids in encode(batch["text"]))])
            while len(rest) >= BATCH * width:
                yield rest[: BATCH * width].reshape(BATCH, width)
                rest = rest[BATCH * width :]

    ways = {"on the fly": ours, "datasets streaming": streaming}
    consumed = {name: lambda one=one: sum(tokens.size for tokens in islice(one(), steps)) for name, one in ways.items()}
    found = best(consumed, time.perf_counter, repeats)
    peer = "datasets streaming"
    return [
        row("on the fly", f"{steps} x {BATCH} x {SEQ_LEN}", found["on the fly"], peer, found[peer], "tok/s", "higher"),
        wait_row("on the fly", waiting(ways, repeats, LIVE_STEP_S), "on the fly", peer, LIVE_STEP_S),
    ]


def waiting(
    ways: Mapping[str, Callable[[], Iterator[object]]], repeats: int, step_s: float = STEP_S
) -> dict[str, float]:
    """Median wait fraction of each way, in turns."""
    shares: dict[str, list[float]] = {name: [] for name in ways}
    for _ in range(repeats):
        for name, batches in ways.items():
            shares[name].append(wait_fraction(batches, step_s))
    return {name: statistics.median(values) for name, values in shares.items()}


def wait_row(work: str, waits: dict[str, float], ours: str, peer: str, step_s: float = STEP_S) -> dict:
    from comparison import row

    size = f"steps of {1e3 * step_s:.0f} ms, {BATCH} x {SEQ_LEN}"
    return row(f"waiting: {work}", size, 100 * waits[ours], peer, 100 * waits[peer], "% of time")


def wait_fraction(batches: Callable[[], Iterator[object]], step_s: float, steps: int = 100) -> float:
    """The share of the time that a loop of steps of step_s waits for its next batch, the first ones excluded."""
    iterator = batches()
    for _ in range(10):
        next(iterator)
    begun, waited = time.perf_counter(), 0.0
    for _ in range(steps):
        time.sleep(step_s)  # a device computes; this process is free to read ahead
        asked = time.perf_counter()
        if next(iterator, None) is None:
            break
        waited += time.perf_counter() - asked
    return waited / (time.perf_counter() - begun)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--quick", action="store_true", help="a small corpus; under 60 s on 2 cores")
    parser.add_argument("--tokenizer", metavar="FILE", help="a tokenizer.json or *.tiktoken")
    parser.add_argument("--json", metavar="FILE", help="write the rows there")
    arguments = parser.parse_args()
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        os.environ |= {
            "HF_HOME": name,
            "HF_HUB_OFFLINE": "1",
            "TOKENIZERS_PARALLELISM": "false",
            "OMP_NUM_THREADS": "1",
        }
        from comparison import print_rows, write_rows

        corpus = folder / "corpus.parquet"
        size = 8_000_000 if arguments.quick else 48_000_000
        write_corpus(corpus, size)
        tokenizer = arguments.tokenizer or str(folder / "tokenizer.json")
        if not arguments.tokenizer:
            train_tokenizer(folder / "tokenizer.json", corpus)
        repeats = 1 if arguments.quick else 3
        rows = prepare_rows(folder, corpus, size, tokenizer, repeats) + stream_rows(folder, repeats)
        rows += on_the_fly_rows(folder, corpus, tokenizer, repeats)
    print_rows(rows)
    write_rows(rows, arguments.json)


if __name__ == "__main__":
    sys.path[:0] = [str(ROOT), str(ROOT / "platform")]
    main()
