"""What each stage minimises, trains and leaves alone."""

import pytest
import torch
from torch.utils.flop_counter import FlopCounterMode

from lt2.analysis.accounting import objective_flops
from lt2.config import ConfigError, MixerConfig
from lt2.distill.align import Forced, align_objective, update_loss
from lt2.distill.logits import distill_objective, loop_weights
from lt2.distill.student import convert, start_from
from lt2.layout import layout
from lt2.train import parallel
from lt2.train.config import TrainConfig
from lt2.train.loop import Batch
from lt2.train.objectives import AlignConfig, DistillConfig, NextTokenConfig, ObjectiveConfig
from lt2.train.optim import adamw
from tests.lt2 import tiny

GDN = MixerConfig.read({"type": "gdn", "conv_size": 0})
OURO = {"sandwich_norm": True, "norm_each_loop": True, "loop_residual": False, "halting": {"type": "exit_gate"}}
STEPS = 40


def train(objective, **fields):
    return TrainConfig(steps=STEPS, global_batch_size=2, objective=objective, **fields)


def teacher(**fields):
    return tiny.model(tiny.FULL, n_layers=3, **fields)


def pair(kept=(), *, both=False, **fields):
    net = teacher(**fields)
    student = convert(net, GDN, kept, both=both).double().train()
    start_from(student, net)  # again: the first was in fp32
    return net, student


def batch(**fields):
    return Batch(tokens=tiny.tokens(2, 11), **fields)


def freeze(model, objective):
    for name, parameter in model.named_parameters():
        parameter.requires_grad_(objective.lr_scale(name, model.config) > 0)


def trained(model):
    return {name for name, p in model.named_parameters() if p.grad is not None and p.grad.abs().max() > 0}


# stage 1


@pytest.mark.parametrize("kind", ["mse", "l2"])
@pytest.mark.parametrize("fields", [{}, OURO], ids=["plain", "ouro"])
def test_alignment_is_the_mean_regression_of_every_loop_and_layer_on_the_teachers_states(fields, kind):
    net, student = pair(both=True, **fields)
    seen = []

    def record(loop, layer, block, spec, seq, entry, h):
        x = block.mixer_norm(entry)
        ours = student.blocks[layer]
        target = block.mixer_post_norm(block.mixers["softmax"](x, spec, seq, None)[0])
        found = ours.mixer_post_norm(ours.mixers["gdn"](x, GDN, seq, None)[0])
        difference = target - found
        mse, l2 = difference.square().mean(), difference.norm(dim=-1).mean() / 4  # √dim
        seen.append({"mse": mse, "l2": l2}[kind])

    tokens = batch()
    net(tokens.tokens[:, :-1], record=record)
    loss, n_tokens, metrics = align_objective(loss=kind)(student, tokens)
    table = torch.stack(seen).view(3, 3)  # loops, layers
    assert n_tokens == 2 * 10
    torch.testing.assert_close(loss / n_tokens, table.mean(), rtol=1e-10, atol=0)
    for loop in range(3):
        torch.testing.assert_close(metrics[f"align_loop_{loop}"] / n_tokens, table[loop].mean(), rtol=1e-10, atol=0)
    for layer in range(3):
        mean = table[:, layer].mean()
        torch.testing.assert_close(metrics[f"align_layer_{layer}"] / n_tokens, mean, rtol=1e-10, atol=0)


def test_alignment_trains_the_new_mixers_and_nothing_else():
    _, student = pair(both=True, **OURO)
    freeze(student, AlignConfig())
    loss, _, _ = align_objective()(student, batch())
    loss.backward()
    expected = {name for name, _ in student.named_parameters() if ".mixers.gdn." in name}
    assert trained(student) == expected
    assert {name for name, p in student.named_parameters() if p.requires_grad} == expected


