"""What a plan takes one block's use for, against real tensors and against itself."""

from contextlib import nullcontext
from dataclasses import replace
from functools import partial

import pytest
import torch
from torch._subclasses.fake_tensor import FakeTensorMode

from lt2.config import ModelConfig
from lt2.distill.align import Forced
from lt2.distill.kl import TopK, chunked_topk_kl
from lt2.memory import OUTSIDE, LiveStorages, Memory, keeps_gathered, plan, plan_memory
from lt2.memory.walk import Loss
from lt2.model import build
from lt2.train import parallel
from lt2.train.config import TrainConfig
from lt2.train.loss import chunked_cross_entropy
from lt2.train.objectives import NextTokenConfig
from lt2.train.optim import freeze

L, ROWS = 16, 2
N = ROWS * L
STATE = 4 * N * 64
GATE = {"halting": {"type": "exit_gate"}}
FULL, WINDOW, LA = {"type": "full"}, {"type": "window", "window": 8}, {"type": "la"}


def model_config(layout, **fields):
    sizes = {"vocab_size": 64, "dim": 64, "n_layers": 2, "n_loops": 2, "num_heads": 2, "max_seq_len": L}
    return ModelConfig.model_validate({**sizes, "layout": layout, **fields})


def uniform(mixer):
    return {"type": "uniform", "mixer": mixer}


def traced(config, teacher=None, **fields):
    known = {}
    train = TrainConfig.model_validate({"steps": 1, "global_batch_size": ROWS, **fields})
    plan_memory(config, train, L, device_type="cpu", teacher=teacher, known=known)
    (only,) = known.values()
    return only


@pytest.fixture
def chunks_of_four(monkeypatch):
    monkeypatch.setattr("lt2.memory.trace.rows_per_chunk", lambda device, vocab_size: 4)


def peak_of(loss):
    with LiveStorages() as live, live.over() as found:
        made = loss()
    assert made.requires_grad
    return found[1]


def states(count):
    return torch.zeros(count, 64, requires_grad=True)


@pytest.mark.usefixtures("chunks_of_four")
def test_losses_of_many_chunks_are_known_from_two():
    config = model_config(uniform(FULL), vocab_size=512)
    model, targets = build(config).train(), torch.zeros(2 * N, dtype=torch.int64)
    one, two = states(N), states(2 * N)
    real = peak_of(
        lambda: chunked_cross_entropy(model.final_norm(one), model.head_weight, targets[:N], chunk_rows=4).loss
    )
    assert traced(config).loss.peak == pytest.approx(real, rel=0.05)  # on a CPU the norm keeps its input over its size
    gated = traced(model_config(uniform(FULL), vocab_size=512, **GATE), objective={"type": "exit_gate"}).loss
    shares = torch.ones(2 * N, requires_grad=True)
    real = peak_of(
        lambda: chunked_cross_entropy(two, model.head_weight, targets, token_weights=shares, chunk_rows=4).loss
    )
    assert gated.together == 2 * STATE
    assert gated.peak == pytest.approx(real + gated.states + gated.together, rel=0.02)


@pytest.mark.usefixtures("chunks_of_four")
@pytest.mark.parametrize(("supervision", "used"), [("uniform", 2), ("final", 1)])
def test_a_distillations_loss_holds_as_many_loops_as_count(supervision, used):
    teacher = model_config(uniform(FULL), vocab_size=512)
    kept = {"type": "kept", "attention": FULL, "mixer": LA, "kept": [1]}
    student = teacher.model_copy(update={"layout": model_config(kept).layout})
    objective = {"type": "distill", "k": 4, "supervision": supervision}
    stored, asked = (traced(student, given, objective=objective).loss for given in (None, teacher))
    assert (stored.given, asked.given) == (used * N * 4 * 6, used * STATE)
    topk = lambda loop, start, stop: TopK(  # noqa: E731
        torch.zeros(stop - start, 4), torch.zeros(stop - start, 4, dtype=torch.int64)
    )
    model, loops = build(student), [states(N) for _ in range(used)]
    real = peak_of(
        lambda: chunked_topk_kl(
            loops, model.head_weight, topk, loop_weights=[1.0] * used,
            counted=torch.ones(N, dtype=torch.bool), temperature=1.0, chunk_rows=4,
        ).loss
    )  # fmt: skip
    assert stored.peak == pytest.approx(real + stored.states, rel=0.02)
    model, h = build(teacher).eval(), torch.zeros(ROWS, L, 64)
    seq = model.sequence_info(torch.zeros(ROWS, L, dtype=torch.int64), None, None, None)
    with torch.no_grad(), LiveStorages() as live, live.over() as found:
        model.blocks[0](h, teacher.layout.mixer, seq)
    assert asked.asking == found[1] + 3 * STATE
    assert stored.asking == 0


