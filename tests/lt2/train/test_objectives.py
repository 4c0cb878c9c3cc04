"""Objectives by config: the shipped ones, and one from a file of the user's own."""

from __future__ import annotations

import pickle
from dataclasses import replace
from functools import partial

import pytest
import torch
from pydantic import ValidationError

from lt2.analysis.accounting import objective_flops, training_flops, warmup_flops
from lt2.config import ActHalting, ConfigError, MixerConfig, ModelConfig, UniformLayout
from lt2.distill.student import student_config
from lt2.explain import explain
from lt2.mixer_configs import FullConfig
from lt2.model import build
from lt2.train.config import TrainConfig, check_model
from lt2.train.loop import Batch
from lt2.train.loss import next_token_objective
from lt2.train.objectives import DistillConfig, ExitGateConfig, NextTokenConfig
from tests.lt2 import tiny

OWN = """
from typing import ClassVar, Literal
from lt2.train.loss import next_token_objective
from lt2.train.objectives import ObjectiveConfig

class ScaledConfig(ObjectiveConfig):
    module: ClassVar[str] = "scaled"
    type: Literal["scaled"] = "scaled"
    factor: float = 2.0

def scaled(config, train):
    inner = next_token_objective(document_mask=train.document_mask)
    def objective(model, batch):
        loss, n_tokens, metrics = inner(model, batch)
        return config.factor * loss, n_tokens, metrics
    return objective
"""


def train_config(**fields) -> TrainConfig:
    return TrainConfig(steps=1, global_batch_size=1, **fields)


@pytest.fixture
def model():
    config = ModelConfig(
        vocab_size=20,
        dim=16,
        n_layers=1,
        n_loops=2,
        num_heads=2,
        ffn_hidden=16,
        layout=UniformLayout(mixer=FullConfig()),
    )
    return build(config, seed=0)


def batch() -> Batch:
    return Batch(tokens=torch.arange(14).view(2, 7))


def test_next_token_is_the_default():
    assert isinstance(train_config().objective, NextTokenConfig)
    assert isinstance(train_config(objective={"type": "exit_gate"}).objective, ExitGateConfig)


def test_steps_run_the_depths_they_are_to_be_trained_for():
    net = tiny.model(n_loops=3).train()
    config = train_config(objective={"type": "next_token", "loops": [1, 3, 3]}, seed=5)
    check_model(net.config, config)
    objective = config.objective.build(config)
    ran = []
    for step in range(30):
        loss, n_tokens, metrics = objective(net, replace(batch(), step=step))
        ran.append(int(metrics["mean_loops"] / n_tokens))
        plain = next_token_objective()(net.at_depth(ran[-1]), batch())
        assert torch.equal(loss, plain[0])
        assert "mean_loops" not in plain[2]
    assert all(sorted(ran[turn : turn + 3]) == [1, 3, 3] for turn in range(0, 30, 3))
    assert len({tuple(ran[turn : turn + 3]) for turn in range(0, 30, 3)}) == 3
    other = NextTokenConfig(loops=(1, 3, 3))
    assert [other.loops_at(5, step) for step in range(30)] == ran != [other.loops_at(6, step) for step in range(30)]
    assert torch.equal(objective(net, batch())[0], next_token_objective()(net, batch())[0])  # no training step


@pytest.mark.parametrize("loops", [[1, 2], [4], [3, 4]])
def test_depths_beside_the_models_own_are_refused(loops):
    config = train_config(objective={"type": "next_token", "loops": loops})
    with pytest.raises(ConfigError, match=r"objective\.loops \[.*\]: the largest must be the model's n_loops, 3; "):
        check_model(tiny.config(n_loops=3), config)


@pytest.mark.parametrize("loops", [[], [0, 1], [1.5]])
def test_depths_that_are_none_are_refused(loops):
    with pytest.raises(ValidationError):
        NextTokenConfig.model_validate({"loops": loops})


def test_flops_are_the_mean_of_the_depths():
    model = tiny.config(n_loops=3)
    each = [training_flops(model.model_copy(update={"n_loops": n}), 64) for n in (1, 3, 3)]
    assert objective_flops(model, NextTokenConfig(loops=(1, 3, 3)), 64) == pytest.approx(sum(each) / 3, rel=1e-12)
    assert objective_flops(model, NextTokenConfig(), 64) == each[1]