def test_no_gradient_passes_between_layers_or_loops_in_alignment():
    _, student = pair(both=True)
    first = dict(student.blocks[0].mixers["gdn"].named_parameters())
    states = torch.zeros(2, 10, 16, dtype=torch.float64, requires_grad=True)
    forced, losses = Forced(student.config.layout.attention, "mse"), []

    def watch(block, spec, seq, x):
        update, loss = forced(block, spec, seq, x)
        losses.append(loss)
        return update, loss

    student(batch().tokens[:, :-1], force=watch)
    assert len(losses) == 9
    for place, loss in enumerate(losses):
        grads = torch.autograd.grad(loss, [*first.values(), states], allow_unused=True, retain_graph=True)
        reached = any(grad is not None for grad in grads)
        assert reached == (place % 3 == 0)  # layer 0 only, in each loop


@pytest.mark.parametrize("config", [AlignConfig(), DistillConfig(k=5)], ids=lambda config: config.type)
def test_a_new_mixers_auxiliary_loss_is_learned_in_every_stage(config):
    net, sparse = teacher(), {"type": "dsa", "top_k": 3, "index_dim": 8, "index_rope_dim": 4, "warmup_steps": 0}
    student = convert(net, MixerConfig.read(sparse), both=config.type == "align").double().train()
    freeze(student, config)
    loss, n_tokens, metrics = config.build(train(config), net)(student, batch(step=5))
    loss.backward()
    assert {name for name, _ in student.named_parameters() if ".indexer." in name} <= trained(student)
    if config.type == "distill":
        parts = [metrics[f"kl_loop_{loop}"] * w for loop, w in enumerate(loop_weights(config, 3, 5, STEPS))]
        torch.testing.assert_close(loss, sum(parts) + metrics["dsa"], rtol=1e-10, atol=0)


@pytest.mark.parametrize("mixer", [GDN, MixerConfig.read({"type": "mla", "kv_rank": 8, "rope_head_dim": 4})])
def test_flops_of_alignments_projections_are_those_torch_counts(mixer):
    student, objective, length = convert(teacher(), mixer, (1,), both=True).train(), AlignConfig(), 10
    freeze(student, objective)
    with FlopCounterMode(display=False) as counter:
        objective.build(train(objective))(student, batch())[0].backward()
    counted = counter.get_flop_counts()["Global"]
    config, attention = student.config, student.config.layout.attention
    mixing = 3 * attention.sequence_flops(config.dims, length) + 3 * 2 * mixer.sequence_flops(config.dims, length)
    projections = objective_flops(config, objective, length) - config.n_loops * mixing
    assert counted[torch.ops.aten.mm] == pytest.approx(2 * length * projections, rel=1e-12)


def test_flops_of_a_stage_that_freezes_the_rest_leave_its_gradients_out():
    net, objective = teacher(), DistillConfig(k=5, supervision="final", rest_lr_scale=0)
    student = convert(net, GDN, (1,)).train()
    freeze(student, objective)
    with FlopCounterMode(display=False) as counter:
        objective.build(train(objective), net)(student.double(), batch())[0].backward()
    mixing = [
        sum(spec.sequence_flops(config.dims, 10) for row in layout(config) for spec in row)
        for config in (student.config, net.config)
    ]
    projections = objective_flops(student.config, objective, 10, teacher=net.config) - 3 * mixing[0] - mixing[1]
    # The first loop's first mixer needs no gradient of its input either; we count that one.
    new = student.blocks[0].mixers["gdn"].named_parameters()
    below = 2 * sum(p.numel() for name, p in new if p.dim() > 1 and not name.startswith("o_proj"))
    counted = counter.get_flop_counts()["Global"][torch.ops.aten.mm]
    assert counted == pytest.approx(2 * 10 * (projections - below), rel=1e-12)


def test_kept_layers_are_not_aligned_and_the_rest_weighs_alike():
    net, student = pair((1,), both=True)
    loss, n_tokens, metrics = align_objective()(student, batch())
    assert {name for name in metrics if "layer" in name} == {"align_layer_0", "align_layer_2"}
    mean = (metrics["align_layer_0"] + metrics["align_layer_2"]) / 2
    torch.testing.assert_close(loss, mean, rtol=1e-12, atol=0)
    with pytest.raises(ConfigError, match="every layer keeps its attention"):
        align_objective()(pair((0, 1, 2), both=True)[1], batch())
    with pytest.raises(ConfigError, match="both: true"):
        align_objective()(net, batch())


