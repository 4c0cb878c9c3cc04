"""What a plan takes one block's use for, against real tensors and against itself."""

import pytest
import torch

from lt2.config import ModelConfig
from lt2.memory import LiveStorages, plan_memory
from lt2.model import build
from lt2.train import parallel
from lt2.train.config import TrainConfig
from lt2.train.loss import chunked_cross_entropy

L, ROWS = 16, 2
FULL, WINDOW, LA = {"type": "full"}, {"type": "window", "window": 8}, {"type": "la"}


def model_config(layout, **fields):
    sizes = {"vocab_size": 64, "dim": 64, "n_layers": 2, "n_loops": 2, "num_heads": 2, "max_seq_len": L}
    return ModelConfig.model_validate({**sizes, "layout": layout, **fields})


def uniform(mixer):
    return {"type": "uniform", "mixer": mixer}


def traced(config, **fields):
    known = {}
    train = TrainConfig.model_validate({"steps": 1, "global_batch_size": ROWS, **fields})
    plan_memory(config, train, L, device_type="cpu", known=known)
    (only,) = known.values()
    return only


def test_the_loss_of_many_chunks_is_known_from_two(monkeypatch):
    monkeypatch.setattr("lt2.memory.trace.rows_per_chunk", lambda device, vocab_size: 4)
    config = model_config(uniform(FULL), vocab_size=512)
    found, model = traced(config).loss, build(config).train()
    h = torch.zeros(ROWS * L, config.dim, requires_grad=True)
    targets = torch.zeros(ROWS * L, dtype=torch.int64)
    with LiveStorages() as live, live.over() as real:
        loss = chunked_cross_entropy(model.final_norm(h), model.head_weight, targets, chunk_rows=4).loss
    assert loss.requires_grad
    assert found.peak == pytest.approx(real[1], rel=0.05)


def left_by_a_forward_pass(config, train, bf16):
    model = build(config).train()
    parallel.wrap_blocks(model, recompute=train.recompute)
    ids = torch.zeros(ROWS, L, dtype=torch.int64)
    with LiveStorages() as live, torch.autocast("cpu", torch.bfloat16, enabled=bf16):
        output = model(ids)
        assert output is not None
        return live.live


SHARES = {"halting": {"type": "exit_gate", "frozen_kv": "share"}, "n_layers": 1}


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
    assert kept == pytest.approx(more - less, rel=0, abs=4 * ROWS * L if "act" in str(fields) else 0)


def test_weights_are_cast_once():
    config = model_config(uniform(FULL), dim=256)
    (unit,) = set(traced(config, precision="bf16").table[0])
    matrices = sum(p.numel() for p in build(config).blocks[0].parameters() if p.ndim == 2)
    assert unit.once == 2 * matrices
    assert unit.kept <= unit.forward_peak < unit.kept + unit.once
    assert unit.gradients == 4 * sum(p.numel() for p in build(config).blocks[0].parameters())


def test_a_units_trace_does_not_hang_on_those_before_it():
    alone = [traced(model_config(uniform(mixer))).table[0][0] for mixer in (FULL, WINDOW, LA)]
    hybrid = traced(model_config({"type": "hybrid", "attention": FULL, "mixer": LA, "ratio": "1:1"})).table
    assert hybrid == [[alone[2], alone[0]]] * 2
    loops = traced(model_config({"type": "loops", "mixers": [FULL, WINDOW]})).table
    assert loops == [[alone[0]] * 2, [alone[1]] * 2]
