"""A few minutes of learning: small byte-level models on the standard library's own source, T = 1 and 4, by layout."""

from __future__ import annotations

import sysconfig
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch

from benchmarks.gpu.device import device
from benchmarks.gpu.models import model_config
from lt2.config import ModelConfig
from lt2.loss import next_token_objective
from lt2.model import build
from lt2.optim import adamw, warmup_cosine
from lt2.training import Batch, TrainConfig, TrainState, train


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


def part(dry_run: bool, only: set[str] | None, deadline: float = 110.0) -> Iterator[dict[str, Any]]:
    data = corpus()
    split = int(len(data) * 0.95)
    length, batch, steps = (32, 2, 3) if dry_run else (512, 32, 300)
    started = time.perf_counter()
    for name in ("full+gdn", "full", "gdn"):
        if only is not None and name not in only:
            continue
        for n_loops in (4, 1):
            row: dict[str, Any] = {"part": "learning", "model": name, "n_loops": n_loops}
            row |= {"steps": steps, "length": length}
            if time.perf_counter() - started > deadline:
                yield {**row, "skipped": "time"}
                continue
            base = model_config(name, "tiny", n_layers=5, n_loops=n_loops)
            config = ModelConfig(**base.model_dump() | {"vocab_size": 256, "dim": 64 if dry_run else 512})
            model = build(config, device=device())
            optimizer = adamw(model, lr=1e-3)
            begin = time.perf_counter()
            train(
                model, next_token_objective(), windows(data[:split], batch, length, seed=1), optimizer,
                warmup_cosine(lr=1e-3, steps=steps, warmup_steps=1 if dry_run else 30),
                TrainConfig(steps=steps, global_batch_size=batch, lr=1e-3, log_every=50), TrainState(),
            )  # fmt: skip
            row["train_seconds"] = time.perf_counter() - begin
            row["held_out_loss"] = held_out_loss(model, data[split:], length, 2 if dry_run else 20)
            yield row
