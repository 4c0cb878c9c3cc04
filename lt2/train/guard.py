"""What keeps a run alive through a bad step: no update that is not finite, and where it came from.

The loop never waits for the device to learn of it: a step's news is read while the next step runs.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor, nn

from lt2.train.loss import Objective
from lt2.train.parallel import Sharding, local, reshard

if TYPE_CHECKING:
    from lt2.train.batch import Batch


@dataclass(frozen=True)
class Origin:
    """Where numbers first stopped being finite.

    Attributes:
        place: embedding, block, loop (its residual or norm), output (after the last loop), loss, gradient (the forward
            pass is finite), or unknown (a repetition is finite although the loss was not).
        loop, layer, mixer: of a block; for a loop only `loop`. They count from 0.
        rank: of the worker whose batch it was.
        sequences: ids of the sequences of its micro-batch, if the data has ids.
        weight: the first parameter, by name, that holds such numbers itself.
    """

    place: str
    loop: int | None = None
    layer: int | None = None
    mixer: str | None = None
    rank: int = 0
    sequences: tuple[int, ...] = ()
    weight: str | None = None

    def __str__(self) -> str:
        where = {
            "embedding": "the embedding's output",
            "block": f"the output of loop {self.loop}, layer {self.layer} ({self.mixer})",
            "loop": f"the residual or norm that ends loop {self.loop}",
            "output": "the state after the last loop and the final norm",
            "loss": "the loss, of a finite state",
            "gradient": "only the gradient; the forward pass is finite",
            "unknown": "not found: the same forward pass, repeated, is finite (a fault of the device?)",
        }[self.place]
        text = f"first not finite: {where}"
        if self.place not in ("gradient", "unknown"):
            text += f", on rank {self.rank}" + (f", sequences {list(self.sequences)}" if self.sequences else "")
        return text + (f"; weight {self.weight} is not finite" if self.weight else "; all weights are finite")


class NonFiniteLossError(RuntimeError):
    """The loss or the gradient norm became NaN or infinite. The weights are those before that step.

    step: the optimizer step (from 1) that could not be made; position: of its batch in the global order.
    """

    def __init__(self, message: str, *, step: int = 0, position: int = 0, origin: Origin | None = None):
        super().__init__(message)
        self.step, self.position, self.origin = step, position, origin


class News(NamedTuple):
    """bad_step is 0 while all is finite; loss (mean per token) and grad_norm belong to it; request: over ranks."""

    bad_step: int
    loss: float
    grad_norm: float
    request: int


class Guard:
    """Makes the updates of one run of the loop, up to the first step that is not finite."""

    def __init__(self, device: torch.device):
        self.bad = torch.zeros((), device=device)
        self.first = torch.zeros(3, dtype=torch.float64, device=device)

    def update(
        self, optimizer: torch.optim.Optimizer, step: int, loss: Tensor, grad_norm: Tensor, request: Tensor
    ) -> Callable[[], News]:
        """Step the optimizer unless this or an earlier step was bad; returns what reads the step's news.

        loss, grad_norm, request: scalars, the same on every rank. Reading waits for this step, not for later ones.
        """
        bad = ~(loss.isfinite() & grad_norm.isfinite())
        here = torch.stack([torch.full_like(self.first[0], step), loss.double(), grad_norm.double()])
        self.first = torch.where(bad & (self.bad == 0), here, self.first)
        self.bad = torch.maximum(self.bad, bad.to(self.bad.dtype))
        if all(group.get("fused") for group in optimizer.param_groups):
            optimizer.found_inf = self.bad  # type: ignore[attr-defined]  the gradient scaler's way to skip a step
            optimizer.step()
        elif not self.bad.item():
            optimizer.step()
        return _later(torch.cat([self.first, request.reshape(1).double()]))


def _later(values: Tensor) -> Callable[[], News]:
    host, event = values.to("cpu", non_blocking=True), None
    if values.is_cuda:
        event = torch.cuda.Event()
        event.record()

    def read() -> News:
        if event is not None:
            event.synchronize()
        step, loss, norm, request = host.tolist()
        return News(int(step), loss, norm, int(request))

    return read


@torch.no_grad()
def find_origin(
    model: nn.Module,
    objective: Objective,
    parts: Sequence[Batch],
    context: Callable[[], AbstractContextManager[Any]],
    *,
    loss: float,
    sharding: Sharding | None = None,
) -> Origin:
    """Repeat the forward pass of a step's micro-batches, watching every (loop, layer). Collective when sharded.

    context: what the training step's forward runs in (autocast). loss: what the step gave.
    """
    rank = dist.get_rank() if sharding is not None else 0
    found: Origin | None = None
    for part in parts:  # to the end, because the ranks gather weights together
        watched = _Watched(model)
        with context():
            value, _, _ = objective(watched, part)  # type: ignore[arg-type]
        if found is None and (watched.place or not value.isfinite()):
            ids = () if part.ids is None else tuple(part.ids.tolist())
            found = Origin(**(watched.place or {"place": "loss"}), rank=rank, sequences=ids)
    reshard(sharding)
    weight = next((name for name, p in model.named_parameters() if not _finite(local(p))), None)
    mine = (found, weight)
    everyone: list[Any] = [mine]
    if sharding is not None:
        everyone = [None] * dist.get_world_size()
        dist.all_gather_object(everyone, mine)
    place = "gradient" if torch.tensor(loss).isfinite() else "unknown"
    first = next((origin for origin, _ in everyone if origin is not None), Origin(place))
    weights = {name for _, name in everyone if name is not None}
    names = [name for name, _ in model.named_parameters() if name in weights]
    return Origin(**{**vars(first), "weight": names[0] if names else None})


class _Watched:
    """The model as an objective sees it, remembering where its states first were not finite."""

    def __init__(self, model: Any):
        self.model = model
        self.place: dict[str, Any] | None = None

    def __getattr__(self, name: str) -> Any:
        return getattr(self.model, name)

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        # A network of one's own need not know of recorders: then only its output is watched.
        if hasattr(self.model, "schedule"):
            kwargs["record"] = self._record
        output = self.model(*args, **kwargs)
        if self.place is None and not _finite(output.hidden):
            self.place = {"place": "output"}
        return output

    def _record(self, loop: int, layer: int, block: Any, spec: Any, seq: Any, entry: Tensor, h: Tensor) -> None:
        if self.place is not None:
            return
        if not _finite(entry):
            self.place = {"place": "embedding"} if loop == 0 else {"place": "loop", "loop": loop - 1}
        elif not _finite(h):
            self.place = {"place": "block", "loop": loop, "layer": layer, "mixer": spec.type}


def _finite(values: Tensor) -> bool:
    return bool(values.isfinite().all())
