"""Minutes of learning, T = 1 and 4, by layout: small byte-level models on the standard library's own source, and
state-based recall. The models learn side by side, each in a process of its own: alone, none keeps a card busy.

All stop when the time is up. Compare `held_out_loss` at equal `steps`; the speed of models side by side says nothing.
"""

from __future__ import annotations

import itertools
import multiprocessing
import sysconfig
import time
from collections.abc import Iterator
from concurrent.futures import ProcessPoolExecutor, as_completed
from pathlib import Path
from typing import Any

import torch

from benchmarks.gpu.device import device
from benchmarks.gpu.models import FULL, GDN, hybrid, model_config, uniform
from lt2.config import ModelConfig
from lt2.model import build
from lt2.train.loop import Batch, TrainConfig, TrainState, train
from lt2.train.loss import next_token_objective
from lt2.train.optim import adamw
from lt2.train.schedules import learning_rate
from lt2_platform.evaluate import state_recall_programs as recall
from lt2_platform.evaluate.config import StateRecallConfig

STEPS, EVERY = 1000, 100
TRACKING = {**GDN, "allow_neg_eigval": True}
RECALL_LAYOUTS = {"full": uniform(FULL), "gdn": uniform(TRACKING), "full+gdn": hybrid(FULL, TRACKING, "1:1")}
# What learns in minutes on two cores (LOG.md, "state-based recall").
RECALL: dict[str, Any] = {
    "n_layers": 2, "dim": 64, "num_heads": 2, "stages": (8, 16, 32, 64), "opening": tuple((5, n) for n in (1, 2, 3, 5)),
    "max_steps": 6000, "eval_every": 250, "batch_size": 16, "lr": 3e-3, "warmup_steps": 50, "rope_theta": 100.0,
}  # fmt: skip


def corpus() -> torch.Tensor:
    """Bytes of the standard library's modules, in name order."""
    files = sorted(Path(sysconfig.get_path("stdlib")).glob("*.py"))
    return torch.frombuffer(bytearray(b"\0".join(f.read_bytes() for f in files)), dtype=torch.uint8).long()


def windows(data: torch.Tensor, batch: int, length: int, seed: int) -> Iterator[Batch]:
    generator = torch.Generator().manual_seed(seed)
    while True:
        start = torch.randint(len(data) - length - 1, (batch,), generator=generator)
        yield Batch(tokens=torch.stack([data[s : s + length + 1] for s in start.tolist()]))


@torch.no_grad()
def held_out_loss(model: torch.nn.Module, data: torch.Tensor, length: int, batches: int) -> float:
    objective = next_token_objective()
    total = count = 0.0
    for _, batch in zip(range(batches), windows(data, 16, length, seed=7)):
        with torch.autocast(device().type, torch.bfloat16, enabled=device().type == "cuda"):
            loss, n_tokens, _ = objective(model, batch.to(device()))
        total, count = total + float(loss), count + float(n_tokens)
    return total / count


def language(name: str, n_loops: int, until: float, dry_run: bool) -> dict[str, Any]:
    """Held-out loss in nats per byte, every 100 steps and where the time ended (`until`, of time.time())."""
    data = corpus()
    split = int(len(data) * 0.95)
    steps, every, length, batch = (4, 2, 32, 2) if dry_run else (STEPS, EVERY, 512, 32)
    base = model_config(name, "tiny", n_layers=5, n_loops=n_loops)
    config = ModelConfig.model_validate(base.model_dump() | {"vocab_size": 256, "dim": 64 if dry_run else 512})
    model = build(config, device=device())
    optimizer = adamw(model, lr=1e-3)
    batches = windows(data[:split], batch, length, seed=1)
    schedule = learning_rate(lr=1e-3, steps=steps, warmup_steps=1 if dry_run else 30)
    state, curve = TrainState(), {}
    while state.step < steps and (not curve or time.time() < until):
        settings = TrainConfig(steps=state.step + every, global_batch_size=batch, lr=1e-3, log_every=every)
        state = train(model, next_token_objective(), batches, optimizer, schedule, settings, state)
        curve[state.step] = round(held_out_loss(model, data[split:], length, 2 if dry_run else 20), 4)
    return {"steps": state.step, "held_out_loss": curve[state.step], "curve": curve}


def state_recall(name: str, n_loops: int, until: float, dry_run: bool) -> dict[str, Any]:
    """How far along the curriculum the model came: the size it was at, and its accuracy there."""
    quick = {"stages": (5,), "opening": (), "max_steps": 4, "eval_every": 4, "eval_examples": 8} if dry_run else {}
    settings = StateRecallConfig.model_validate({"layout": RECALL_LAYOUTS[name], "n_loops": n_loops, **RECALL, **quick})
    model = build(settings.model, seed=0, device=device())
    optimizer = adamw(model, lr=settings.lr)
    state, history = TrainState(), []
    while (following := recall.current(settings, history)) is not None and (not history or time.time() < until):
        size, stage_steps = following
        state, entry = recall.practise(settings, model, optimizer, size, state, stage_steps)
        history.append(entry)
    last = history[-1]
    return {
        "steps": state.step,
        "n_max": recall.n_max(settings, history),
        "at": f"{last['n']} bits, {last['swaps']} swaps",
        "accuracy": last["all"],
    }


TASKS = {"language": language, "state_recall": state_recall}


def learn(task: str, name: str, n_loops: int, until: float, dry_run: bool) -> dict[str, Any]:
    """One model's failure is a result; the others still get theirs."""
    row = {"task": task, "model": name, "n_loops": n_loops}
    try:
        return row | TASKS[task](name, n_loops, until, dry_run)
    except Exception as error:
        return row | {"ok": False, "failure": f"{type(error).__name__}: {error}"[:400]}


def part(dry_run: bool, only: set[str] | None, seconds: float) -> Iterator[dict[str, Any]]:
    until = time.time() + 0.75 * seconds
    names = [name for name in ("full+gdn", "full", "gdn") if only is None or name in only]
    jobs = [(*job, until, dry_run) for job in itertools.product(TASKS, names, (4, 1))]
    if dry_run or not jobs:
        yield from itertools.starmap(learn, jobs)
        return
    with ProcessPoolExecutor(len(jobs), mp_context=multiprocessing.get_context("spawn")) as pool:
        for finished in as_completed([pool.submit(learn, *job) for job in jobs]):
            yield finished.result()
