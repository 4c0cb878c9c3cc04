"""Inputs and comparisons shared by the op tests, in this process and in the interpreter's."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from lt2 import ops
from lt2.ops import reference

FLOATS = ("q", "k", "v", "g", "beta", "initial_state")


@dataclass(frozen=True)
class Recurrence:
    """Arguments of one call of a recurrent op ("linear" or "delta"); None where the op or the case has none."""

    op: str
    q: Tensor
    k: Tensor
    v: Tensor
    g: Tensor | None
    beta: Tensor | None
    initial_state: Tensor | None
    reset: Tensor | None

    def with_(self, **changes) -> Recurrence:
        return replace(self, **changes)

    def map(self, change: Callable[[Tensor], Tensor]) -> Recurrence:
        """Apply `change` to every float tensor."""
        tensors = {name: getattr(self, name) for name in FLOATS}
        return self.with_(**{name: change(x) for name, x in tensors.items() if x is not None})

    def _gates(self) -> tuple:
        return (self.g,) if self.op == "linear" else (self.g, self.beta)

    def run(self, **options) -> tuple[Tensor, Tensor]:
        """Our op: (o, final state)."""
        call = ops.gated_linear_attention if self.op == "linear" else ops.gated_delta_rule
        kwargs = {"initial_state": self.initial_state, "reset": self.reset, "output_final_state": True, **options}
        return call(self.q, self.k, self.v, *self._gates(), **kwargs)

    def oracle(self, **options) -> tuple[Tensor, Tensor]:
        """The token-by-token oracle: (o, final state)."""
        linear, delta = reference.recurrent_gated_linear_attention, reference.recurrent_gated_delta_rule
        call = linear if self.op == "linear" else delta
        kwargs = {"initial_state": self.initial_state, "reset": self.reset, **options}
        return call(self.q, self.k, self.v, *self._gates(), **kwargs)

    def step(self, t: int, state: Tensor) -> tuple[Tensor, Tensor]:
        """Our one-token op on token t."""
        call = ops.gated_linear_attention_step if self.op == "linear" else ops.gated_delta_rule_step
        gates = [None if x is None else x[:, t] for x in self._gates()]
        return call(self.q[:, t], self.k[:, t], self.v[:, t], *gates, state)

    def gradients(self, call: Callable[[Recurrence], tuple[Tensor, Tensor]]) -> tuple[dict[str, Tensor], dict]:
        """(outputs, gradients by input name) of `call` for fixed random weights on o and on the final state."""
        leaves = self.map(lambda x: x.detach().clone().requires_grad_())
        o, state = call(leaves)
        generator = torch.Generator().manual_seed(1)
        loss = sum((x.double() * _random(x.shape, generator).to(x.device)).sum() for x in (o, state))
        loss.backward()
        grads = {name: getattr(leaves, name).grad for name in FLOATS if getattr(leaves, name) is not None}
        return {"o": o.detach(), "state": state.detach()}, grads


def _random(shape, generator: torch.Generator) -> Tensor:
    return torch.randn(shape, generator=generator, dtype=torch.float64)


@pytest.fixture
def recurrence() -> Callable[..., Recurrence]:
    """Factory of random fp64 cases: decay None, "scalar" or "channel"; starts: (row, position) of document starts."""

    def make(op, decay, length, *, starts=(), batch=2, heads=2, key_dim=8, value_dim=5, seed=0) -> Recurrence:
        generator = torch.Generator().manual_seed(seed)

        def random(*shape):
            return _random(shape, generator)

        q, k = random(batch, length, heads, key_dim), F.normalize(random(batch, length, heads, key_dim), dim=-1)
        gate_shape = (batch, length, heads) if decay == "scalar" else (batch, length, heads, key_dim)
        reset = torch.zeros(batch, length, dtype=torch.bool)
        for row, position in starts:
            reset[row, position] = True
        return Recurrence(
            op=op,
            q=q,
            k=k,
            v=random(batch, length, heads, value_dim),
            g=None if decay is None else F.logsigmoid(2 * random(*gate_shape) + 1),
            beta=None if op == "linear" else 2 * random(batch, length, heads).sigmoid(),
            initial_state=random(batch, heads, key_dim, value_dim),
            reset=reset if starts else None,
        )

    return make


def relative_error(actual: Tensor, expected: Tensor) -> float:
    """‖actual - expected‖ / ‖expected‖ in fp64."""
    actual, expected = actual.detach().double().cpu(), expected.detach().double().cpu()
    assert actual.shape == expected.shape
    return ((actual - expected).norm() / expected.norm().clamp_min(1e-12)).item()


@pytest.fixture
def assert_same() -> Callable[..., None]:
    """Check dicts of tensors name by name against a bound on the relative error."""

    def check(actual: dict[str, Tensor], expected: dict[str, Tensor], bound: float) -> None:
        assert actual.keys() == expected.keys()
        errors = {name: relative_error(actual[name], expected[name]) for name in expected}
        assert all(error <= bound for error in errors.values()), errors

    return check