def test_update_losses_on_known_numbers():
    target, found = torch.zeros(1, 2, 4), torch.tensor([[[3.0, 4.0, 0, 0], [0, 0, 0, 0]]])
    assert update_loss(target, found, "mse") == 25 / 8
    assert update_loss(target, found, "l2") == (5 / 2) / 2


# stages 2 and 3


def test_loop_weights_follow_the_schedule_and_sum_to_one():
    config = DistillConfig()
    at = lambda step: loop_weights(config, 4, step, 1000)  # noqa: E731
    assert at(0) == (0, 0, 0, 1)
    assert at(25) == (0.125, 0.125, 0.125, 0.625)
    assert at(50) == at(499) == (0.25, 0.25, 0.25, 0.25)
    assert at(500) == at(999) == at(1000) == (0, 0, 0, 1)
    for step in range(1001):
        assert sum(at(step)) == pytest.approx(1, abs=1e-15)
        assert min(at(step)) >= 0
    assert loop_weights(DistillConfig(supervision="uniform"), 4, 900, 1000) == (0.25,) * 4
    assert loop_weights(DistillConfig(supervision="final"), 4, 100, 1000) == (0, 0, 0, 1)
    assert loop_weights(DistillConfig(ramp=0), 2, 0, 10) == (0.5, 0.5)
    assert loop_weights(config, 1, 3, 10) == (1,)


@pytest.mark.parametrize("step", [1, 10, 30])
def test_the_loss_is_the_weighted_kl_of_every_loop(step):
    net, student = pair((1,))
    config = DistillConfig(k=23)
    doc_ids = torch.tensor([[0] * 6 + [1] * 5, [0] * 9 + [-1] * 2])
    given = batch(doc_ids=doc_ids, step=step)
    objective = distill_objective(config, train(config, document_mask=True), net)
    loss, n_tokens, metrics = objective(student, given)
    ids, docs = given.tokens[:, :-1], doc_ids[:, :-1]
    counted = (doc_ids[:, 1:] >= 0) & (doc_ids[:, 1:] == docs)
    assert n_tokens == counted.sum()
    weights = loop_weights(config, 3, step, STEPS)
    total = 0.0
    outputs = [model(ids, doc_ids=docs, per_loop=True).loops for model in (net, student)]
    for loop, weight in enumerate(weights):
        z_t, z_s = (model.logits(states[loop]) for model, states in zip((net, student), outputs))
        kl = (z_t.softmax(-1) * (z_t.log_softmax(-1) - z_s.log_softmax(-1))).sum(-1)[counted].sum()
        total = total + weight * kl
        if weight:
            name = f"kl_loop_{loop}" if step < 20 else "kl"
            torch.testing.assert_close(metrics[name], kl, rtol=1e-10, atol=1e-12)
    torch.testing.assert_close(loss, total, rtol=1e-10, atol=1e-12)


def test_distillation_reaches_every_parameter_but_the_exit_gate_and_never_the_teacher():
    net, student = pair((1,), **OURO)
    config = DistillConfig(k=5)
    freeze(student, config)
    loss, _, _ = distill_objective(config, train(config), net)(student, batch(step=5))
    loss.backward()
    everything = {name for name, _ in student.named_parameters()}
    assert trained(student) == everything - {"halt.weight", "halt.bias"}
    assert not trained(net)
    assert not any(p.requires_grad for p in net.parameters())


def test_a_teacher_left_in_training_mode_answers_as_in_inference():
    net, student = pair((1,), **{**OURO, "halting": {"type": "exit_gate", "threshold": 0.3}})
    config, ids = DistillConfig(k=5), batch().tokens[:, :-1]
    assert not torch.equal(net.train()(ids).hidden, net.eval()(ids).hidden)
    ask = distill_objective(config, train(config), net)
    expected = ask(student, batch(step=5))[0]
    net.train()
    assert torch.equal(ask(student, batch(step=5))[0], expected)


