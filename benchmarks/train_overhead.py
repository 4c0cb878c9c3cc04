"""Step time of the Ray Train path beside torchrun on the same loop, and of that loop beside a plain PyTorch one.

python benchmarks/train_overhead.py [--quick] [--json FILE]. Both sides run lt2_platform.train.worker.run on the same
data and config, and are alive at the same time; a file says whose turn it is, so that whatever else the machine does
falls on both. The first step of a turn is not counted. Ray's workers run at the same niceness as torchrun's here (Ray's
own default of 15 makes them yield to anything else on the machine, which would be measured instead). On a busy machine
read the CPU time: Linux divides the cores among sessions, and the two sides do not have the same ones.

The plain loop is what one would write for the same model in one process (forward, cross entropy over all logits,
backward, clip_grad_norm_, AdamW), on the same batches, in turns with lt2.train.loop.train.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parent.parent
WORKERS, TURN = 2, 8
SIDES = ("ray", "torchrun")


@dataclass
class Turns:
    """Callback: times every step, and hands over to the other side after TURN of them."""

    side: str
    folder: Path
    steps: int
    rank: int
    times: list[tuple[float, float]] = field(default_factory=list)
    begun: tuple[float, float] | None = None

    def on_step(self, state: Any, metrics: dict[str, float]) -> None:
        now = _clocks()
        if self.begun is not None:
            self.times.append((now[0] - self.begun[0], now[1] - self.begun[1]))
        self.begun = _clocks()
        if state.step % TURN == 0:
            self.begun = None  # the first step of a turn has cold caches
            if self.rank == 0:
                self.yield_turn(first=state.step == TURN)

    def on_end(self, state: Any) -> None:
        if self.rank == 0:
            _replace(self.folder / f"{self.side}.json", json.dumps(self.times))

    def yield_turn(self, *, first: bool) -> None:
        other = SIDES[1 - SIDES.index(self.side)]
        turn, done = self.folder / "turn", self.folder / f"{other}.json"
        if first:  # the first turn is warm-up, both at once; then wait until the other side has had its own
            (self.folder / f"{self.side}.ready").touch()
            _wait(lambda: (self.folder / f"{other}.ready").exists())
        else:
            _replace(turn, other)
        _wait(lambda: turn.read_text() == self.side or done.exists())


def _clocks() -> tuple[float, float]:
    """Seconds of wall time and of CPU time of all threads of this process."""
    return time.perf_counter(), time.process_time()


def _wait(condition: Callable[[], bool], timeout_s: float = 120) -> None:
    deadline = time.monotonic() + timeout_s
    while not condition():
        if time.monotonic() > deadline:
            raise TimeoutError(f"the other side did not take its turn within {timeout_s:g} s")
        time.sleep(0.002)


def _replace(path: Path, text: str) -> None:
    temporary = path.with_suffix(".new")
    temporary.write_text(text)
    temporary.replace(path)


def work(job: dict[str, Any]) -> dict[str, Any]:
    """What every worker of both sides runs."""
    import torch.distributed as dist

    from lt2_platform.train import worker

    spec = worker.WorkerSpec(**job["spec"])
    turns = Turns(job["side"], Path(job["folder"]), spec.train["steps"], dist.get_rank())
    report = None
    if job["side"] == "ray":
        from lt2_platform.train.on_ray.trainer import report_to_ray as report
    return worker.run(spec, report=report, callbacks=[turns])


def torchrun_main(path: str) -> None:
    import torch.distributed as dist

    dist.init_process_group("gloo")
    work(json.loads(Path(path).read_text()))
    dist.destroy_process_group()


def measure(folder: Path, steps: int, dim: int) -> dict[str, list[tuple[float, float]]]:
    """(wall, CPU) seconds of rank 0 in every counted step of each side."""
    import ray
    from ray.train import RunConfig, ScalingConfig
    from ray.train.torch import TorchTrainer

    from lt2_platform.data.prepare import PrepareConfig, prepare
    from lt2_platform.train.config import PretrainConfig, Workers
    from lt2_platform.train.run_folder import open_run

    os.environ["OMP_NUM_THREADS"] = "1"
    os.environ["PYTHONPATH"] = os.pathsep.join([str(ROOT), str(ROOT / "platform"), str(ROOT / "benchmarks")])
    ray.init(
        address="local",
        num_cpus=2,
        include_dashboard=False,
        log_to_driver=False,
        _system_config={"worker_niceness": 0},
    )
    data = str(folder / "data")
    prepare(PrepareConfig(source=str(ROOT / "lt2"), tokenizer="byte", seq_len=256), data, parallelism=1)
    train = {"steps": steps, "global_batch_size": 8, "log_every": 1, "checkpoint_every": steps // 4}
    config = PretrainConfig.model_validate({"model": model_fields(dim), "train": train})
    jobs = {}
    for side in SIDES:
        where: dict[str, Any] = {"data": data, "out": str(folder / side), "run_id": side, "storage_root": str(folder)}
        spec = open_run(config, **where, workers=Workers(num_workers=WORKERS))
        jobs[side] = {"spec": asdict(spec), "side": side, "folder": str(folder)}

    (folder / "turn").write_text(SIDES[0])
    (folder / "job.json").write_text(json.dumps(jobs["torchrun"]))
    torchrun = [sys.executable, "-m", "torch.distributed.run", "--standalone", f"--nproc-per-node={WORKERS}"]
    command = [*torchrun, __file__, "--worker", str(folder / "job.json")]
    peer = subprocess.Popen(command)
    try:
        scaling = ScalingConfig(num_workers=WORKERS, resources_per_worker={"CPU": 0.5})
        run_config = RunConfig(name="overhead", storage_path=str(folder / "ray-state"))
        TorchTrainer(work, train_loop_config=jobs["ray"], scaling_config=scaling, run_config=run_config).fit()
        assert peer.wait(60) == 0, "the torchrun side failed"
    finally:
        peer.kill()
        ray.shutdown()
    return {side: json.loads((folder / f"{side}.json").read_text()) for side in SIDES}


def measure_plain(steps: int, dim: int) -> dict[str, list[tuple[float, float]]]:
    """(wall, CPU) seconds per step, averaged over each turn of TURN steps, of both loops in this process."""
    import torch
    from torch.nn import functional as F

    from lt2.config import ModelConfig
    from lt2.model import build
    from lt2.train.loop import Batch, TrainConfig, TrainState, train
    from lt2.train.loss import next_token_objective
    from lt2.train.optim import adamw

    torch.set_num_threads(1)
    config = ModelConfig.model_validate({"vocab_size": 259, **model_fields(dim)})
    generator = torch.Generator().manual_seed(0)
    batches = [torch.randint(0, 259, (8, 257), generator=generator) for _ in range(TURN)]
    ours, peer = build(config), build(config)
    optimizer, peer_optimizer = adamw(ours, lr=1e-4), torch.optim.AdamW(peer.parameters(), lr=1e-4, weight_decay=0.1)
    state, objective = TrainState(), next_token_objective()

    def our_turn() -> None:
        limited = TrainConfig(steps=state.step + TURN, global_batch_size=8)
        train(
            ours, objective, iter([Batch(tokens) for tokens in batches]), optimizer, lambda step: 1e-4, limited, state
        )

    def plain_turn() -> None:
        for tokens in batches:
            logits = peer.logits(peer(tokens[:, :-1]).hidden)
            F.cross_entropy(logits.flatten(0, 1), tokens[:, 1:].flatten()).backward()
            torch.nn.utils.clip_grad_norm_(peer.parameters(), 1.0)
            peer_optimizer.step()
            peer_optimizer.zero_grad()

    times: dict[str, list[tuple[float, float]]] = {"lt2": [], "plain loop": []}
    for turn in range(1 + steps // TURN):
        for side, run in (("lt2", our_turn), ("plain loop", plain_turn)):
            begun = _clocks()
            run()
            if turn:  # the first is warm-up
                times[side].append(tuple((now - then) / TURN for now, then in zip(_clocks(), begun)))  # type: ignore[arg-type]
    return times


def model_fields(dim: int) -> dict[str, Any]:
    layout = {"type": "hybrid", "attention": {"type": "full"}, "mixer": {"type": "gdn"}, "ratio": "1:1"}
    return {"dim": dim, "n_layers": 2, "n_loops": 4, "num_heads": 4, "layout": layout}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--quick", action="store_true", help="small model, few steps; under 60 s on 2 cores")
    parser.add_argument("--json", metavar="FILE", help="write the rows there")
    parser.add_argument("--worker", metavar="JOB", help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    if arguments.worker:
        torchrun_main(arguments.worker)
        return
    from comparison import print_rows, row, write_rows

    rows = []
    for dim, steps in [(64, 64)] if arguments.quick else [(64, 160), (256, 56)]:
        with tempfile.TemporaryDirectory() as folder:
            times = measure(Path(folder), steps, dim)
        size = f"d={dim} N=2 T=4 L=256 B=8"
        for clock, name in enumerate(("train step, 2 workers", "train step, CPU time of rank 0")):
            ours, peer = (1e3 * statistics.median(t[clock] for t in times[side][TURN - 1 :]) for side in SIDES)
            rows.append(row(name, size, ours, "torchrun", peer, "ms"))
            print(f"{size}: {name}: overhead {100 * (ours / peer - 1):+.1f} % over {len(times['ray'])} steps")
        plain = measure_plain(steps, dim)
        for clock, name in enumerate(("train step, 1 process", "train step, 1 process, CPU time")):
            ours, peer = (1e3 * statistics.median(t[clock] for t in plain[side]) for side in plain)
            rows.append(row(name, size, ours, "plain loop", peer, "ms"))
            print(f"{size}: {name}: lt2.train.loop.train {100 * (ours / peer - 1):+.1f} % beside a plain loop")
        write_rows(rows, arguments.json)  # a size takes minutes; what is measured is kept
    print_rows(rows)


if __name__ == "__main__":
    sys.path[:0] = [str(ROOT), str(ROOT / "platform")]
    main()