def left_by_a_forward_pass(config, train, bf16):
    model, objective = build(config).train(), train.objective
    freeze(model, lambda name: objective.lr_scale(name, config))
    parallel.wrap_blocks(model, recompute=train.recompute)
    force = Forced(config.layout.attention, objective.loss) if objective.type == "align" else None
    ids = torch.zeros(ROWS, L, dtype=torch.int64)
    with LiveStorages() as live, torch.autocast("cpu", torch.bfloat16, enabled=bf16):
        output = model(ids, force=force)
        assert output is not None
        return live.live


SHARES = {"halting": {"type": "exit_gate", "frozen_kv": "share"}}


@pytest.mark.parametrize("recompute", ["none", "block"])
@pytest.mark.parametrize("precision", ["fp32", "bf16"])
@pytest.mark.parametrize("fields", [{}, {"halting": {"type": "act"}}, SHARES], ids=["plain", "act", "shares"])
def test_a_loop_more_leaves_what_its_units_keep(fields, precision, recompute):
    train = TrainConfig(steps=1, global_batch_size=ROWS, precision=precision, activation_checkpoint=recompute)
    three, four = (model_config(uniform(FULL), **{"n_loops": n, **fields}) for n in (3, 4))
    plan = traced(four, precision=precision, activation_checkpoint=recompute)
    more, less = (left_by_a_forward_pass(config, train, precision == "bf16") for config in (four, three))
    kept = sum(unit.kept for unit in plan.table[2]) + plan.end.kept
    # Of a first loop's numbers per token ACT makes one less than of the others'.
    assert kept == pytest.approx(more - less, rel=0, abs=4 * N if "act" in str(fields) else 0)


def test_of_shared_keys_a_gradient_for_the_loop_before_waits_in_every_layer():
    plain, shares = (traced(model_config(uniform(FULL), **fields)).loss.state for fields in ({}, SHARES))
    assert (plain, shares) == (STATE, 3 * STATE)


@pytest.mark.parametrize("recompute", ["none", "block"])
@pytest.mark.parametrize("fields", [{}, {"norm_each_loop": True, "loop_residual": False}], ids=["residual", "norm"])
def test_a_loop_more_of_alignment_leaves_what_its_units_keep(fields, recompute):
    both = {"type": "kept", "attention": FULL, "mixer": LA, "kept": [1], "both": True}
    settings = {"objective": {"type": "align"}, "activation_checkpoint": recompute}
    train = TrainConfig.model_validate({"steps": 1, "global_batch_size": ROWS, **settings})
    three, four = (model_config(both, n_loops=n, **fields) for n in (3, 4))
    plan = traced(four, **settings)
    more, less = (left_by_a_forward_pass(config, train, False) for config in (four, three))
    assert sum(unit.kept for unit in plan.table[2]) + plan.end.kept == pytest.approx(more - less, rel=0, abs=16)
    assert plan.loss == Loss(STATE, 0), "no gradient goes back from layer to layer"


@pytest.mark.parametrize("fields", [{}, {"norm_each_loop": True, "loop_residual": False}], ids=["residual", "norm"])
def test_the_end_of_a_loop_needs_what_it_needs_of_real_tensors(fields):
    config = model_config(uniform(FULL), **fields)
    model, h = build(config), torch.zeros(ROWS, L, 64, requires_grad=True)
    with LiveStorages() as live:
        out = h * 1
        with live.over() as forward:
            after = model.end_loop(out, h, 0)
        del out
        with live.over() as backward:
            after.backward(torch.empty_like(after))
    found, ids = traced(config), torch.zeros(ROWS, L, dtype=torch.int64)
    assert (found.end.forward_peak, found.end.backward_peak) == (forward[1], backward[1])
    with LiveStorages() as live, live.over() as start:
        kept = model.embed(ids), model.sequence_info(ids, None, None, None)
    assert (len(kept), found.start) == (2, start[0])


def test_weights_are_cast_once():
    config = model_config(uniform(FULL), dim=256)
    (unit,) = set(traced(config, precision="bf16").table[0])
    matrices = sum(p.numel() for p in build(config).blocks[0].parameters() if p.ndim == 2)
    assert unit.once == 2 * matrices
    assert unit.kept <= unit.forward_peak < unit.kept + unit.once
    assert unit.gradients == 4 * sum(p.numel() for p in build(config).blocks[0].parameters())


def test_weights_that_are_handed_out_in_bf16_are_not_cast_and_kernels_keep_less():
    known = {}
    train = TrainConfig(steps=1, global_batch_size=ROWS, precision="bf16")
    for device in ("cpu", "cuda"):
        plan_memory(model_config(uniform({"type": "gdn"})), train, L, workers=2, device_type=device, known=known)
    here, there = (each.table[0][0] for each in known.values())
    assert (here.once, there.once) == (0, 0)
    assert there.kept < here.kept


def test_a_units_trace_does_not_hang_on_those_before_it():
    alone = [traced(model_config(uniform(mixer))).table[0][0] for mixer in (FULL, WINDOW, LA)]
    hybrid = traced(model_config({"type": "hybrid", "attention": FULL, "mixer": LA, "ratio": "1:1"})).table
    assert hybrid == [[alone[2], alone[0]]] * 2
    loops = traced(model_config({"type": "loops", "mixers": [FULL, WINDOW]})).table
    assert loops == [[alone[0]] * 2, [alone[1]] * 2]


