"""The training loop: plain torch, read it from top to bottom.

One optimizer step: take this rank's share of the global batch, run it in micro-batches, reduce gradients once, divide
by the number of tokens the whole global batch counted, clip, update. Objective, data, checkpoints and metrics come
from outside; with the same arguments and state the losses are the same bits on CPU. Knows nothing of Ray.
"""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Callable, Collection, Iterator, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from lt2.config import ConfigError
from lt2.train import parallel
from lt2.train.batch import Batch, TrainState
from lt2.train.config import TrainConfig
from lt2.train.guard import Guard, News, NonFiniteLossError, find_origin
from lt2.train.loss import Objective
from lt2.train.optim import set_lr
from lt2.train.parallel import Sharding
from lt2.train.schedules import Schedule

__all__ = [
    "SAVE",
    "STOP",
    "Batch",
    "NonFiniteLossError",
    "PreemptedError",
    "TrainConfig",
    "TrainState",
    "autocast",
    "autocast_dtype",
    "due_after",
    "train",
]

SAVE, STOP = 1, 2**20  # requests at a step; their sum over ranks still tells them apart


class PreemptedError(RuntimeError):
    """Training stopped because it was asked to; everything up to here is in the newest checkpoint."""

    run_state = "running"  # what the results store keeps saying: another attempt goes on


@dataclass
class _Window:
    """Sums since the last time metrics were read from the device."""

    device: torch.device
    started: float = field(default_factory=time.perf_counter)
    waited: float = 0.0
    steps: int = 0
    tokens: Tensor = field(init=False)

    def __post_init__(self) -> None:
        self.tokens = torch.zeros((), dtype=torch.float64, device=self.device)


@dataclass(frozen=True)
class _Step:
    """One of the last steps, until it is known to be finite."""

    step: int
    position: int
    batch: Batch
    news: Callable[[], News]


def train(
    model: nn.Module,
    objective: Objective,
    data: Iterator[Batch],
    optimizer: torch.optim.Optimizer,
    schedule: Schedule,
    config: TrainConfig,
    state: TrainState,
    callbacks: Sequence[Any] = (),
    *,
    sharding: Sharding | None = None,
    skip: Collection[int] = (),
    stop: Callable[[], int] = lambda: 0,
) -> TrainState:
    """Train from `state` to `config.steps`, in place, and return the state.

    data yields this rank's share of each global batch, beginning at state.position. Callbacks are objects with any of
    on_step(state, metrics) every log_every steps, on_checkpoint(state, model, optimizer) every checkpoint_every steps
    and at the end, on_eval(state, model) every eval_every steps, on_end(state). Metrics are floats: loss (with z-loss
    and aux), the objective's own, lr, grad_norm (before clipping), tokens_per_s (all ranks), seconds per step
    step_time and data_wait, and data_wait_fraction.

    skip: positions of global batches to pass over. stop() is asked at every step; when it says SAVE or STOP on any
    rank, the next step is logged and saved on all of them, and on STOP they raise PreemptedError. Raises
    NonFiniteLossError as soon as a loss or gradient is not finite, whose step is not made, and ConfigError when the
    data ends early.
    """
    device = next(model.parameters()).device
    context = partial(autocast, config.precision, device)
    window, guard = _Window(device), Guard(device)
    unheard: deque[_Step] = deque()
    model.train()
    while state.step < config.steps:
        asked = time.perf_counter()
        batch = _next_batch(data, state, config)
        while state.position in skip:
            state.position += config.global_batch_size
            batch = _next_batch(data, state, config)
        window.waited += time.perf_counter() - asked

        set_lr(optimizer, lr := schedule(state.step))
        batch = replace(batch, step=state.step)
        sums, expected = _forward_backward(model, objective, batch, config, context, sharding)
        sums["request"] = torch.full((), float(stop()), dtype=torch.float64, device=device)
        totals, grad_norm = _finish_gradients(model, sums, expected, config.grad_clip, sharding)
        request = totals.pop("request")
        mean = totals["loss"] / totals["n_tokens"].clamp(min=1)
        news = guard.update(optimizer, state.step + 1, mean, grad_norm, request)
        optimizer.zero_grad(set_to_none=True)

        unheard.append(_Step(state.step + 1, state.position, batch, news))
        state.step += 1
        state.position += config.global_batch_size
        window.steps += 1
        window.tokens += totals["n_tokens"]
        due = due_after(state.step, config)
        # The device is still at this step; without need the host listens to the one before only. What is logged or
        # saved needs it: a step that is not finite was not made.
        requested = 0
        while len(unheard) > (0 if due or requested else 1):
            made = unheard.popleft()
            heard = made.news()
            if heard.bad_step:
                raise _not_finite(model, objective, made, heard, config, context, sharding)
            requested = max(requested, heard.request)
        if requested:
            due |= {"log", "checkpoint"}
        if not due:
            continue
        metrics = _read_metrics(totals, grad_norm, lr, window, state)
        window = _Window(device)
        if "log" in due:
            _call(callbacks, "on_step", state, metrics)
        if "eval" in due:
            _call(callbacks, "on_eval", state, model)
            parallel.reshard(sharding)
            model.train()
        if "checkpoint" in due:
            _call(callbacks, "on_checkpoint", state, model, optimizer)
        if requested >= STOP and state.step < config.steps:
            raise PreemptedError(f"stopped as asked after step {state.step} of {config.steps}, which is saved")
        window.started = time.perf_counter()
    _call(callbacks, "on_end", state)
    return state


