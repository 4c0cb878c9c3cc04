"""What a pool of 10³ GPUs and 10⁴ runs asks of the object store, from constants measured here; writes docs/scale.md.

python scripts/scale_model.py            measure, model, rewrite the page
python scripts/scale_model.py --print    to the terminal instead

Requests are counted at the S3 client while the platform's own code runs against a moto server on loopback: a lease
and its heartbeats, a run's metrics, a checkpoint. Nothing is timed against moto: bandwidths and limits of a real store
are inputs, named below.
"""

from __future__ import annotations

import argparse
import os
import subprocess
import sys
import time
import urllib.request
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import s3fs
import torch
from aiobotocore.client import AioBaseClient

from lt2.analysis.accounting import PEAK_FLOPS, parameters, training_flops
from lt2.config import ModelConfig
from lt2.model import build
from lt2.train.loop import TrainState
from lt2.train.optim import adamw
from lt2_platform.fence import FENCE
from lt2_platform.results.store import ResultsStore
from lt2_platform.results.writer import FLUSH_SECONDS
from lt2_platform.storage import Storage
from lt2_platform.train.checkpoints import checkpoint
from lt2_workflows.engine.executor import TTL_S
from lt2_workflows.engine.records import Lease
from lt2_workflows.recipes.models import Scale, paper_model

PAGE = Path(__file__).resolve().parent.parent / "docs" / "scale.md"
BUCKET = "scale"
READS = {"GetObject", "HeadObject", "ListObjectsV2", "HeadBucket"}

# Inputs, not measured here. S3: published limits per key prefix. The rest: a usual H100 node and a careful guess.
PUT_LIMIT, GET_LIMIT = 3500, 5500  # requests/s and prefix
NODE_BANDWIDTH = 5e9  # bytes/s to and from the store, one node of 8 cards
STORE_BANDWIDTH = 100e9  # bytes/s, all nodes together
MFU = 0.4
GPUS, RUNS, NODE = 1000, 10_000, 8
CHECKPOINT_MINUTES = 30.0
BYTES_PER_TOKEN = 4  # packed shards hold int32 ids, compressed: this is the most they can take
BYTES_PER_PARAMETER = 12  # fp32 weights and two fp32 moments


@dataclass(frozen=True)
class Constants:
    """Requests (reads, writes) that one event costs."""

    beat: tuple[int, int]
    claim: tuple[int, int]
    flush: tuple[int, int]
    open_run: tuple[int, int]
    close_run: tuple[int, int]
    checkpoint: tuple[int, int]


class Requests:
    """Counts the calls of every S3 client in this process."""

    def __init__(self) -> None:
        self.calls: Counter[str] = Counter()
        calls, plain = self.calls, AioBaseClient._make_api_call

        async def counted(self: AioBaseClient, operation_name: str, api_params: object) -> object:
            calls[operation_name] += 1
            return await plain(self, operation_name, api_params)

        AioBaseClient._make_api_call = counted

    def of(self, work: Callable[[], object]) -> tuple[int, int]:
        """(reads, writes) that `work` costs."""
        before = self.calls.copy()
        work()
        made = self.calls - before
        reads = sum(count for name, count in made.items() if name in READS)
        return reads, made.total() - reads