def test_live_storages_counts_a_storage_once_and_only_while_it_lives():
    weight = torch.ones(10)
    with LiveStorages() as live:
        view = weight.view(2, 5)
        made = weight + 1
        other = made.view(2, 5)
        assert live.live == 40
        with live.over() as found:
            torch.cat([other, view])
        assert found == [0, 80]
        del made
        assert live.live == 40
        del other
    assert (live.live, live.peak) == (0, 120)


def test_auto_is_bf16_on_cuda_alone():
    config = model_config(uniform(FULL))

    def plan(device, precision):
        train = TrainConfig(steps=1, global_batch_size=ROWS, precision=precision)
        return plan_memory(config, train, L, device_type=device)

    assert plan("cuda", "auto") == plan("cuda", "bf16") != plan("cuda", "fp32")
    assert plan("cpu", "auto") == plan("cpu", "fp32") != plan("cpu", "bf16")


def test_a_smaller_last_micro_batch_finds_gradients_that_wait():
    config = model_config(uniform(FULL), dim=512)  # whose weights outweigh all else
    one, two = (
        plan_memory(config, TrainConfig(steps=1, global_batch_size=rows, micro_batch_size=2), L, device_type="cpu")
        for rows in (2, 3)
    )
    assert two.gradients > one.gradients


def test_a_teacher_is_held_in_the_precision_of_training():
    config = model_config(uniform(FULL))
    ids, sizes = torch.zeros(ROWS, L, dtype=torch.int64), {"seq_len": L, "size": ROWS, "device_type": "cuda"}
    step = plan.MicroStep(config, NextTokenConfig(), "none", **sizes, bf16=False, sharded=False, shards=1, keep=True)
    autocast = partial(torch.autocast, "cpu", torch.bfloat16)
    with FakeTensorMode(allow_non_fake_inputs=True), LiveStorages() as live:
        whole, _ = plan._teacher(config, step, ids, live, nullcontext)
        half, peak = plan._teacher(config, replace(step, bf16=True), ids, live, autocast)
    assert whole == 4 * sum(p.numel() for p in build(config).parameters()) == 2 * half
    kept = {"type": "kept", "attention": FULL, "mixer": LA, "kept": [1]}
    found = traced(model_config(kept), config, precision="bf16", objective={"type": "distill", "k": 4})
    assert (found.teacher, found.loss.asking) == (half, peak + 3 * STATE)


@pytest.mark.parametrize("objective", ["next_token", "exit_gate", "distill"])
def test_a_loss_is_cut_as_on_the_device(monkeypatch, objective):
    asked = []
    monkeypatch.setattr("lt2.memory.trace.rows_per_chunk", lambda device, vocab_size: asked.append(device) or 4)
    train = TrainConfig.model_validate({"steps": 1, "global_batch_size": ROWS, "objective": {"type": objective}})
    config = model_config(uniform(LA), **(GATE if objective == "exit_gate" else {}))
    plan_memory(config, train, L, device_type="cuda")
    assert asked == ["cuda"]


def test_of_a_sharded_teacher_two_blocks_are_gathered_where_they_are_not_kept():
    teacher = model_config(uniform(FULL))
    kept = {"type": "kept", "attention": FULL, "mixer": LA, "kept": [1]}
    student = teacher.model_copy(update={"layout": model_config(kept).layout})
    settings = {"steps": 1, "global_batch_size": ROWS, "objective": {"type": "distill", "k": 4}}
    asking, held = [], []
    for keep in (True, False):
        known = {}
        train = TrainConfig.model_validate(settings | {"keep_gathered": keep})
        plan_memory(student, train, L, workers=2, device_type="cpu", teacher=teacher, known=known)
        asking += [plan.loss.asking for plan in known.values()]
        held += [plan.teacher for plan in known.values()]
    whole, block = (
        4 * sum(p.numel() for p in part.parameters()) for part in (build(teacher), build(teacher).blocks[0])
    )
    assert asking[1] - asking[0] == 2 * block
    assert held == [whole // 2 + whole, whole // 2 + whole - 2 * block]


def test_whether_gathered_blocks_fit_is_asked_of_the_whole_run(monkeypatch):
    asked, known = [], {}

    def planned(*given, **more):
        asked.append((given, more))
        return Memory(parameters=6)

    monkeypatch.setattr(plan, "plan_memory", planned)
    config, teacher = model_config(uniform(FULL)), model_config(uniform(LA))
    train = TrainConfig(steps=1, global_batch_size=ROWS, keep_gathered="auto")
    for card, fits in ((OUTSIDE + 6, True), (OUTSIDE + 5, False)):
        given = {"workers": 4, "teacher": teacher, "known": known}
        assert keeps_gathered(config, train, L, card_bytes=card, **given) is fits
        assert asked.pop() == ((config, train.model_copy(update={"keep_gathered": True}), L), given)
