"""Sharded gradients against a single process, and the number of collectives, on two gloo ranks."""

from collections import Counter
from contextlib import nullcontext
from functools import partial
from typing import ClassVar, Literal

import pytest
import torch
import torch.distributed as dist
from torch.distributed.tensor import DTensor
from torch.utils._python_dispatch import TorchDispatchMode

from lt2.config import ConfigError
from lt2.mixer_configs import FullConfig
from lt2.mixers.attention import Attention
from lt2.train import parallel
from lt2.train.loop import Batch
from lt2.train.loss import next_token_objective
from tests.lt2 import tiny
from tests.lt2.looped_toy import toy
from tests.ranks import run_ranks

L = 6
N = 3


class Collectives(TorchDispatchMode):
    """Counts the c10d operations issued inside the block."""

    def __init__(self):
        super().__init__()
        self.counts = Counter()

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        if func.namespace == "c10d":
            self.counts[func._opname] += 1
        return func(*args, **(kwargs or {}))


def tokens(n):
    return torch.randint(0, 17, (n, L + 1), generator=torch.Generator().manual_seed(1))


def gradients(model, batches, sharding=None, autocast=nullcontext, n_loops=None):
    """Gradients of the loss sum over `batches`, one micro-step each, whole on every rank; the collectives used."""
    objective = next_token_objective(loops_at=lambda step: n_loops)
    with Collectives() as used:
        for index, batch in enumerate(batches):
            with parallel.micro_step(sharding, last=index == len(batches) - 1):
                with autocast():
                    loss = objective(model, Batch(tokens=batch, step=0))[0]
                loss.backward()
    parallel.reduce_replicated_gradients(sharding)
    grads = {name: p.grad for name, p in model.named_parameters() if p.grad is not None}
    whole = {name: g.full_tensor() if isinstance(g, DTensor) else g.clone() for name, g in grads.items()}
    return whole, dict(used.counts)


def build(case):
    layout = case.get("layout", tiny.HYBRID)
    model = tiny.model(layout, n_loops=case["n_loops"]) if case.get("looped_lm") else toy(n_loops=case["n_loops"])
    if case.get("frozen_embedding"):
        model.embed.requires_grad_(False)
    return model


def rank_gradients(case):
    model = build(case)
    parallel.wrap_blocks(model, recompute=case.get("recompute", "none"))
    mesh = parallel.data_mesh("cpu", case.get("shard_workers"))
    sharding = parallel.shard(model, mesh, keep=case.get("keep", True))
    mine = tokens(8).chunk(dist.get_world_size())[dist.get_rank()]
    results = []
    for _ in range(case.get("passes", 1)):
        model.zero_grad()
        grads, counts = gradients(model, mine.chunk(case["micro_steps"]), sharding, n_loops=case.get("run_loops"))
        results.append((grads, counts))
    square = parallel.gradient_square(model, sharding)
    parallel.all_reduce(sharding, square)
    parallel.scale_gradients(model, torch.tensor(0.5))
    held = {name: p.grad for name, p in model.named_parameters() if p.grad is not None}
    local = {name: parallel.local(g) for name, g in held.items()}
    return {"passes": results, "square": square, "half": {k: v.square().sum() for k, v in local.items()}}


CASES = {
    "T=1": {"n_loops": 1, "micro_steps": 1},
    "T=4": {"n_loops": 4, "micro_steps": 1, "passes": 2},
    "T=4, accumulate 4": {"n_loops": 4, "micro_steps": 4, "passes": 2},
    "T=4, accumulate 2, recompute": {"n_loops": 4, "micro_steps": 2, "recompute": "block"},
    "T=4, frozen embedding": {"n_loops": 4, "micro_steps": 2, "frozen_embedding": True},
    "LoopedLM, full + GDN": {"n_loops": 3, "micro_steps": 2, "looped_lm": True, "recompute": "block"},
    "LoopedLM, recompute loops": {"n_loops": 3, "micro_steps": 2, "looped_lm": True, "recompute": "loop"},
    "LoopedLM, selective": {"n_loops": 3, "micro_steps": 2, "looped_lm": True, "recompute": "selective"},
    "LoopedLM, plain FSDP, loops": {
        "n_loops": 3,
        "micro_steps": 2,
        "looped_lm": True,
        "recompute": "loop",
        "keep": False,
    },
    "LoopedLM, a step of 1 of 3 loops": {"n_loops": 3, "micro_steps": 2, "looped_lm": True, "run_loops": 1},
    "a mixer that the step's loops leave out": {
        "n_loops": 2,
        "micro_steps": 2,
        "looped_lm": True,
        "run_loops": 1,
        "layout": {"type": "loops", "mixers": [{"type": "gdn"}, {"type": "full"}]},
    },
    "biases": {
        "n_loops": 2,
        "micro_steps": 2,
        "looped_lm": True,
        "recompute": "selective",
        "layout": {"type": "uniform", "mixer": {"type": "full", "num_kv_heads": 1, "bias": "qkvo"}},
    },
    "T=4, plain FSDP": {"n_loops": 4, "micro_steps": 2, "keep": False},
}