def measure(requests: Requests) -> Constants:
    storage = Storage(f"s3://{BUCKET}/store")
    lease = Lease(storage, "steps/pretrain-00000000", 1, ttl_s=0.6, on_lost=sys.exit)
    claim = requests.of(lease.acquire)
    os.environ[FENCE] = storage.join(lease.fence)  # as in an attempt: what is written from here on looks for it
    beats = requests.of(lambda: time.sleep(1.05))
    claim = _plus(claim, requests.of(lambda: (lease.stop(), lease.release())))
    n_beats = lease.holder["beat"]

    store = ResultsStore(storage)
    metrics = {f"metric{i}": float(i) for i in range(12)}
    opened = []
    open_run = requests.of(lambda: opened.append(store.create_run("run-0", {"config": {"lr": 3e-4}})))
    (writer,) = opened
    writer.log(1, metrics)
    flush = requests.of(writer.flush)
    close_run = requests.of(lambda: writer.close({"loss": 1.0}))

    sizes = {"vocab_size": 64, "dim": 32, "n_layers": 2, "n_loops": 2, "num_heads": 2}
    config = ModelConfig.model_validate(sizes | {"layout": {"type": "uniform", "mixer": {"type": "gdn"}}})
    model = build(config)
    optimizer = adamw(model, lr=1e-3)
    model(torch.zeros(1, 4, dtype=torch.int64)).hidden.sum().backward()
    optimizer.step()
    folder = storage.join("steps/pretrain-00000000/out/checkpoints")
    tokenizer = {"name": "byte", "sha256": "0" * 64, "vocab_size": 64, "bos_id": 1, "eos_id": 2, "file": None}

    def save(step: int) -> None:
        checkpoint.save(folder, model, optimizer, TrainState(step=step), checkpoint.About(config, tokenizer))

    save(1)
    save(2)
    saved = requests.of(lambda: save(3))  # with the pruning of an old one, as in a long run
    per_beat = tuple(round(count / n_beats) for count in beats)
    return Constants((per_beat[0], per_beat[1]), claim, flush, open_run, close_run, saved)


def _plus(a: tuple[int, int], b: tuple[int, int]) -> tuple[int, int]:
    return a[0] + b[0], a[1] + b[1]


