"""Prepare and stream a large synthetic corpus under a fixed memory limit, and say how much memory it took.

python scripts/data_memory.py [--gigabytes 2] [--limit-mb 1024] [--folder DIR]. Writes the corpus (jsonl.zst, parquet
and text, a third each), prepares it in one process whose peak resident memory is watched, streams a part of the result,
and exits with 1 if the peak passed the limit. Needs about five times the corpus on disk in DIR. Not part of the tests:
at 2 GB it runs for several minutes.
"""

from __future__ import annotations

import argparse
import json
import os
import random
import resource
import sys
import tempfile
import time
from collections.abc import Iterator
from contextlib import nullcontext
from itertools import islice
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
BLOCK = 2**20


def text_blocks(size: int) -> Iterator[str]:
    """About `size` characters in blocks of 1 MiB of made-up words; a block is a large document."""
    rng = random.Random(0)
    words = ["".join(rng.choices("abcdefghijklmnopqrstuvwxyz", k=rng.randint(2, 9))) for _ in range(5_000)]
    for index in range(max(1, size // BLOCK)):
        block = " ".join(rng.choices(words, k=BLOCK // 60)) + "\n\n"
        yield (f"block {index}\n" + block * (BLOCK // len(block) + 1))[:BLOCK]


def write_corpus(folder: Path, size: int) -> int:
    """One file per format, each of one third of `size`; returns the bytes of text."""
    import pyarrow as pa
    import pyarrow.parquet as pq
    import zstandard

    third = size // 3
    with zstandard.open(folder / "a.jsonl.zst", "wb") as file:
        for block in text_blocks(third):
            for at in range(0, BLOCK, 4096):
                file.write(json.dumps({"text": block[at : at + 4096]}).encode() + b"\n")
    with pq.ParquetWriter(folder / "b.parquet", pa.schema([("text", pa.string())]), compression="zstd") as writer:
        blocks = text_blocks(third)
        while group := list(islice(blocks, 128)):  # row groups of 128 MB, as some data sets have them
            pieces = [block[at : at + 4096] for block in group for at in range(0, BLOCK, 4096)]
            writer.write_table(pa.table({"text": pieces}), row_group_size=len(pieces))
    with open(folder / "c.txt", "w") as file:
        for block in text_blocks(third):
            file.write(block)
    return 3 * max(1, third // BLOCK) * BLOCK


def peak_mb() -> float:
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--gigabytes", type=float, default=2.0)
    parser.add_argument("--limit-mb", type=float, default=1024)
    parser.add_argument("--folder", metavar="DIR", help="where to put the corpus; default: a temporary folder")
    arguments = parser.parse_args()
    with tempfile.TemporaryDirectory(dir=arguments.folder) as name:
        child = os.fork()  # the corpus is written by another process: its memory is not what is measured
        if not child:
            (Path(name) / "in").mkdir()
            write_corpus(Path(name) / "in", int(arguments.gigabytes * 1e9))
            os._exit(0)
        assert os.waitpid(child, 0)[1] == 0, "the corpus could not be written"
        peak = measure(Path(name))
    print(f"peak resident memory {peak:,.0f} MB, limit {arguments.limit_mb:,.0f} MB")
    sys.exit(peak > arguments.limit_mb)


def measure(folder: Path) -> float:
    """Peak resident MB of this process over preparing folder/in and reading 2,000 batches of the result."""
    from lt2_platform.data import prepare as module
    from lt2_platform.data.prepare import PrepareConfig, prepare
    from lt2_platform.data.stream import PackedDataset

    # Tasks one after another in this process, so that it is their memory that is watched.
    module.some_ray = lambda parallelism: nullcontext()
    module.spread = lambda function, items, shared, limit: (function(item, shared) for item in items)
    before, begun = peak_mb(), time.perf_counter()
    manifest = prepare(PrepareConfig(source=f"{folder}/in", seq_len=2048), f"{folder}/out")
    prepared = peak_mb()
    tokens = manifest["splits"]["train"]["tokens"]
    print(f"imported: {before:,.0f} MB")
    print(f"prepared {tokens:,} tokens in {time.perf_counter() - begun:.0f} s: {prepared:,.0f} MB", flush=True)
    dataset = PackedDataset(f"{folder}/out")
    batches = islice(dataset.batches(position=0, global_batch_size=8), 2000)
    read = sum(batch["tokens"].size for batch in batches)
    print(f"streamed {read:,} tokens: {peak_mb():,.0f} MB")
    return peak_mb()


if __name__ == "__main__":
    sys.path[:0] = [str(ROOT), str(ROOT / "platform")]
    main()
