"""Does looping a linear mixer spike? Trains each at tiny size on CPU and counts (paper §3.5, fig. linear-stability).

    python scripts/stability.py            # about ten minutes on one core; --steps 60 for a look

Same data order, initial seed and schedule for every mixer: T = 4 loops over 2 layers of width 64, byte-level text of
Python's own standard library, AdamW, gradients clipped at 1, two learning rates. Writes a figure of the curves and a
JSON with the counts; with --storage every run also goes to that results store, for the dashboard. A spike is a step
whose loss, or gradient norm before clipping, leaves the running median (see `spikes`).
"""

from __future__ import annotations

import argparse
import json
import platform
import statistics
import sysconfig
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch

from lt2.config import ModelConfig
from lt2.model import build
from lt2.train.loop import Batch, NonFiniteLossError, TrainConfig, TrainState, train
from lt2.train.loss import next_token_objective
from lt2.train.optim import adamw
from lt2.train.schedules import learning_rate

ROOT = Path(__file__).parents[1]
MIXERS: dict[str, dict[str, Any]] = {
    "full": {},
    "la": {},
    "retnet": {},
    "mamba2": {"head_dim": 32},
    "gla": {},
    "hgrn2": {},
    "deltanet": {},
    "gdn": {},
    "kda": {},
}
SEQ_LEN, BATCH = 64, 8
WINDOW = 32  # steps of the running median


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--steps", type=int, default=200)
    parser.add_argument("--lr", type=float, nargs="+", default=[3e-3, 3e-2])
    parser.add_argument("--mixers", nargs="+", default=list(MIXERS), choices=list(MIXERS))
    parser.add_argument("--json", type=Path, default=ROOT / "benchmarks" / "results" / "stability.json")
    parser.add_argument("--figure", type=Path, default=ROOT / "docs" / "images" / "stability.png")
    parser.add_argument("--storage", help="a results store (folder or s3://…) that gets the runs as well")
    args = parser.parse_args()
    torch.set_num_threads(1)
    text = standard_library()
    runs = []
    for lr in args.lr:
        for mixer in args.mixers:
            run = train_one(mixer, text, lr=lr, steps=args.steps)
            runs.append(run)
            if args.storage:
                store(args.storage, run)
            print(
                f"lr {lr:<6g} {mixer:<9} loss {run['final_loss']:.3f}  grad norm median {run['median_grad_norm']:.2f} "
                f"max {run['max_grad_norm']:.1f}  spikes: loss {len(run['loss_spikes'])}, gradient "
                f"{len(run['grad_spikes'])}{'  DIVERGED' if run['diverged'] else ''}  ({run['seconds']:.0f} s)",
                flush=True,
            )
    machine = f"{platform.machine()} CPU, 1 thread, torch {torch.__version__}"
    write(args.json, {"machine": machine, "date": time.strftime("%Y-%m-%d"), "runs": runs})
    plot(runs, args.figure)


def standard_library() -> torch.Tensor:
    """The bytes of the standard library's top-level modules, in name order, as one int64 sequence."""
    files = sorted(Path(sysconfig.get_path("stdlib")).glob("*.py"))
    return torch.frombuffer(bytearray(b"\n".join(f.read_bytes() for f in files)), dtype=torch.uint8).long()


def batches(text: torch.Tensor, steps: int) -> Iterator[Batch]:
    """The same random windows for every run."""
    generator = torch.Generator().manual_seed(0)
    offsets = torch.arange(SEQ_LEN + 1)
    for _ in range(steps):
        starts = torch.randint(0, len(text) - SEQ_LEN, (BATCH, 1), generator=generator)
        yield Batch(text[starts + offsets])