def test_the_first_steps_of_dsa_read_every_key():
    L, dsa = 64, {"type": "dsa", "top_k": 8, "warmup_steps": 30}
    mixers = {"attention": dsa, "mixer": dsa | {"warmup_steps": 0}}
    model = tiny.config({"type": "hybrid", "ratio": "1:1", **mixers}, n_loops=3, n_layers=4)
    keys = (sum(range(1, L + 1)) - sum(min(8, n) for n in range(1, L + 1))) / L
    layers = 2 * 4 * model.dim * keys
    assert warmup_flops(model, NextTokenConfig(), L) == {30: pytest.approx(3 * layers)}
    assert warmup_flops(model, NextTokenConfig(loops=(1, 3)), L) == {30: pytest.approx(2 * layers)}
    assert warmup_flops(model, NextTokenConfig(), 8) == {30: 0.0}
    assert warmup_flops(tiny.config(), NextTokenConfig(), L) == {}


def test_an_objective_of_ones_own_trains_from_its_file(tmp_path, model):
    file = tmp_path / "scaled.py"
    file.write_text(OWN)
    config = train_config(objective={"type": "scaled", "source": str(file), "factor": 3.0})
    replayed = TrainConfig.model_validate_json(config.model_dump_json())
    assert pickle.loads(pickle.dumps(replayed)) == config
    loss, n_tokens, _ = replayed.objective.build(replayed)(model, batch())
    plain, expected, _ = train_config().objective.build(config)(model, batch())
    assert n_tokens == expected == 12
    torch.testing.assert_close(loss, 3 * plain)
    with torch.no_grad():  # where a bad number came from is looked for so
        assert torch.equal(replayed.objective.build(replayed)(model, batch())[0], loss)


@pytest.mark.parametrize(
    ("old", "new", "message"),
    [
        (
            "n_tokens, metrics\n    return",
            "n_tokens\n    return",
            r"it returned \(a tensor of \(\), a tensor of \(\)\)$",
        ),
        ("config.factor * loss,", "loss.item(),", "the loss is a float$"),
        ("config.factor * loss,", "loss.expand(3),", r"the loss is a tensor of \(3,\)$"),
        ("config.factor * loss,", "loss.detach(),", "the loss has no gradient"),
        (" n_tokens, metrics\n    return", " 7, metrics\n    return", "the number of tokens is a int$"),
        ("metrics\n    return", "{'mine': [1]}\n    return", "mine is a list$"),
        (
            "metrics\n    return",
            "{'n_tokens': n_tokens / 2}\n    return",
            "has a metric 'n_tokens', which the loop uses itself",
        ),
        ("metrics\n    return", "{'request': loss}\n    return", "has a metric 'request'"),
        ("config.factor * loss, n_tokens, metrics", "loss", r"it returned a tensor of \(\)$"),
        ("    return objective", "", "must return the objective, not None"),
    ],
)
def test_what_an_objective_of_ones_own_returns_is_told_against_what_it_must(tmp_path, model, old, new, message):
    assert old in OWN
    (tmp_path / "scaled.py").write_text(OWN.replace(old, new))
    config = train_config(objective={"type": "scaled", "source": str(tmp_path / "scaled.py")})
    with pytest.raises(ConfigError, match=message):
        config.objective.build(config)(model, batch())


@pytest.mark.parametrize("name", ["act", "dsa", "exit gate and dsa"])
def test_auxiliary_losses_are_the_same_whatever_the_micro_batches(name):
    dsa = {"type": "dsa", "top_k": 3, "index_dim": 8, "index_rope_dim": 4}
    halting = {"act": {"type": "act", "ponder_weight": 0.3}, "exit gate and dsa": {"type": "exit_gate"}}.get(name)
    mixer = {"type": "full"} if name == "act" else dsa
    sizes = {"vocab_size": 20, "dim": 16, "n_layers": 1, "n_loops": 3, "num_heads": 2, "ffn_hidden": 16}
    net = build(ModelConfig(**sizes, layout={"type": "uniform", "mixer": mixer}, halting=halting), seed=0).double()
    objective = (ExitGateConfig() if name == "exit gate and dsa" else NextTokenConfig()).build(train_config())
    generator = torch.Generator().manual_seed(0)
    tokens = torch.randint(0, 20, (3, 9), generator=generator)
    mask = torch.rand(3, 9, generator=generator) < torch.tensor([[0.9], [0.2], [0.5]])
    whole = Batch(tokens=tokens, loss_mask=mask)

    def losses_and_gradients(parts):
        net.zero_grad()
        losses = [objective(net, part)[0] for part in parts]
        sum(losses).backward()
        return sum(losses).detach(), [p.grad for p in net.parameters() if p.grad is not None]

    torch.testing.assert_close(
        losses_and_gradients(whole.split(1)), losses_and_gradients([whole]), rtol=1e-9, atol=1e-11
    )


