"""Make a large results store: `python benchmarks/generate_store.py ROOT [--runs 10000] [--steps 100000]`.

Every run has settings, last values, an evaluation and curves downsampled from `steps` real rows per metric. The rows
of DISTINCT runs are computed; the other runs link to their files (hard links), since 10^9 rows would take hours and a
reader cannot tell. The first run also has its raw parts, and one run is written through the store's own writer.
"""

from __future__ import annotations

import argparse
import os
import time
from pathlib import Path

import numpy as np
import pyarrow as pa

from lt2_platform.results.curves import ROWS, downsample, encode
from lt2_platform.results.index import publish
from lt2_platform.results.parts import part_name
from lt2_platform.results.store import ResultsStore
from lt2_platform.results.tables import RunInfo, tables
from lt2_platform.storage import Storage

DISTINCT = 50
PARTS = 10
METRICS = ("loss", "grad_norm", "lr", "tokens_per_s")
DAY = 86_400.0


def rows(steps: int, seed: int, start: float) -> pa.Table:
    """`steps` rows of each metric, as a run would have logged them."""
    rng = np.random.default_rng(seed)
    step = np.arange(steps)
    loss = 2.5 + 0.2 * rng.random() + 8 * np.exp(-step / (0.02 * steps)) + 0.05 * rng.standard_normal(steps)
    values = {
        "loss": loss,
        "grad_norm": 0.3 + np.abs(0.1 * rng.standard_normal(steps)),
        "lr": 3e-4 * 0.5 * (1 + np.cos(np.pi * step / steps)),
        "tokens_per_s": 180_000 + 2_000 * rng.standard_normal(steps),
    }
    tables = [
        pa.table({"step": step, "time": start + 0.5 * step, "metric": [name] * steps, "value": value}, schema=ROWS)
        for name, value in values.items()
    ]
    return pa.concat_tables(tables)


def run_info(number: int, steps: int, now: float) -> RunInfo:
    """A finished run of a sweep over learning rate, layout and seed."""
    rng = np.random.default_rng(number)
    ratio = f"1:{2 ** int(rng.integers(0, 4))}"
    layout = {"type": "hybrid", "attention": {"type": "full"}, "mixer": {"type": "gdn"}, "ratio": ratio}
    model = {"dim": 1024, "n_layers": 24, "n_loops": 4, "num_heads": 16, "vocab_size": 128_256, "layout": layout}
    model |= {f"option_{index}": index for index in range(15)}
    train = {"lr": round(10 ** rng.uniform(-4, -3), 6), "seed": number, "steps": steps, "global_batch_size": 256}
    train |= {f"option_{index}": index for index in range(10)}
    start = now - DAY * 365 * rng.random()
    last = {name: (steps - 1, float(rng.random())) for name in METRICS}
    config = {"model": model, "train": train}
    return RunInfo(
        f"run-{number:06d}", start, start + steps / 2, "finished", steps - 1, config, {"git": "0" * 40}, last
    )


def generate(root: str, runs: int, steps: int) -> None:
    """Fill an empty local folder."""
    storage, now = Storage(root), time.time()
    files = [
        encode(downsample(rows(steps, seed, now)), {"covered": {"0001-a": PARTS - 1}, "problems": []})
        for seed in range(min(DISTINCT, runs))
    ]
    infos = {info.run_id: info for info in (run_info(number, steps, now) for number in range(runs))}
    for number, run_id in enumerate(infos):
        target = Path(storage.join(f"runs/{run_id}/curves.parquet"))
        target.parent.mkdir(parents=True)
        first = Path(storage.join(f"runs/run-{number % DISTINCT:06d}/curves.parquet"))
        if number < DISTINCT:
            target.write_bytes(files[number])
        else:
            os.link(first, target)
    evals = [(run_id, "perplexity", {"task": "validation", "metric": "ppl", "value": 12.0}) for run_id in infos]
    publish(storage, tables(infos.values(), evals), 1, [])
    _write_parts(storage, "run-000000", rows(steps, 0, now))
    with ResultsStore(storage).create_run("written", {"config": infos["run-000000"].config}) as writer:
        for step in range(0, steps, max(1, steps // 20_000)):
            writer.log(step, {"loss": 2.0 + 8.0 / (1 + step / 500)})


def _write_parts(storage: Storage, run_id: str, table: pa.Table) -> None:
    """The rows in PARTS files, in the order of steps, as a run of PARTS minutes leaves them."""
    table = table.sort_by("step")
    size = -(-table.num_rows // PARTS)
    for number in range(PARTS):
        data = encode(table.slice(number * size, size))
        storage.write_bytes(f"runs/{run_id}/metrics/{part_name('0001-a', number)}", data)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("root")
    parser.add_argument("--runs", type=int, default=10_000)
    parser.add_argument("--steps", type=int, default=100_000)
    given = parser.parse_args()
    generate(given.root, given.runs, given.steps)


if __name__ == "__main__":
    main()
