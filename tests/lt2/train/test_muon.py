"""Muon's update against singular values in fp64, on several workers, and what it leaves alone."""

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.tensor import DTensor

from lt2.train import parallel
from lt2.train.config import MuonConfig, TrainConfig
from lt2.train.loop import Batch, TrainState, train
from lt2.train.loss import next_token_objective
from lt2.train.muon import orthogonalised
from lt2.train.optim import build_optimizer, muon, set_lr
from tests.lt2 import tiny
from tests.lt2.looped_toy import toy
from tests.ranks import run_ranks

GENERATOR = torch.Generator().manual_seed(0)


def random(*shape):
    return torch.randn(*shape, dtype=torch.float64, generator=GENERATOR)


def by_singular_values(x, steps):
    """What Newton-Schulz does to each singular value by itself (Jordan et al. 2024)."""
    u, s, vt = torch.linalg.svd(x, full_matrices=False)
    s = s / s.square().sum().sqrt()
    for _ in range(steps):
        s = 3.4445 * s - 4.7750 * s**3 + 2.0315 * s**5
    return u @ torch.diag(s) @ vt


@pytest.mark.parametrize("shape", [(6, 6), (5, 9), (9, 5), (1, 4)])
def test_a_step_of_newton_schulz_moves_singular_values_only(shape):
    x = random(*shape)
    torch.testing.assert_close(orthogonalised(x, 5), by_singular_values(x, 5), rtol=1e-9, atol=1e-10)
    assert torch.linalg.svdvals(orthogonalised(x, 5)).sub(1).abs().max() < 0.35


def test_a_matrix_without_gradient_stays_where_it_is():
    assert orthogonalised(torch.zeros(3, 4), 5).eq(0).all()


class OneMatrix(nn.Module):
    def __init__(self, m, n):
        super().__init__()
        self.blocks = nn.ModuleList([nn.Linear(n, m, bias=False, dtype=torch.float64)])


@pytest.mark.parametrize("shape", [(6, 4), (4, 6)])
def test_steps_are_those_of_the_formula(shape):
    model = OneMatrix(*shape)
    (weight,) = model.parameters()
    expected, momentum = weight.detach().clone(), torch.zeros(shape, dtype=torch.float64)
    optimizer = muon(model, lr=0.02, momentum=0.9, weight_decay=0.1, newton_schulz_steps=4)
    for lr in (0.02, 0.01, 0.03):
        set_lr(optimizer, lr)
        weight.grad = random(*shape)
        momentum = 0.9 * momentum + 0.1 * weight.grad
        ahead = 0.1 * weight.grad + 0.9 * momentum
        expected = expected * (1 - 0.1 * lr) - lr * 0.2 * 6**0.5 * by_singular_values(ahead, 4)
        optimizer.step()
        torch.testing.assert_close(weight.detach(), expected, rtol=1e-9, atol=1e-10)


def test_it_is_torchs_own_up_to_the_bf16_that_torch_computes_in():
    model = OneMatrix(48, 32)
    (weight,) = model.parameters()
    theirs = nn.Parameter(weight.detach().clone())
    reference = torch.optim.Muon([theirs], lr=0.1, weight_decay=0.1, momentum=0.95, adjust_lr_fn="match_rms_adamw")
    ours = muon(model, lr=0.1)
    start = weight.detach().clone()
    for _ in range(3):
        weight.grad = theirs.grad = random(48, 32)
        ours.step()
        reference.step()
    assert (weight - theirs).norm() < 0.02 * (theirs - start).norm() > 0


def test_an_update_is_as_large_as_adamws():
    model = OneMatrix(96, 64)
    (weight,) = model.parameters()
    start = weight.detach().clone()
    optimizer = muon(model, lr=1.0, weight_decay=0.0)
    weight.grad = random(96, 64)
    optimizer.step()
    assert (weight.detach() - start).square().mean().sqrt().item() == pytest.approx(0.2, rel=0.15)


def test_linear_layers_of_blocks_take_muon_and_all_else_adamw():
    attention = {"type": "full", "bias": "qkv"}
    model = tiny.model({**tiny.HYBRID, "attention": attention})
    optimizer = build_optimizer(model, MuonConfig(), lr=1.0)
    names = {parameter: name for name, parameter in model.named_parameters()}
    taken = {names[p] for group in optimizer.param_groups if "momentum" in group for p in group["params"]}
    rest = {names[p] for group in optimizer.param_groups if "momentum" not in group for p in group["params"]}
    assert taken | rest == set(names.values())
    assert not taken & rest
    assert {name.rsplit(".", 2)[-2] for name in taken} == {
        "q_proj", "k_proj", "v_proj", "o_proj", "qkv_proj", "ab_proj", "gate_proj", "up_proj", "down_proj",
    }  # fmt: skip
    biases = {f"blocks.1.mixers.softmax.{p}_proj.bias" for p in "qkv"}
    assert {"embed.weight", "head.weight", "rho", "blocks.0.mixers.gdn.conv.weight"} | biases <= rest
    decayed = {names[p] for group in optimizer.param_groups if group["weight_decay"] for p in group["params"]}
    assert not biases & decayed