def test_a_metric_of_some_batches_only_is_refused(tmp_path, model):
    """Its mean would be over tokens of others too, and ranks that sum different ones would mix them."""
    some = OWN.replace(", metrics\n", ", metrics | ({'mine': loss} if len(batch.tokens) > 1 else {})\n")
    (tmp_path / "scaled.py").write_text(some)
    objective = train_config(objective={"type": "scaled", "source": str(tmp_path / "scaled.py")}).objective
    for first, then in ([2, 1], [1, 2]):
        learn = objective.build(train_config())
        for rows in (first, first):
            learn(model, batch().split(rows)[0])
        with pytest.raises(ConfigError, match="'scaled' gave its metric 'mine' with some batches only; give it with"):
            learn(model, batch().split(then)[0])


@pytest.mark.parametrize(
    ("objective", "z_loss"), [({"type": "next_token"}, 0.1), ({"type": "exit_gate", "entropy_weight": 0.3}, 0.0)]
)
def test_packed_documents_are_learned_as_each_on_its_own(objective, z_loss):
    net, tokens, steps = tiny.model(halting={"type": "exit_gate"}).train(), tiny.tokens(1, 9), []
    net.register_forward_pre_hook(lambda _, args, kwargs: steps.append(kwargs["step"]), with_kwargs=True)
    config = train_config(objective=objective, document_mask=True, z_loss=z_loss)
    learn = config.objective.build(config)
    packed = Batch(tokens=tokens, doc_ids=torch.tensor([[0] * 4 + [1] * 5]), step=3)
    loss, n_tokens, metrics = learn(net, packed)
    first, second = (learn(net, Batch(tokens=part))[0] for part in (tokens[:, :4], tokens[:, 4:]))
    assert (n_tokens, steps) == (7, [3, None, None])
    torch.testing.assert_close(loss, first + second, rtol=1e-12, atol=0)
    gain = 0.3 * metrics.get("exit_entropy", 0)
    assert (loss + gain > metrics["ce"]) if z_loss else (loss + gain == metrics["expected_ce"])
    assert not any(value.requires_grad for value in metrics.values())


def test_a_misspelt_objective_names_the_nearest():
    with pytest.raises(ValidationError) as error:
        train_config(objective={"type": "next_tokn"})
    assert "did you mean 'next_token'?" in explain(error.value, "train")


def test_a_misspelt_key_names_the_nearest():
    with pytest.raises(ValidationError) as error:
        train_config(objective={"type": "exit_gate", "entropy_wieght": 0.1})
    assert "did you mean 'entropy_weight'?" in explain(error.value, "train")


def test_the_exit_gate_objective_needs_a_gate_and_no_z_loss(model):
    config = train_config(objective=ExitGateConfig())
    with pytest.raises(ConfigError, match="halting"):
        config.objective.build(config)(model, batch())
    config = train_config(objective=ExitGateConfig(), z_loss=1e-4)
    with pytest.raises(ConfigError, match="z_loss"):
        config.objective.build(config)


@pytest.mark.parametrize(
    ("objective", "fields", "reason"),
    [
        ("exit_gate", {}, "a model with halting.type 'exit_gate'"),
        ("exit_gate", {"z_loss": 0.1}, "'exit_gate' has no z-loss"),
        ("align", {"z_loss": 0.1}, "'align' has no z-loss"),
        ("align", {}, "a student that holds its teacher"),
        ("distill", {"z_loss": 0.1}, "'distill' has no z-loss"),
    ],
)
def test_an_objective_that_cannot_train_a_model_is_refused_before_training(model, objective, fields, reason):
    with pytest.raises(ConfigError, match=reason):
        check_model(model.config, train_config(objective={"type": objective}, **fields))


def test_an_exit_gate_is_no_act_and_a_student_without_its_teacher_is_not_aligned(model):
    act = model.config.model_copy(update={"halting": ActHalting()})
    with pytest.raises(ConfigError, match="a model with halting.type 'exit_gate'"):
        check_model(act, train_config(objective=ExitGateConfig()))
    alone = student_config(model.config, MixerConfig.read({"type": "gdn"}), (), both=False)
    with pytest.raises(ConfigError, match="a student that holds its teacher"):
        check_model(alone, train_config(objective={"type": "align"}))
    assert DistillConfig().lr_scale("halt.weight", act) == 0.0, "weight decay would move what has no gradient"


@pytest.mark.parametrize(
    ("objective", "reason"),
    [({"type": "align"}, "nothing to align"), ({"type": "distill", "rest_lr_scale": 0}, "trains new mixers alone")],
)
def test_a_stage_in_which_nothing_would_train_is_refused(model, objective, reason):
    settings, mixer = train_config(objective=objective), MixerConfig.read({"type": "gdn"})
    student = partial(student_config, model.config, mixer, both=objective["type"] == "align")
    check_model(student(()), settings)
    with pytest.raises(ConfigError, match=reason):
        check_model(student(range(model.config.n_layers)), settings)