def train_one(mixer: str, text: torch.Tensor, *, lr: float, steps: int) -> dict[str, Any]:
    """One run: its loss and gradient-norm curves, and what they say."""
    model = build(ModelConfig.model_validate(architecture(mixer)), seed=0)
    config = TrainConfig(steps=steps, global_batch_size=BATCH, lr=lr, warmup_steps=max(1, steps // 15), log_every=1)
    schedule = learning_rate(lr=lr, steps=steps, warmup_steps=config.warmup_steps, min_lr_ratio=config.min_lr_ratio)
    optimizer = adamw(model, lr=lr, betas=config.betas, weight_decay=config.weight_decay)
    curves = Curves()
    started, diverged = time.perf_counter(), False
    try:
        objective = next_token_objective()
        train(model, objective, batches(text, steps), optimizer, schedule, config, TrainState(), [curves])
    except NonFiniteLossError:
        diverged = True
    return {
        "mixer": mixer,
        "lr": lr,
        "steps": len(curves.loss),
        "diverged": diverged,
        "final_loss": round(statistics.fmean(curves.loss[-10:]), 4),
        "median_grad_norm": round(statistics.median(curves.grad_norm), 4),
        "max_grad_norm": round(max(curves.grad_norm[config.warmup_steps :], default=float("nan")), 4),
        "loss_spikes": spikes(curves.loss, above=0.5),
        "grad_spikes": spikes(curves.grad_norm, times=3.0),
        "seconds": round(time.perf_counter() - started, 1),
        "loss": [round(value, 4) for value in curves.loss],
        "grad_norm": [round(value, 4) for value in curves.grad_norm],
    }


def architecture(mixer: str) -> dict[str, Any]:
    layout = {"type": "uniform", "mixer": {"type": mixer, **MIXERS[mixer]}}
    sizes = {"vocab_size": 256, "dim": 64, "n_layers": 2, "n_loops": 4, "num_heads": 4, "max_seq_len": SEQ_LEN}
    return {**sizes, "layout": layout}


def store(root: str, run: dict[str, Any]) -> None:
    """One run of a results store with its loss and gradient norm of every step."""
    from lt2_platform.results.store import ResultsStore
    from lt2_platform.storage import Storage

    config = {"model": architecture(run["mixer"]), "train": {"lr": run["lr"], "steps": run["steps"]}}
    name = f"stability-{run['mixer']}-{run['lr']:g}-{run['steps']}"
    with ResultsStore(Storage(root)).create_run(name, {"config": config}) as writer:
        for step, (loss, norm) in enumerate(zip(run["loss"], run["grad_norm"]), start=1):
            writer.log(step, {"loss": loss, "grad_norm": norm})
        writer.close(state="failed" if run["diverged"] else "finished")


class Curves:
    """A training callback that keeps loss and gradient norm (before clipping) of every step."""

    def __init__(self) -> None:
        self.loss: list[float] = []
        self.grad_norm: list[float] = []

    def on_step(self, state: TrainState, metrics: dict[str, float]) -> None:
        self.loss.append(metrics["loss"])
        self.grad_norm.append(metrics["grad_norm"])


def spikes(curve: list[float], *, above: float = 0.0, times: float = 1.0) -> list[int]:
    """Steps above times·m + above, m the median of the WINDOW steps before; the first WINDOW steps are exempt."""
    return [
        step
        for step in range(WINDOW, len(curve))
        if curve[step] > times * statistics.median(curve[step - WINDOW : step]) + above
    ]


def write(path: Path, result: dict[str, Any]) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(json.dumps(result) + "\n")


def plot(runs: list[dict[str, Any]], path: Path) -> None:
    """Loss (top) and gradient norm (bottom), one column per learning rate."""
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    rates = list(dict.fromkeys(run["lr"] for run in runs))
    figure, axes = pyplot.subplots(2, len(rates), figsize=(6 * len(rates), 7), squeeze=False, sharex=True)
    colors = {mixer: f"C{index}" for index, mixer in enumerate(MIXERS)}
    for run in runs:
        column = rates.index(run["lr"])
        label = f"{run['mixer']} ({len(run['loss_spikes'])}/{len(run['grad_spikes'])})"
        axes[0, column].plot(run["loss"], color=colors[run["mixer"]], linewidth=0.9, label=label)
        axes[1, column].semilogy(run["grad_norm"], color=colors[run["mixer"]], linewidth=0.7)
    for column, lr in enumerate(rates):
        axes[0, column].set(title=f"T = 4 loops, lr {lr:g}", ylabel="loss", ylim=(1.0, 6.0))
        axes[0, column].legend(title="spikes (loss/gradient)", fontsize=8, title_fontsize=8, ncol=2)
        axes[1, column].set(xlabel="step", ylabel="gradient norm before clipping")
    figure.tight_layout()
    path.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(path, dpi=110)


if __name__ == "__main__":
    main()