def test_adamw_and_muon_share_rates_and_their_scales():
    model = toy()
    optimizer = muon(model, lr=1.0, lr_scale=lambda name: 0.5 if name.startswith("blocks.0") else 1.0)
    set_lr(optimizer, 0.1)
    names = {parameter: name for name, parameter in model.named_parameters()}
    rates = {names[p]: group["lr"] for group in optimizer.param_groups for p in group["params"]}
    assert {name: 0.05 if name.startswith("blocks.0") else 0.1 for name in rates} == rates
    assert rates.keys() == dict(model.named_parameters()).keys()
    rho = model.rho.detach().clone().requires_grad_()
    rho.grad = model.rho.grad = random(*rho.shape)
    optimizer.step()
    torch.optim.AdamW([rho], lr=0.1, betas=(0.9, 0.95), weight_decay=0.0).step()
    assert torch.equal(rho, model.rho)


@pytest.mark.parametrize("fused", [False, True])
def test_a_step_that_is_not_finite_moves_neither_weights_nor_momenta(fused):
    """As in `test_rollback` for AdamW: fused optimizers are told on the device, others not called."""
    results = []
    for steps in ([1.0, 2.0], [1.0, float("nan"), 2.0]):
        model = OneMatrix(4, 6)
        model.extra = nn.Parameter(torch.ones(3, dtype=torch.float64))
        nn.init.constant_(model.blocks[0].weight, 0.5)
        optimizer = muon(model, lr=0.1)
        for group in optimizer.param_groups:
            group["fused"] = fused
        for scale in steps:
            for p in model.parameters():
                p.grad = torch.arange(p.numel(), dtype=p.dtype).view_as(p).sin() * scale
            bad = torch.tensor(float(scale != scale))
            if fused:
                optimizer.found_inf = bad
                optimizer.step()
            elif not bad:
                optimizer.step()
        momentum = optimizer.state[model.blocks[0].weight]["momentum_buffer"]
        results.append([*(p.detach() for p in model.parameters()), momentum])
    for straight, with_a_bad_step in zip(*results):
        assert torch.equal(straight, with_a_bad_step)


def trained(shard_workers=None):
    """Weights after four steps of eight sequences, whole, and the parts of momenta this rank holds, by name."""
    model = toy(n_loops=2)
    mesh = parallel.data_mesh("cpu", shard_workers)
    sharding = None if mesh is None else parallel.shard(model, mesh)
    rank, ranks = (dist.get_rank(), dist.get_world_size()) if mesh is not None else (0, 1)
    tokens = torch.randint(0, 17, (12, 7), generator=torch.Generator().manual_seed(1)).chunk(ranks)[rank]
    config = TrainConfig(steps=4, global_batch_size=12, lr=0.05, optimizer={"type": "muon"}, precision="fp32")
    optimizer = build_optimizer(model, config.optimizer, lr=config.lr)
    data = iter(lambda: Batch(tokens=tokens), None)
    train(model, next_token_objective(), data, optimizer, lambda step: 0.05, config, TrainState(), sharding=sharding)
    whole = {name: p.full_tensor() if isinstance(p, DTensor) else p for name, p in model.named_parameters()}
    parts = {
        name: optimizer.state[p] for name, p in model.named_parameters() if "momentum_buffer" in optimizer.state[p]
    }
    held = {name: state["momentum_buffer"] for name, state in parts.items()}
    sizes = {name: parallel.local(b).numel() for name, b in held.items()}
    return {name: p.detach() for name, p in whole.items()}, sizes


@pytest.mark.parametrize(("ranks", "shard_workers"), [(3, None), (4, 2)])
def test_several_workers_end_with_the_weights_of_one(ranks, shard_workers):
    """Three divide neither rows (16, 8) evenly nor, with four, all matrices of a shape; four are two groups of two."""
    expected, sizes = trained()
    assert len(sizes) == 6
    for weights, held in run_ranks(trained, ranks, shard_workers):
        for name, value in expected.items():
            torch.testing.assert_close(weights[name], value, rtol=1e-9, atol=1e-10, msg=lambda m, n=name: f"{n}: {m}")
        assert sum(held.values()) < sum(sizes.values())