def pretraining(scale: Scale, cards: int) -> dict[str, float]:
    """A full-size run of Full + GDN on `cards` H100s at an assumed MFU."""
    config = paper_model("full+gdn", scale)
    size = parameters(config).total
    tokens_per_s = cards * MFU * PEAK_FLOPS["H100"] / training_flops(config, 4096)
    checkpoint_bytes = size * BYTES_PER_PARAMETER
    nodes = max(1, cards // NODE)
    return {
        "tokens_per_s": tokens_per_s,
        "hours": 255_000 * 96 * 4096 / tokens_per_s / 3600,
        "data_mb_per_s": tokens_per_s * BYTES_PER_TOKEN / 1e6,
        "checkpoint_gb": checkpoint_bytes / 1e9,
        "upload_s": checkpoint_bytes / min(nodes * NODE_BANDWIDTH, STORE_BANDWIDTH),
        "checkpoint_gb_per_s": checkpoint_bytes / 1e9 / (CHECKPOINT_MINUTES * 60),
        "objects": cards + 5.0,
    }


def traffic(constants: Constants, steps: int, runs: int) -> tuple[float, float]:
    """(reads/s, writes/s) of so many running steps and runs: heartbeats every TTL/6, metrics every minute."""
    beats, flushes = steps / (TTL_S / 6), runs / FLUSH_SECONDS
    reads = beats * constants.beat[0] + flushes * constants.flush[0]
    return reads, beats * constants.beat[1] + flushes * constants.flush[1]


def page(c: Constants) -> str:
    def cost(pair: tuple[int, int]) -> str:
        return f"{pair[0]} reads, {pair[1]} writes"

    rates = []
    for alive in (GPUS // 64, GPUS // NODE, GPUS):
        reads, writes = traffic(c, alive, alive)
        rates.append(f"| {alive} | {reads:.0f} | {writes:.0f} | {max(reads / GET_LIMIT, writes / PUT_LIMIT):.1%} |")
    runs = []
    sizes: list[tuple[Scale, int]] = [("0.6b", 8), ("0.6b", 64), ("1.3b", 64), ("1.3b", 256), ("1.3b", GPUS)]
    for scale, cards in sizes:
        m = pretraining(scale, cards)
        runs.append(
            f"| {scale} | {cards} | {m['tokens_per_s']:,.0f} | {m['hours']:,.0f} | {m['data_mb_per_s']:.1f} | "
            f"{m['checkpoint_gb']:.1f} | {m['upload_s']:.1f} | {m['checkpoint_gb_per_s']:.3f} | {m['objects']:.0f} |"
        )
    fixed = sum(sum(pair) for pair in (c.claim, c.open_run, c.close_run))
    small, nodes = pretraining("0.6b", NODE), GPUS // NODE
    saving, reading = nodes * small["checkpoint_gb_per_s"], nodes * small["data_mb_per_s"] / 1e3
    return f"""# At a thousand GPUs and ten thousand runs

Generated by `python scripts/scale_model.py`; do not edit. Request counts are measured with the platform's own code
against an S3 server. Bandwidths, limits and MFU are assumptions, named where they enter. No cluster of this
size was used.

## Measured

| event | S3 requests |
|---|---|
| a step's lease, claimed and released | {cost(c.claim)} |
| one heartbeat (every {TTL_S / 6:.0f} s; one more write when the log grew) | {cost(c.beat)} |
| a run opened | {cost(c.open_run)} |
| metrics flushed (every {FLUSH_SECONDS:.0f} s) | {cost(c.flush)} |
| a run closed | {cost(c.close_run)} |
| a checkpoint of one rank, and an old one pruned | {cost(c.checkpoint)} |

## Metadata

{GPUS:,} GPUs running one-GPU trials as steps of their own keep {GPUS:,} steps and runs alive at once, the worst case.

| alive at once | reads/s | writes/s | share of one prefix's limit |
|---|---|---|---|
{chr(10).join(rates)}

A run's fixed cost is {fixed} requests: {RUNS:,} runs cost {RUNS * fixed / 1e6:.2f} M, spread over their days.
Limits assumed: {PUT_LIMIT:,} writes/s and {GET_LIMIT:,} reads/s per prefix (S3's published figures). The steps of a
sweep's running trials beat like any others, those that wait or have ended not at all. The dashboard
reads the manifest and the journals of live runs, never every run;
`benchmarks/dashboard.py` measures it at {RUNS:,} runs.

## Checkpoints and data

Full + GDN on H100s at {MFU:.0%} MFU, 255k steps × 96 × 4096, a checkpoint every {CHECKPOINT_MINUTES:.0f} minutes,
{BYTES_PER_PARAMETER} bytes a parameter, {BYTES_PER_TOKEN} bytes a token, {NODE_BANDWIDTH / 1e9:.0f} GB/s a node and \
{STORE_BANDWIDTH / 1e9:.0f} GB/s for the store (all assumed).

| model | cards | tokens/s | hours | data MB/s | checkpoint GB | seconds to upload | mean GB/s | objects |
|---|---|---|---|---|---|---|---|---|
{chr(10).join(runs)}

The heaviest use of the pool is {nodes} separate 0.6B runs of one node each: {saving:.2f} GB/s of checkpoints and \
{reading:.2f} GB/s of data
on average, {(saving + reading) * 1e11 / STORE_BANDWIDTH:.1f} % of the store; all saving in the same minute take \
{nodes * small["checkpoint_gb"] * 1e9 / STORE_BANDWIDTH:.0f} s. Keeping the last two checkpoints of
each holds {nodes * 2 * small["checkpoint_gb"] / 1e3:.1f} TB. So neither metadata nor data is near a limit; \
retention is what to watch.
"""


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--print", action="store_true", help="print the page instead of writing docs/scale.md")
    options = parser.parse_args()
    port = "5599"
    server = subprocess.Popen(
        [sys.executable, "-m", "moto.server", "-p", port], stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL
    )
    os.environ |= {
        "AWS_ENDPOINT_URL": f"http://127.0.0.1:{port}", "AWS_ACCESS_KEY_ID": "x", "AWS_SECRET_ACCESS_KEY": "x"
    }  # fmt: skip
    try:
        for _ in range(200):
            try:
                urllib.request.urlopen(os.environ["AWS_ENDPOINT_URL"], timeout=1).close()
                break
            except OSError:
                time.sleep(0.1)
        s3fs.S3FileSystem(endpoint_url=os.environ["AWS_ENDPOINT_URL"]).mkdir(BUCKET)
        text = page(measure(Requests()))
    finally:
        server.terminate()
    if options.print:
        print(text)
    else:
        PAGE.write_text(text)


if __name__ == "__main__":
    main()