def autocast_dtype(precision: str, device: torch.device) -> torch.dtype | None:
    """bf16 where asked for, or under "auto" where the device is fast at it; None means fp32."""
    fast = device.type == "cuda" and torch.cuda.is_bf16_supported()
    return torch.bfloat16 if precision == "bf16" or (precision == "auto" and fast) else None


def autocast(precision: str, device: torch.device) -> AbstractContextManager[Any]:
    """While it is open, products on the device are in `autocast_dtype`."""
    dtype = autocast_dtype(precision, device)
    return torch.autocast(device.type, dtype) if dtype else nullcontext()


def _next_batch(data: Iterator[Batch], state: TrainState, config: TrainConfig) -> Batch:
    batch = next(data, None)
    if batch is None:
        raise ConfigError(f"the data ended at step {state.step} of {config.steps}; lower train.steps or add data")
    return batch


def _forward_backward(
    model: nn.Module,
    objective: Objective,
    batch: Batch,
    config: TrainConfig,
    context: Callable[[], AbstractContextManager[Any]],
    sharding: Sharding | None,
) -> tuple[dict[str, Tensor], int]:
    """Accumulate gradients of (loss sum / expected tokens) over the micro-batches; (sums over this rank, expected)."""
    device = next(model.parameters()).device
    # A constant close to the number of tokens keeps gradients near their final size; the exact count of the global
    # batch is known only after the last rank's last micro-batch.
    expected = config.global_batch_size * (batch.tokens.shape[1] - 1)
    parts = batch.split(config.micro_batch_size or len(batch.tokens))
    sums: dict[str, Tensor] = {}
    for index, part in enumerate(parts):
        with parallel.micro_step(sharding, last=index == len(parts) - 1):
            with context():
                loss, n_tokens, metrics = objective(model, part.to(device))
            (loss / expected).backward()
        for name, value in {"loss": loss, "n_tokens": n_tokens, **metrics}.items():
            value = value.detach().double()
            sums[name] = sums[name] + value if name in sums else value
    return sums, expected


def _finish_gradients(
    model: nn.Module, sums: dict[str, Tensor], expected: int, clip: float | None, sharding: Sharding | None
) -> tuple[dict[str, Tensor], Tensor]:
    """Turn accumulated gradients into those of the mean loss per token, clipped; (sums over ranks, gradient norm)."""
    parallel.reduce_replicated_gradients(sharding)
    names = sorted(sums)
    local = torch.stack([*(sums[name] for name in names), parallel.gradient_square(model, sharding)])
    # One small all-reduce carries the loss, the counts and the gradient norm.
    *values, square = parallel.all_reduce(sharding, local).unbind()
    totals = dict(zip(names, values))
    to_mean = expected / totals["n_tokens"].clamp(min=1)
    grad_norm = square.sqrt() * to_mean
    factor = to_mean if clip is None else to_mean * (clip / (grad_norm + 1e-6)).clamp(max=1)
    parallel.scale_gradients(model, factor)
    return totals, grad_norm


def due_after(step: int, config: TrainConfig) -> set[str]:
    """Which of "log", "eval" and "checkpoint" follow `step`: after the last one log and checkpoint always do."""
    every = {"log": config.log_every, "eval": config.eval_every, "checkpoint": config.checkpoint_every}
    last = step == config.steps
    return {name for name, n in every.items() if n and step % n == 0} | ({"log", "checkpoint"} if last else set())


def _read_metrics(
    totals: dict[str, Tensor], grad_norm: Tensor, lr: float, window: _Window, state: TrainState
) -> dict[str, float]:
    """Copy the step's figures from the device; this waits for it."""
    count = max(1.0, totals["n_tokens"].item())
    means = {name: value.item() / count for name, value in totals.items() if name != "n_tokens"}
    tokens = window.tokens.item()
    state.tokens += int(tokens)
    state.loss = means["loss"]
    elapsed = time.perf_counter() - window.started
    return means | {
        "lr": lr,
        "grad_norm": grad_norm.item(),
        "tokens_per_s": tokens / elapsed,
        "step_time": elapsed / window.steps,
        "data_wait": window.waited / window.steps,
        "data_wait_fraction": window.waited / elapsed,
    }


def _not_finite(
    model: nn.Module,
    objective: Objective,
    step: _Step,
    heard: News,
    config: TrainConfig,
    context: Callable[[], AbstractContextManager[Any]],
    sharding: Sharding | None,
) -> NonFiniteLossError:
    device = next(model.parameters()).device
    parts = [part.to(device) for part in step.batch.split(config.micro_batch_size or len(step.batch.tokens))]
    origin = find_origin(model, objective, parts, context, loss=heard.loss, sharding=sharding)
    return NonFiniteLossError(
        f"step {step.step}: loss {heard.loss}, gradient norm {heard.grad_norm}; {origin}; "
        "lower train.lr or raise train.warmup_steps",
        step=step.step,
        position=step.position,
        origin=origin,
    )


def _call(callbacks: Sequence[Any], name: str, *args: Any) -> None:
    for callback in callbacks:
        if (function := getattr(callback, name, None)) is not None:
            function(*args)
