"""The exit gate's objective against plain sums over tokens and loops."""

from __future__ import annotations

import math

import pytest
import torch
from torch.nn import functional as F

from lt2.config import ConfigError
from lt2.train.exit_gate import entropy, exit_gate_objective
from lt2.train.loop import Batch
from tests.lt2.tiny import model, tokens

GATE = {"type": "exit_gate"}


def test_entropy_at_its_extremes():
    uniform = torch.full((1, 3), 1 / 3, dtype=torch.float64)
    assert entropy(uniform).item() == pytest.approx(math.log(3), abs=1e-12)
    certain = torch.tensor([[0.0, 1.0, 0.0]], dtype=torch.float64, requires_grad=True)
    value = entropy(certain)
    assert value.item() == pytest.approx(0.0, abs=1e-12)
    value.sum().backward()
    assert certain.grad.isfinite().all()


@pytest.mark.parametrize("chunk_rows", [3, 1024])
def test_objective_equals_its_definition(chunk_rows: int):
    net = model(halting=GATE).train()
    ids, mask = tokens(2, 9), torch.ones(2, 9, dtype=torch.bool)
    mask[0, 5:] = False
    batch = Batch(tokens=ids, loss_mask=mask)
    loss, n_tokens, metrics = exit_gate_objective(entropy_weight=0.2, chunk_rows=chunk_rows)(net, batch)

    out = net(ids[:, :-1], per_loop=True)
    expected, last, depth, count = 0.0, 0.0, 0.0, 0
    for b in range(2):
        for t in range(8):
            if not mask[b, t + 1]:
                continue
            p = out.weights[b, t].tolist()
            ce = [F.cross_entropy(net.logits(h[b, t]), ids[b, t + 1]).item() for h in out.loops]
            expected += sum(q * c for q, c in zip(p, ce)) + 0.2 * sum(q * math.log(q) for q in p)
            last, depth, count = last + ce[-1], depth + sum((i + 1) * q for i, q in enumerate(p)), count + 1
    assert n_tokens.item() == count == 12
    assert loss.item() == pytest.approx(expected, rel=1e-12)
    assert metrics["ce"].item() == pytest.approx(last, rel=1e-12)
    assert metrics["mean_loops"].item() == pytest.approx(depth, rel=1e-12)
    loss.backward()
    assert net.halt.weight.grad.abs().max() > 0


def test_auxiliary_losses_are_added():
    """With the entropy term 0, what is beside the expected cross entropy is the indexer's loss, which is no gain."""
    sparse = {"type": "dsa", "top_k": 3, "index_dim": 8, "index_rope_dim": 4, "warmup_steps": 0}
    net = model({"type": "uniform", "mixer": sparse}, halting=GATE).train()
    loss, _, metrics = exit_gate_objective(entropy_weight=0.0)(net, Batch(tokens=tokens(2, 9), step=0))
    assert metrics["dsa"] > 0
    torch.testing.assert_close(loss, metrics["expected_ce"] + metrics["dsa"], rtol=1e-12, atol=0)


def test_the_gradient_of_the_head_is_summed_in_fp32_over_many_chunks():
    """bf16 sums stop growing: 256 chunks of one gradient were off by a tenth."""
    net, gradients = model(halting=GATE).float().train(), []
    batch = Batch(tokens=tokens(1, 17).repeat(64, 1))  # every row asks for the same change
    for precision in (torch.float32, torch.bfloat16):
        net.zero_grad()
        with torch.autocast("cpu", precision, enabled=precision == torch.bfloat16):
            loss, _, _ = exit_gate_objective(chunk_rows=16)(net, batch)
        loss.backward()
        gradients.append(net.head_weight.grad.clone())
    exact, rounded = gradients
    assert (rounded - exact).norm() < 0.03 * exact.norm()


def test_the_gate_learns_to_exit_where_later_loops_are_worse():
    """With the rest frozen and no entropy term, the expected depth moves to the loop with the lowest loss."""
    net = model(halting=GATE).train()
    ids = tokens(4, 12)
    optimizer = torch.optim.Adam(net.halt.parameters(), lr=0.1)
    objective, history = exit_gate_objective(entropy_weight=0.0), []
    for _ in range(150):
        optimizer.zero_grad()
        loss, n_tokens, _ = objective(net, Batch(tokens=ids))
        loss.backward()
        optimizer.step()
        history.append(loss.item() / n_tokens.item())
    losses = [
        F.cross_entropy(net.logits(h).flatten(0, 1), ids[:, 1:].flatten()).item()
        for h in net(ids[:, :-1], per_loop=True).loops
    ]
    assert history[-1] < history[0]
    assert history[-1] <= min(losses) + 1e-3, "a gate per token does at least as well as the best fixed depth"


def test_a_model_without_a_gate_is_refused():
    with pytest.raises(ConfigError, match="exit_gate"):
        exit_gate_objective()(model(halting={"type": "act"}), Batch(tokens=tokens(1, 4)))