def test_frozen_rest_and_its_slower_rate():
    _, student = pair((1,))
    freeze(student, DistillConfig(rest_lr_scale=0))
    assert {name.split(".")[3] for name, p in student.named_parameters() if p.requires_grad} == {"gdn"}
    _, holding = pair((1,), both=True)
    freeze(holding, AlignConfig())  # the mixer that layer 1 holds beside its attention never runs
    assert {tuple(name.split(".")[1:4:2]) for name, p in holding.named_parameters() if p.requires_grad} == {
        ("0", "gdn"), ("2", "gdn")
    }  # fmt: skip
    freeze(student, DistillConfig())
    config = DistillConfig()
    groups = adamw(student, lr=1e-4, lr_scale=lambda name: config.lr_scale(name, student.config)).param_groups
    names = {id(p): name for name, p in student.named_parameters()}
    scales = {names[id(p)]: group["lr_scale"] for group in groups for p in group["params"]}
    assert {scales[name] for name in scales if ".mixers.gdn." in name} == {1.0}
    assert {scales[name] for name in scales if ".mixers.gdn." not in name} == {0.07}


def test_a_cached_top_k_gives_the_teachers_loss():
    net, student = pair((1,))
    config = DistillConfig(k=4, supervision="uniform")
    with torch.no_grad():
        states = net(batch().tokens[:, :-1], per_loop=True).loops
        found = [net.logits(state).topk(6, dim=-1) for state in states]
    logits, ids = (torch.stack([getattr(f, name) for f in found], 2) for name in ("values", "indices"))
    cached = batch(step=3, topk_logits=logits, topk_ids=ids.int())
    asked, _, _ = distill_objective(config, train(config), net)(student, batch(step=3))
    given, _, metrics = distill_objective(config, train(config), None)(student, cached)
    torch.testing.assert_close(given, asked, rtol=1e-6, atol=0)  # the cache is read in fp32
    parts = cached.split(1)
    assert parts[1].topk_ids.shape == (1, 10, 3, 6)
    last = batch(step=3, topk_logits=logits[:, :, 2:], topk_ids=ids[:, :, 2:].int())
    final = DistillConfig(k=4, supervision="final")
    only, _, _ = distill_objective(final, train(final), None)(student, last)
    torch.testing.assert_close(only, metrics["kl_loop_2"], rtol=1e-12, atol=0)


def test_mistakes_are_named():
    net, student = pair((1,))
    run = lambda config, given, who=None: distill_objective(config, train(config), who)(student, given)  # noqa: E731
    with pytest.raises(ConfigError, match="k 24 exceeds the vocabulary of 23"):
        run(DistillConfig(k=24), batch(), net)
    with pytest.raises(ConfigError, match="neither a teacher nor the teacher's top-k"):
        run(DistillConfig(k=2), batch())
    with pytest.raises(ConfigError, match="the teacher runs 2 loops and the student 3"):
        run(DistillConfig(k=2), batch(), teacher(n_loops=2))
    stored = {"topk_logits": torch.zeros(2, 10, 1, 3), "topk_ids": torch.zeros(2, 10, 1, 3, dtype=torch.int32)}
    with pytest.raises(ConfigError, match="k 4 exceeds the 3 tokens of the teacher's stored top-k"):
        run(DistillConfig(k=4), batch(**stored))
    with pytest.raises(ConfigError, match="stored top-k has 1 of 3 loops"):
        run(DistillConfig(k=2, supervision="uniform"), batch(**stored))


def test_objectives_are_configs():
    for config in (AlignConfig(loss="l2"), DistillConfig(k=None, temperature=2.0)):
        assert ObjectiveConfig.read(config.model_dump()) == config
    assert NextTokenConfig().lr_scale("blocks.0.mixers.gdn.o_proj.weight", tiny.config()) == 1.0
    assert callable(AlignConfig().build(train(AlignConfig())))


@pytest.mark.parametrize("recompute", ["selective", "block", "loop"])
def test_recomputed_blocks_give_the_same_gradients(recompute):
    grads = []
    for how in ("none", recompute):
        _, student = pair(both=True)
        freeze(student, AlignConfig())
        parallel.wrap_blocks(student, recompute=how)
        loss, _, metrics = align_objective()(student, batch())
        loss.backward()
        assert len(metrics) == 6
        grads.append({name: p.grad for name, p in student.named_parameters() if p.grad is not None})
    assert grads[0].keys() == grads[1].keys()
    for name, grad in grads[0].items():
        torch.testing.assert_close(grads[1][name], grad, rtol=1e-12, atol=1e-14)
