"""Planned memory against what the allocator counts in whole training steps, for mixers, depths and policies."""

import gc
from typing import ClassVar, Literal

import pytest
import torch
import torch.distributed as dist
from torch.profiler import ProfilerActivity, profile
from torch.testing._internal.distributed.fake_pg import FakeStore

from lt2.config import MixerConfig, ModelConfig
from lt2.memory import OUTSIDE, keeps_gathered, plan_memory
from lt2.mixer_configs import GatedDeltaNetConfig
from lt2.model import build
from lt2.train import parallel
from lt2.train.config import TrainConfig
from lt2.train.loop import Batch, TrainState, autocast_dtype, train
from lt2.train.optim import build_optimizer, freeze

L, D = 128, 128


def model_config(mixer="gdn", n_loops=2, vocab_size=512, **fields):
    layout = fields.pop("layout", {"type": "uniform", "mixer": {"type": mixer, **SIZES.get(mixer, {})}})
    sizes = {"vocab_size": vocab_size, "dim": D, "n_layers": 3, "n_loops": n_loops, "max_seq_len": L}
    return ModelConfig.model_validate({**sizes, "num_heads": 16 if mixer == "nsa" else 2, "layout": layout, **fields})


SIZES = {"dsa": {"top_k": 32}}
OURO = {"norm_each_loop": True, "sandwich_norm": True, "loop_residual": False}


def train_config(**fields):
    return TrainConfig.model_validate({"steps": 3, "global_batch_size": 4, "log_every": 1} | fields)


def allocated_peak(run):
    """The most bytes that torch's allocator held during run(), above what it held before."""
    gc.collect()  # what goes later must not be counted as freed by run()
    with profile(activities=[ProfilerActivity.CPU], profile_memory=True) as recorded:
        run()
    now = peak = 0
    events = [e for e in recorded.profiler.kineto_results.events() if e.name() == "[memory]"]
    for _, size in sorted((event.start_ns(), event.nbytes()) for event in events):
        now += size
        peak = max(peak, now)
    return peak


