"""Training throughput of looped stacks at 4096 tokens: whole steps through lt2.train.loop, beside fla's layers.

MFU counts forward and backward once (recomputation is not useful work) over the measured matmul ceiling and over the
card's nominal 989 TFLOP/s.
"""

from __future__ import annotations

import os
import time
from collections.abc import Iterator
from typing import Any

import torch
import torch.distributed as dist

from benchmarks.gpu.device import device, matmul_flops, stopwatch
from benchmarks.gpu.models import model_config
from lt2.analysis.accounting import parameters, training_flops
from lt2.analysis.timing import random_model
from lt2.config import ModelConfig
from lt2.layout import layout
from lt2.memory import plan_memory
from lt2.ops import gated_delta_rule
from lt2.train.loop import Batch, TrainConfig, TrainState, train
from lt2.train.loss import next_token_objective
from lt2.train.optim import adamw
from lt2.train.parallel import shard, wrap_blocks
from lt2.train.schedules import learning_rate

NOMINAL_FLOPS = 989e12
PEERS = ("full", "gdn", "kda", "full+gdn")
# (model, size, micro-batch, recompute activations, compile)
CASES = [
    ("full+gdn", "1.3b", 4, True, True),
    ("full+gdn", "1.3b", 3, False, True),  # computes nothing twice; the same kernels as four rows
    ("gdn", "1.3b", 4, True, True),
    ("full", "1.3b", 4, True, True),
    ("full+gdn", "0.6b", 8, True, True),
    ("kda", "1.3b", 4, True, True),
    ("gdn+dsa", "1.3b", 2, True, False),
    ("full", "0.6b", 8, True, True),
]


class StepClock:
    """Callback that records the time of every step; the first steps (compilation, autotuning) are dropped later."""

    def __init__(self) -> None:
        self.times: list[float] = []

    def on_step(self, state: TrainState, metrics: dict[str, float]) -> None:
        self.times.append(metrics["step_time"])


def random_batches(vocab_size: int, batch: int, length: int) -> Iterator[Batch]:
    while True:
        yield Batch(tokens=torch.randint(vocab_size, (batch, length + 1), device=device()))


def ours(config: ModelConfig, batch: int, length: int, *, recompute: bool, compile: bool, steps: int) -> dict[str, Any]:
    model = random_model(config, dtype=torch.float32, device=device())
    wrap_blocks(model, recompute="block" if recompute else "none", compile=compile)
    sharding = None
    if device().type == "cuda":  # one rank: parameters are cast to bf16 once per step, as in a real run
        mesh = dist.device_mesh.init_device_mesh("cuda", (1,), mesh_dim_names=("data",))
        sharding = shard(model, mesh, param_dtype=torch.bfloat16)
    optimizer = adamw(model, lr=1e-4)
    train_config = TrainConfig(steps=steps, global_batch_size=batch, lr=1e-4, log_every=1)
    clock = StepClock()
    train(
        model, next_token_objective(), random_batches(config.vocab_size, batch, length), optimizer,
        learning_rate(lr=1e-4, steps=steps), train_config, TrainState(), [clock], sharding=sharding,
    )  # fmt: skip
    settings = TrainConfig(steps=steps, global_batch_size=batch, activation_checkpoint=recompute)
    plan = plan_memory(config, settings, length, device_type=device().type, sharded=sharding is not None)
    return measured(clock.times, batch * length) | {"planned_memory_gib": plan.total / 2**30}


def peer(config: ModelConfig, batch: int, length: int, *, recompute: bool, steps: int) -> dict[str, Any]:
    from benchmarks.gpu.peer import PeerLM, peer_step

    mixers = [spec.type for spec in layout(config)[0]]
    model = PeerLM(
        mixers, dim=config.dim, num_heads=config.num_heads, ffn=config.ffn_dim, vocab_size=config.vocab_size,
        n_loops=config.n_loops,
    ).to(device())  # fmt: skip
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-4, betas=(0.9, 0.95), weight_decay=0.1, fused=True)
    batches = random_batches(config.vocab_size, batch, length)
    times = []
    for _ in range(steps):
        started = time.perf_counter()
        peer_step(model, optimizer, next(batches).tokens, recompute=recompute)
        torch.cuda.synchronize()
        times.append(time.perf_counter() - started)
    return measured(times, batch * length)


