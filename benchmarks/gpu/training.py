"""Training throughput of looped stacks at 4096 tokens: whole steps through lt2.train.loop, beside fla's layers.

MFU counts forward and backward once (recomputation is not useful work) over the measured matmul ceiling and over the
card's nominal 989 TFLOP/s.
"""

from __future__ import annotations

import gc
import os
import time
from collections.abc import Iterator
from typing import Any, NamedTuple

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
from lt2.train.optim import adamw, muon
from lt2.train.parallel import shard, wrap_blocks
from lt2.train.schedules import learning_rate

NOMINAL_FLOPS = 989e12


class Case(NamedTuple):
    model: str
    size: str
    batch: int
    recompute: bool = True
    compile: bool = True
    optimizer: str = "adamw"
    implementation: str = "lt2"  # or "fla layers", which are not compiled


# First what every other figure is compared with, each beside its peer.
CASES = [
    Case("full+gdn", "1.3b", 4),
    Case("full+gdn", "1.3b", 3, recompute=False),  # computes nothing twice; the same kernels as four rows
    Case("full+gdn", "1.3b", 4, implementation="fla layers"),
    Case("gdn", "1.3b", 4),
    Case("full", "1.3b", 4),
    Case("gdn", "1.3b", 4, implementation="fla layers"),
    Case("full", "1.3b", 4, implementation="fla layers"),
    Case("full+gdn", "1.3b", 4, optimizer="muon"),
    Case("full+gdn", "0.6b", 8),
    Case("kda", "1.3b", 4),
    Case("gdn+dsa", "1.3b", 2, compile=False),
    Case("full", "0.6b", 8),
    Case("kda", "1.3b", 4, implementation="fla layers"),
    Case("full+gdn", "1.3b", 3, recompute=False, implementation="fla layers"),
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


def ours(config: ModelConfig, case: Case, length: int, *, steps: int) -> dict[str, Any]:
    model = random_model(config, dtype=torch.float32, device=device())
    wrap_blocks(model, recompute="block" if case.recompute else "none", compile=case.compile)
    sharding = None
    if device().type == "cuda":  # one rank: parameters are cast to bf16 once per step, as in a real run
        mesh = dist.device_mesh.init_device_mesh("cuda", (1,), mesh_dim_names=("data",))
        sharding = shard(model, mesh, param_dtype=torch.bfloat16)
    optimizer = {"adamw": adamw, "muon": muon}[case.optimizer](model, lr=1e-4)
    settings = {
        "steps": steps, "global_batch_size": case.batch, "lr": 1e-4, "log_every": 1,
        "activation_checkpoint": case.recompute, "optimizer": {"type": case.optimizer},
    }  # fmt: skip
    train_config = TrainConfig.model_validate(settings)
    clock = StepClock()
    train(
        model, next_token_objective(), random_batches(config.vocab_size, case.batch, length), optimizer,
        learning_rate(lr=1e-4, steps=steps), train_config, TrainState(), [clock], sharding=sharding,
    )  # fmt: skip
    plan = plan_memory(config, train_config, length, device_type=device().type, sharded=sharding is not None)
    return measured(clock.times, case.batch * length) | {"planned_memory_gib": plan.total / 2**30}


def peer(config: ModelConfig, case: Case, length: int, *, steps: int) -> dict[str, Any]:
    from benchmarks.gpu.peer import PeerLM, peer_step

    mixers = [spec.type for spec in layout(config)[0]]
    model = PeerLM(
        mixers, dim=config.dim, num_heads=config.num_heads, ffn=config.ffn_dim, vocab_size=config.vocab_size,
        n_loops=config.n_loops,
    ).to(device())  # fmt: skip
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-4, betas=(0.9, 0.95), weight_decay=0.1, fused=True)
    batches = random_batches(config.vocab_size, case.batch, length)
    times = []
    for _ in range(steps):
        started = time.perf_counter()
        peer_step(model, optimizer, next(batches).tokens, recompute=case.recompute)
        torch.cuda.synchronize()
        times.append(time.perf_counter() - started)
    return measured(times, case.batch * length)


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
    peer(config, Case("gdn", "1.3b", 4, recompute=False), 4096, steps=1)


def fresh() -> None:
    """Nothing of the case before is left, or its weights and moments would count in this one's peak."""
    torch._dynamo.reset()
    gc.collect()  # a sharded model is in cycles with its hooks
    if torch.cuda.is_available():
        torch.cuda.empty_cache()
        torch.cuda.reset_peak_memory_stats()


def part(dry_run: bool, only: set[str] | None, seconds: float) -> Iterator[dict[str, Any]]:
    """A row for each of CASES, without the peers, which need CUDA, in a dry run."""
    late = stopwatch(seconds)
    if device().type == "cuda" and not dist.is_initialized():
        os.environ.update(MASTER_ADDR="127.0.0.1", MASTER_PORT="29511")
        dist.init_process_group("nccl", rank=0, world_size=1)
    limit = matmul_flops(dry_run)
    steps, length, n_layers = (2, 32, 5) if dry_run else (7, 4096, 10)
    for case in CASES:
        if (only is not None and case.model not in only) or (dry_run and case.implementation != "lt2"):
            continue
        size = "tiny" if dry_run else case.size
        config = model_config(case.model, size, n_layers=n_layers, vocab_size=32_768, max_seq_len=4096)
        row: dict[str, Any] = case._asdict() | {
            "n_layers": n_layers, "n_loops": config.n_loops, "length": length, "parameters": parameters(config).total,
        }  # fmt: skip
        if late(0.8):
            yield {**row, "skipped": "time"}
            continue
        fresh()
        try:
            if case.implementation == "lt2":
                row |= ours(config, case._replace(compile=case.compile and not dry_run), length, steps=steps)
            else:
                row |= peer(config, case, length, steps=steps)
            flops = row["tokens_per_s"] * training_flops(config, length)
            row |= {"mfu_measured_ceiling": flops / limit, "mfu_nominal": flops / NOMINAL_FLOPS}
        except Exception as error:  # the remaining cases still get their figures
            row |= {"ok": False, "failure": f"{type(error).__name__}: {error}"[:600]}
        yield row