def measured(config, settings, teacher=None, topk=None):
    """Weights, moments and the allocator's peak in a step of the loop that finds these, on this rank."""
    model = build(config)
    freeze(model, lambda name: settings.objective.lr_scale(name, config))
    parallel.wrap_blocks(model, recompute=settings.recompute)
    mesh, sharding, ranks = parallel.data_mesh("cpu"), None, 1
    dtype = autocast_dtype(settings.precision, torch.device("cpu"))
    asked = None if teacher is None else build(teacher).eval().requires_grad_(False)
    if asked is not None and dtype is not None:
        parallel.cast_weights(asked, dtype)
    if mesh is not None:
        sharding = parallel.shard(model, mesh, param_dtype=dtype, keep=settings.keep_gathered)
        ranks = dist.get_world_size()
        if asked is not None:
            parallel.shard(asked, mesh, param_dtype=dtype, keep=settings.keep_gathered)
    optimizer = build_optimizer(model, settings.optimizer, lr=1e-4)
    learned = [parameter for group in optimizer.param_groups for parameter in group["params"]]
    for parameter in learned:
        parameter.grad = torch.zeros_like(parameter)
    optimizer.step()
    optimizer.zero_grad()
    generator = torch.Generator().manual_seed(0)
    shape = (settings.global_batch_size // ranks, L + 1)
    batch = Batch(torch.randint(0, config.vocab_size, shape, generator=generator))
    if topk is not None:
        stored = (shape[0], L, config.n_loops, topk)
        batch.topk_logits, batch.topk_ids = torch.zeros(stored).half(), torch.zeros(stored, dtype=torch.int32)
    objective = settings.objective.build(settings, asked)
    limited = settings.model_copy(update={"steps": 1})
    held = sum(_local_bytes(p) for each in (model, asked) if each is not None for p in each.parameters())
    held += sum(_local_bytes(moment) for parameter in learned for moment in optimizer.state[parameter].values())
    held += sum(t.nbytes for t in (batch.topk_logits, batch.topk_ids) if t is not None)
    data = iter(lambda: batch, None)
    return held + allocated_peak(
        lambda: train(model, objective, data, optimizer, lambda s: 1e-4, limited, TrainState(), sharding=sharding)
    )


def _local_bytes(parameter):
    return parallel.local(parameter).nbytes


GATED = {"mixer": "full", "n_loops": 8, "halting": {"type": "exit_gate"}}
CASES = {
    "full": ({"mixer": "full"}, {}),
    "kda, one loop": ({"mixer": "kda", "n_loops": 1}, {}),
    "gdn, selective, accumulate": (
        {"n_loops": 4}, {"activation_checkpoint": "selective", "micro_batch_size": 2}
    ),
    "full, a smaller last micro-batch": ({"mixer": "full"}, {"activation_checkpoint": True, "micro_batch_size": 3}),
    "gdn, blocks, accumulate": ({"n_loops": 4}, {"activation_checkpoint": True, "micro_batch_size": 2}),
    "gdn, blocks, bf16": ({"n_loops": 4}, {"activation_checkpoint": True, "precision": "bf16"}),
    "weights above all, bf16": ({"mixer": "full", "dim": 512}, {"precision": "bf16", "global_batch_size": 1}),
    "gdn, loops": ({"n_loops": 4}, {"activation_checkpoint": "loop"}),
    "hybrid, bf16": (
        {"layout": {"type": "hybrid", "attention": {"type": "window", "window": 32, "bias": "qkvo"},
                    "mixer": {"type": "gla"}, "ratio": "1:1"}},
        {"precision": "bf16"},
    ),
    "dsa, blocks": ({"mixer": "dsa"}, {"activation_checkpoint": True}),
    "a head that outweighs all else": ({"mixer": "full", "vocab_size": 20_000}, {"activation_checkpoint": True}),
    "the same, tied": (
        {"mixer": "full", "vocab_size": 20_000, "tie_embeddings": True},
        {"activation_checkpoint": True, "micro_batch_size": 2},
    ),
    "exit gate, blocks": (GATED, {"objective": {"type": "exit_gate"}, "activation_checkpoint": True}),
    "exit gate, as Ouro, bf16, accumulate": (
        GATED | OURO | {"tie_embeddings": True, "vocab_size": 4_000},
        {"objective": {"type": "exit_gate"}, "precision": "bf16", "micro_batch_size": 2},
    ),
    "exit gate, shared keys": (
        GATED | {"halting": {"type": "exit_gate", "frozen_kv": "share"}},
        {"objective": {"type": "exit_gate"}, "activation_checkpoint": True},
    ),
    "act": ({"n_loops": 4, "halting": {"type": "act"}}, {}),
    "muon": ({"n_loops": 4}, {"optimizer": {"type": "muon"}, "activation_checkpoint": True}),
    "weights above all, muon": (
        {"mixer": "full", "dim": 512}, {"optimizer": {"type": "muon"}, "global_batch_size": 1}
    ),
}  # fmt: skip


@pytest.mark.parametrize("name", CASES)
def test_the_plan_is_within_a_tenth_of_what_is_allocated(name):
    model, settings = CASES[name]
    config, settings = model_config(**model), train_config(**settings)
    assert plan_memory(config, settings, L, device_type="cpu").total == pytest.approx(
        measured(config, settings), rel=0.1
    )


RANK_CASES = {
    "kept": {"activation_checkpoint": True},
    "kept, accumulate": {"activation_checkpoint": True, "micro_batch_size": 1},
    "bf16": {"precision": "bf16", "activation_checkpoint": True},
    "resharded": {"activation_checkpoint": "loop", "keep_gathered": False},
    "exit gate": {"activation_checkpoint": True, "objective": {"type": "exit_gate"}},
    "muon": {"activation_checkpoint": True, "optimizer": {"type": "muon"}},
}


@pytest.fixture
def one_of_two_ranks():
    """Collectives that allocate as any backend's do and are over when they return: gloo's threads hold on to a buffer
    until the machine lets them run, and a peak would depend on its load."""
    dist.init_process_group("fake", store=FakeStore(), rank=0, world_size=2)
    yield
    dist.destroy_process_group()


@pytest.mark.usefixtures("one_of_two_ranks")
@pytest.mark.parametrize("name", RANK_CASES)
def test_the_plan_of_sharded_steps_is_within_a_tenth_too(name):
    gate = {"halting": {"type": "exit_gate"}} if name == "exit gate" else {}
    config, settings = model_config(n_loops=3, **gate), train_config(**RANK_CASES[name])
    plan = plan_memory(config, settings, L, workers=2, device_type="cpu")
    assert plan.total == pytest.approx(measured(config, settings), rel=0.1)


WHOLE = {"layout": {"type": "uniform", "mixer": {"type": "full"}}, "n_loops": 3}
KEPT = {"type": "kept", "attention": {"type": "full"}, "mixer": {"type": "gdn"}, "kept": [1]}
STAGES = {
    "align": ({}, {"objective": {"type": "align"}}, "none"),
    "align, blocks": (OURO, {"objective": {"type": "align"}, "activation_checkpoint": True}, "none"),
    "align, few layers, blocks": (
        {"kept": {"mixer": {"type": "la"}, "kept": [0, 1]}},
        {"objective": {"type": "align"}, "activation_checkpoint": True},
        "none",
    ),
    "distill": ({}, {}, "teacher"),
    "distill, as Ouro": (OURO, {"activation_checkpoint": True, "micro_batch_size": 2}, "teacher"),
    "distill, loops, bf16": ({}, {"activation_checkpoint": "loop", "precision": "bf16"}, "teacher"),
    "distill, final loop, all logits": (
        {"vocab_size": 8_000},
        {"objective": {"type": "distill", "supervision": "final", "k": None}, "activation_checkpoint": True},
        "teacher",
    ),
    "distill, the rest frozen": (
        {"vocab_size": 8_000},
        {
            "objective": {"type": "distill", "supervision": "uniform", "rest_lr_scale": 0.0},
            "activation_checkpoint": True,
        },
        "teacher",
    ),
    "distill, stored top-k": ({}, {"activation_checkpoint": True}, "stored"),
}


def stage(name):
    """(student's config, settings, teacher's config or None, k of its stored top-k or None)"""
    model, settings, given = STAGES[name]
    model, kept = {key: value for key, value in model.items() if key != "kept"}, model.get("kept", {})
    settings = train_config(**({"objective": {"type": "distill", "k": 16, "supervision": "uniform"}} | settings))
    teacher = model_config(**(WHOLE | model))
    both = settings.objective.type == "align"
    student = model_config(**(WHOLE | model | {"layout": KEPT | kept | {"both": both}}))
    return student, settings, teacher if given == "teacher" else None, 16 if given == "stored" else None


@pytest.mark.parametrize("name", STAGES)
def test_the_plan_of_a_distillation_is_within_a_tenth_too(name):
    student, settings, teacher, topk = stage(name)
    plan = plan_memory(student, settings, L, device_type="cpu", teacher=teacher)
    assert plan.total == pytest.approx(measured(student, settings, teacher, topk), rel=0.1)


@pytest.mark.usefixtures("one_of_two_ranks")
@pytest.mark.parametrize("keep", [True, False])
def test_the_plan_of_a_sharded_distillation_is_within_a_tenth_too(keep):
    student, settings, teacher, _ = stage("distill, as Ouro")
    settings = settings.model_copy(update={"keep_gathered": keep, "micro_batch_size": None})
    plan = plan_memory(student, settings, L, workers=2, device_type="cpu", teacher=teacher)
    assert plan.total == pytest.approx(measured(student, settings, teacher), rel=0.1)


def test_every_policy_needs_less_than_the_one_before_measured_and_planned():
    config = model_config(n_loops=4)
    policies = [train_config(activation_checkpoint=name) for name in ("none", "selective", "block", "loop")]
    for peaks in (
        [measured(config, policy) for policy in policies],
        [plan_memory(config, policy, L, device_type="cpu").total for policy in policies],
        [plan_memory(config, policy, L).total for policy in policies],
    ):
        assert peaks == sorted(peaks, reverse=True)
        assert len(set(peaks)) == 4


@pytest.mark.parametrize("mixer", ["full", "window", "mla", "la", "retnet", "mamba2", "gla", "hgrn2", "deltanet",
                                   "gdn", "kda", "nsa", "dsa"])  # fmt: skip
def test_every_mixer_can_be_planned_for_cuda_where_kernels_keep_less_than_pytorch(mixer):
    config, settings = model_config(mixer), train_config(precision="bf16")
    cuda, cpu = (plan_memory(config, settings, L, device_type=device) for device in ("cuda", "cpu"))
    assert cuda.parameters == cpu.parameters
    assert 0 < cuda.activations <= 1.05 * cpu.activations


def test_plans_that_share_what_was_traced_are_those_made_alone():
    """Which layers keep attention is only a matter of order, and loops are traced as blocks are."""
    settings, known = train_config(activation_checkpoint="selective"), {}
    plans = []
    for kept in ([0], [2], [0, 2]):
        student = model_config(layout=KEPT | {"mixer": {"type": "la"}, "kept": kept}, dim=256)
        plans.append(plan_memory(student, settings, L, workers=2, known=known))
        assert plans[-1] == plan_memory(student, settings, L, workers=2)
    assert len(set(plans)) == 3
    assert len(known) == 2
    for name in ("block", "loop"):
        plan_memory(student, train_config(activation_checkpoint=name), L, workers=2, known=known)
    assert len(known) == 3


def test_a_mixer_of_ones_own_may_have_lists_among_its_fields(monkeypatch):
    monkeypatch.setattr(MixerConfig, "kinds", dict(MixerConfig.kinds))

    class Listed(GatedDeltaNetConfig):
        type: Literal["listed"] = "listed"
        weights: ClassVar[str] = "listed"
        widths: list[int] = [1, 2]

    assert plan_memory(model_config("listed"), train_config(), L) == plan_memory(model_config(), train_config(), L)


def test_a_state_of_every_loop_is_all_that_more_loops_cost_when_loops_are_recomputed():
    settings = train_config(activation_checkpoint="loop")
    few, many = (plan_memory(model_config(n_loops=n), settings, L, device_type="cpu") for n in (2, 10))
    assert many.activations - few.activations == 8 * 4 * L * D * 4
    assert many.workspace == few.workspace


def test_gathered_weights_are_kept_where_they_fit():
    config, settings = model_config(), train_config(keep_gathered="auto", global_batch_size=8)
    kept, freed = (
        plan_memory(config, settings.model_copy(update={"keep_gathered": keep}), L, workers=4).total + OUTSIDE
        for keep in (True, False)
    )
    assert freed < kept
    for size, answer in ((kept, True), (kept - 1, False)):
        assert keeps_gathered(config, settings, L, workers=4, card_bytes=size) is answer
    assert keeps_gathered(config, train_config(), L, workers=4, card_bytes=0) is True
    assert keeps_gathered(config, train_config(keep_gathered=False), L, workers=4, card_bytes=1e18) is False


def test_weights_are_shared_by_a_group_of_workers_and_not_at_all_without_sharding():
    config, settings = model_config("full"), train_config(shard_workers=2)
    whole, group, all_four = (
        plan_memory(config, train, L, workers=4, sharded=sharded).parameters
        for train, sharded in ((settings, False), (settings, True), (train_config(), None))
    )
    assert (group, all_four) == (whole // 2, whole // 4)