def measured(times: list[float], tokens: int) -> dict[str, Any]:
    """The fastest half of the steps, without the first two: the median of what a long run would see."""
    steady = sorted(times[2:] or times)
    step = steady[len(steady) // 2]
    memory = torch.cuda.max_memory_allocated() / 2**30 if torch.cuda.is_available() else 0.0
    return {"step_s": step, "tokens_per_s": tokens / step, "first_step_s": times[0], "peak_memory_gib": memory}


# flash-qla compiles anew for each number of heads, for one row (its variable-length kernels) and for several, and for
# few or many rows times heads (its tile of values).
KERNELS = [  # rows, tokens, heads, gradients
    (4, 4096, 16, True),  # training
    (1, 1024, 16, False), (1, 8192, 16, False), (8, 1024, 16, False),  # prefill: one row, one row in pieces, many
    (32, 512, 4, True),  # learning
]  # fmt: skip


def compile_kernels(rows: int, length: int, heads: int, gradients: bool) -> None:
    """Fill tilelang's cache on disk with the kernels that this shape takes: over a minute, uncached."""
    q, k, v = (torch.randn(rows, length, heads, 128, device=device(), dtype=torch.bfloat16) for _ in range(3))
    gates = torch.rand(2, rows, length, heads, device=device())
    inputs = (q, k, v, -gates[0], gates[1].bfloat16())
    if not gradients:  # a prefill starts from its cache's state
        state = torch.zeros(rows, heads, 128, 128, device=device())
        with torch.inference_mode():
            gated_delta_rule(*inputs, initial_state=state, output_final_state=True)
        return
    o, _ = gated_delta_rule(*(x.requires_grad_() for x in inputs))
    o.backward(torch.ones_like(o))


def compile_peer() -> None:
    """Compile what fla's GDN layer and its loss tune over. Call where FLA_CACHE_RESULTS=0: times are not to be kept."""
    config = model_config("gdn", "1.3b", n_layers=1, n_loops=1, vocab_size=32_768)
    peer(config, 4, 4096, recompute=False, steps=1)


def fresh() -> None:
    torch._dynamo.reset()
    if torch.cuda.is_available():
        torch.cuda.empty_cache()
        torch.cuda.reset_peak_memory_stats()


def part(dry_run: bool, only: set[str] | None, seconds: float) -> Iterator[dict[str, Any]]:
    """All of our cases, then their peers: rows with `implementation` "lt2" or "fla layers"."""
    late = stopwatch(seconds)
    if device().type == "cuda" and not dist.is_initialized():
        os.environ.update(MASTER_ADDR="127.0.0.1", MASTER_PORT="29511")
        dist.init_process_group("nccl", rank=0, world_size=1)
    limit = matmul_flops(dry_run)
    steps, length, n_layers = (2, 32, 5) if dry_run else (7, 4096, 10)
    cases = [case for case in CASES if only is None or case[0] in only]
    peers = [] if dry_run else [case for case in cases if case[0] in PEERS]
    runs = [("lt2", *case) for case in cases] + [("fla layers", *case) for case in peers]
    for implementation, name, size, batch, recompute, compile in runs:
        config = model_config(name, "tiny" if dry_run else size, n_layers=n_layers, vocab_size=32_768, max_seq_len=4096)
        row: dict[str, Any] = {
            "part": "training", "implementation": implementation, "model": name, "size": size, "n_layers": n_layers,
            "n_loops": config.n_loops, "batch": batch, "length": length, "recompute": recompute,
            "parameters": parameters(config).total,
        }  # fmt: skip
        if late(0.8):
            yield {**row, "skipped": "time"}
            continue
        fresh()
        try:
            if implementation == "lt2":
                compiled = compile and not dry_run
                row |= ours(config, batch, length, recompute=recompute, compile=compiled, steps=steps)
            else:
                row |= peer(config, batch, length, recompute=recompute, steps=steps)
            flops = row["tokens_per_s"] * training_flops(config, length)
            row |= {"mfu_measured_ceiling": flops / limit, "mfu_nominal": flops / NOMINAL_FLOPS}
        except Exception as error:  # the remaining cases still get their figures
            row |= {"ok": False, "failure": f"{type(error).__name__}: {error}"[:600]}
        yield row