def all_cases():
    return {name: rank_gradients(case) for name, case in CASES.items()}


@pytest.fixture(scope="module")
def sharded():
    return run_ranks(all_cases, 2)


@pytest.mark.parametrize("name", CASES)
def test_gradients_equal_a_single_process(sharded, name):
    case = CASES[name]
    model = build(case)
    expected, _ = gradients(model, [tokens(8)], n_loops=case.get("run_loops"))
    square = parallel.gradient_square(model, None)
    for rank in sharded:
        for grads, _ in rank[name]["passes"]:
            assert grads.keys() == expected.keys()
            for key, value in expected.items():
                torch.testing.assert_close(grads[key], value, rtol=1e-11, atol=1e-12, msg=lambda m, k=key: f"{k}: {m}")
        torch.testing.assert_close(rank[name]["square"], square, rtol=1e-11, atol=0)


def test_scaling_reaches_sharded_and_replicated_gradients(sharded):
    grads, _ = sharded[0]["T=4"]["passes"][-1]
    for key, value in grads.items():
        parts = [rank["T=4"]["half"][key] for rank in sharded]
        total = parts[0] if key.endswith("A_log") else sum(parts)
        torch.testing.assert_close(total, value.square().sum() / 4, rtol=1e-11, atol=1e-24)


@pytest.mark.parametrize("name", [name for name, case in CASES.items() if case.get("keep", True)])
def test_one_gather_and_one_reduction_per_block_whatever_the_loops_and_micro_steps(sharded, name):
    for rank in sharded:
        for _, counts in rank[name]["passes"]:
            units = 1 + len(build(CASES[name]).blocks)
            assert counts == {"_allgather_base_": units, "_reduce_scatter_base_": units}


HYBRID_CASES = {
    "2 x 2, T=4, accumulate 2": {"n_loops": 4, "micro_steps": 2, "passes": 2, "shard_workers": 2},
    "2 x 2, LoopedLM": {"n_loops": 2, "micro_steps": 1, "looped_lm": True, "shard_workers": 2},
}


def hybrid_cases():
    with pytest.raises(ConfigError, match="train.shard_workers 3 does not divide 4 workers; change either"):
        parallel.data_mesh("cpu", 3)
    with pytest.raises(ConfigError, match="train.shard_workers 1"):
        parallel.data_mesh("cpu", 1)
    assert parallel.data_mesh("cpu", 4).ndim == 1
    return {name: rank_gradients(case) for name, case in HYBRID_CASES.items()}


def test_hybrid_sharding_gives_the_same_gradients_and_norm_and_adds_one_all_reduce_per_unit():
    for rank in run_ranks(hybrid_cases, 4):
        for name, case in HYBRID_CASES.items():
            model = build(case)
            expected, _ = gradients(model, [tokens(8)])
            for grads, counts in rank[name]["passes"]:
                for key, value in expected.items():
                    torch.testing.assert_close(grads[key], value, rtol=1e-11, atol=1e-12)
                units = 1 + len(model.blocks)
                assert counts == dict.fromkeys(("_allgather_base_", "_reduce_scatter_base_", "allreduce_"), units)
            square = parallel.gradient_square(model, None)
            torch.testing.assert_close(rank[name]["square"], square, rtol=1e-11, atol=0)


def test_plain_fsdp_is_what_the_loop_aware_mode_saves(sharded):
    _, counts = sharded[0]["T=4, plain FSDP"]["passes"][0]
    assert counts["_allgather_base_"] > 4 * N
    assert counts["_reduce_scatter_base_"] == N + 1


