"""Figures beside the loss that tell whether a run is well: added to the metrics of the steps that are logged."""

from __future__ import annotations

import statistics
from collections import deque
from dataclasses import dataclass, field

import torch
from torch import Tensor
from torch.distributed.tensor import DTensor

from lt2.analysis.accounting import objective_flops, peak_flops, warmup_flops
from lt2.config import ModelConfig
from lt2.model import LoopedLM
from lt2.train.loop import TrainConfig, TrainState, autocast_dtype
from lt2_platform.machine.memory import peak_resident
from lt2_platform.train import ranks

SPIKE = 3.0  # times the running median, as in scripts/stability.py


@dataclass
class Observer:
    """Callback of every rank; it comes before those that write. Adds to the metrics:

    grad_spikes: logged gradient norms, since this attempt began, beyond SPIKE times the median of the 64 before.
    rho_norm_<loop>: L2 norm of each loop's residual gain, for a model that has them.
    peak_memory_gb: this rank's peak since the last logged step (GPU, allocated) or since the process began (CPU, RSS).
    mfu: FLOPs of the objective (lt2.analysis.accounting.objective_flops, so a teacher's too, and no recomputation) of
        all tokens, learned or not, over the cards' dense bf16 peak; where the card is known and the run is in bf16.
        DSA is dense or sparse as in the last step.
    """

    model: LoopedLM
    flops_per_step: float
    peak: float | None  # FLOP/s of all cards
    device: torch.device
    warmup: dict[int, float] = field(default_factory=dict)  # until a step, FLOPs more per step
    norms: deque[float] = field(default_factory=lambda: deque(maxlen=64))
    spikes: int = 0

    @classmethod
    def build(
        cls,
        model: LoopedLM,
        config: TrainConfig,
        seq_len: int,
        device: torch.device,
        teacher: ModelConfig | None = None,
    ) -> Observer:
        bf16 = autocast_dtype(config.precision, device) == torch.bfloat16
        card = peak_flops(torch.cuda.get_device_name(device)) if device.type == "cuda" and bf16 else None
        if not card:
            return cls(model, 0.0, None, device)
        tokens = config.global_batch_size * seq_len
        per_token = objective_flops(model.config, config.objective, seq_len, teacher=teacher)
        more = warmup_flops(model.config, config.objective, seq_len)
        warmup = {until: 3 * flops * tokens for until, flops in more.items()}
        return cls(model, per_token * tokens, card * ranks.world_size(), device, warmup)

    def on_step(self, state: TrainState, metrics: dict[str, float]) -> None:
        norm = metrics["grad_norm"]
        if len(self.norms) >= 8 and norm > SPIKE * statistics.median(self.norms):
            self.spikes += 1
        self.norms.append(norm)
        metrics["grad_spikes"] = self.spikes
        metrics["peak_memory_gb"] = peak_memory(self.device) / 1e9
        if self.model.rho is not None:
            rho = _whole(self.model.rho.detach())
            for loop, value in enumerate(torch.linalg.vector_norm(rho, dim=1).tolist()):
                metrics[f"rho_norm_{loop}"] = value
        if self.peak is not None:
            flops = self.flops_per_step + sum(more for until, more in self.warmup.items() if state.step <= until)
            metrics["mfu"] = flops / metrics["step_time"] / self.peak


def peak_memory(device: torch.device) -> int:
    """Bytes: allocated on the GPU at most since the last call, or this process's largest resident set."""
    if device.type != "cuda":
        return peak_resident()
    peak = torch.cuda.max_memory_allocated(device)
    torch.cuda.reset_peak_memory_stats(device)
    return peak


def _whole(tensor: Tensor) -> Tensor:
    return tensor.full_tensor() if isinstance(tensor, DTensor) else tensor