def bf16_dtypes():
    model = toy(dtype=torch.float32)
    sharding = parallel.shard(model, parallel.data_mesh("cpu"), param_dtype=torch.bfloat16)
    seen = {}
    model.blocks[0].register_forward_hook(
        lambda block, args, out: seen.update(up=block.up.weight.dtype, A_log=block.A_log.dtype)
    )
    with torch.autocast("cpu", torch.bfloat16), parallel.micro_step(sharding, last=True):
        loss = next_token_objective()(model, Batch(tokens=tokens(4)))[0]
        loss.backward()  # leaving the micro-step frees what is gathered
    return seen, {name: (p.dtype, p.grad.dtype) for name, p in model.named_parameters()}


def test_bf16_policy_keeps_master_weights_and_decay_parameters_in_fp32():
    for seen, dtypes in run_ranks(bf16_dtypes, 2):
        assert seen == {"up": torch.bfloat16, "A_log": torch.float32}
        assert set(dtypes.values()) == {(torch.float32, torch.float32)}


def test_recomputation_runs_each_block_again_and_leaves_gradients_alone():
    plain, wrapped = toy(), toy()
    parallel.wrap_blocks(wrapped, recompute="block")
    expected, _ = gradients(plain, [tokens(4)])
    grads, _ = gradients(wrapped, [tokens(4)])
    assert [block.calls for block in plain.blocks] == [4] * N
    assert [block.calls for block in wrapped.blocks] == [8] * N
    assert all(torch.equal(grads[name], value) for name, value in expected.items())


@pytest.mark.parametrize("recompute", ["selective", "block", "loop"])
@pytest.mark.parametrize("dtype", [torch.float64, torch.bfloat16])
def test_every_policy_gives_the_same_gradients_bit_for_bit(recompute, dtype):
    plain, wrapped = (tiny.model(n_loops=3).train() for _ in range(2))
    if dtype is torch.bfloat16:
        plain, wrapped = plain.float(), wrapped.float()
    parallel.wrap_blocks(wrapped, recompute=recompute)
    batches = [tiny.tokens(2, 9), tiny.tokens(2, 9, seed=1)]
    autocast = partial(torch.autocast, "cpu", dtype, enabled=dtype is torch.bfloat16)
    # With autocast's cache bf16 gradients are summed over loops before they are fp32; "selective" does without.
    expected, _ = gradients(plain, batches, autocast=partial(autocast, cache_enabled=recompute != "selective"))
    grads, _ = gradients(wrapped, batches, autocast=autocast)
    assert expected.keys() == grads.keys()
    assert all(torch.equal(grads[name], value) for name, value in expected.items())


def test_decays_stay_in_fp32_when_weights_are_cast():
    model = tiny.model().float()
    parallel.cast_weights(model, torch.bfloat16)
    found = {(name.rpartition(".")[2] in ("A_log", "dt_bias"), p.dtype) for name, p in model.named_parameters()}
    assert found == {(True, torch.float32), (False, torch.bfloat16)}


class DroppedConfig(FullConfig):
    module: ClassVar[str] = "Dropped"
    weights: ClassVar[str] = "dropped"
    type: Literal["dropped"] = "dropped"


class Dropped(Attention):
    def forward(self, x, spec, seq, cache):
        y, aux = super().forward(x, spec, seq, cache)
        return torch.dropout(y, 0.5, self.training), aux


@pytest.mark.parametrize("recompute", ["selective", "block", "loop"])
def test_what_a_mixer_draws_is_drawn_again(recompute):
    plain, wrapped = (tiny.model({"type": "uniform", "mixer": DroppedConfig()}).train() for _ in range(2))
    parallel.wrap_blocks(wrapped, recompute=recompute)
    found = []
    for model in (plain, wrapped):
        torch.manual_seed(1)
        found.append(gradients(model, [tiny.tokens(2, 9)])[0])
    assert all(torch.equal(found[1][name], value) for name, value in found[0].items())


def test_loops_cannot_be_recomputed_where_that_would_be_wrong():
    with pytest.raises(ConfigError, match="a model that halts cannot be recomputed; use 'block'"):
        parallel.wrap_blocks(tiny.model(halting={"type": "act"}), recompute="loop")
    with pytest.raises(ConfigError, match="LoopedToy has no run_loop to recompute; use 'block'"):
        parallel.wrap_blocks(toy(), recompute="loop")


def test_one_rank_is_not_sharded():
    assert parallel.data_mesh("cpu") is None
