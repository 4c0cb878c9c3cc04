"""ACT and the exit gate: weights, exactness at the extremes, batch independence, early-exit decoding."""

from __future__ import annotations

import pytest
import torch
from pydantic import ValidationError
from torch import Tensor

from lt2.generate import generate
from lt2.halting import start
from lt2.model import LoopedLM
from lt2.train.loop import Batch
from lt2.train.loss import next_token_objective
from tests.lt2.tiny import FULL, HYBRID, WINDOW_GDN, config, model, tokens

ACT = {"type": "act", "epsilon": 0.2}
GATE = {"type": "exit_gate", "threshold": 0.6}
SURE = {"type": "exit_gate", "threshold": 1.0}
LAYOUTS = {"full": FULL, "hybrid": HYBRID, "window+gdn": WINDOW_GDN}
MIXERS = {
    "nsa": {"backend": "torch", "block_size": 4, "num_blocks": 4, "window": 3},
    "dsa": {"top_k": 4, "index_rope_dim": 4, "index_dim": 8, "index_heads": 2},
    "mla": {"kv_rank": 8, "rope_head_dim": 4},
    "mamba2": {"head_dim": 8, "d_state": 4},
    **dict.fromkeys(("kda", "deltanet", "hgrn2", "gla", "retnet", "la"), {}),
}
LAYOUTS |= {name: {"type": "uniform", "mixer": {"type": name, **fields}} for name, fields in MIXERS.items()}


def set_bias(net: LoopedLM, value: float) -> LoopedLM:
    with torch.no_grad():
        net.halt.weight.zero_()
        net.halt.bias.fill_(value)
    return net


def without_halting(net: LoopedLM, **fields: object) -> LoopedLM:
    plain = LoopedLM(net.config.model_copy(update={"halting": None, **fields})).double().eval()
    weights = {k: v for k, v in net.state_dict().items() if not k.startswith("halt.")}
    if plain.rho is not None:
        weights["rho"] = weights["rho"][: plain.config.n_loops]
    plain.load_state_dict(weights)
    return plain


@pytest.mark.parametrize("halting", [ACT, GATE])
@pytest.mark.parametrize("training", [True, False])
def test_never_halting_is_the_fixed_depth_model_exactly(halting: dict, training: bool):
    net = set_bias(model(halting=halting), -2000.0).train(training)
    x = tokens(2, 7)
    out = net(x)
    assert torch.equal(out.hidden, without_halting(net)(x).hidden)
    assert (out.loops_used == 3).all()
    assert torch.equal(out.weights, torch.tensor([0.0, 0, 1], dtype=torch.float64).expand(2, 7, 3))


@pytest.mark.parametrize(("halting", "training"), [(ACT, True), (ACT, False), (GATE, False), (SURE, False)])
def test_always_halting_is_the_one_loop_model_exactly(halting: dict, training: bool):
    net = set_bias(model(halting=halting), 2000.0).train(training)
    x = tokens(2, 7)
    out = net(x)
    assert torch.equal(out.hidden, without_halting(net, n_loops=1)(x).hidden)
    assert (out.loops_used == 1).all()


@pytest.mark.parametrize("halting", [ACT, GATE])
@pytest.mark.parametrize("training", [True, False])
def test_one_loop_equals_the_plain_stack_exactly(halting: dict, training: bool):
    net = model(halting=halting, n_loops=1, loop_residual=False).train(training)
    x = tokens(2, 6)
    h = net.embed(x)
    seq = net.sequence_info(x, None, None, None)
    for block, spec in zip(net.blocks, net.schedule[0]):
        h, _ = block(h, spec, seq)
    assert torch.equal(net(x).hidden, net.norm(h))


def test_act_mixes_states_by_graves_weights_and_reports_its_ponder_cost():
    """Against a token-by-token rewrite of ACT's definition, on the trajectory that the eval pass also follows."""
    net = model(halting={**ACT, "ponder_weight": 0.5}).train()
    x = tokens(2, 8)
    states: list[Tensor] = []
    out = net(x)
    net.norm.register_forward_hook(lambda _, inputs, __: states.append(inputs[0]))
    net.eval()(x, per_loop=True)
    loops = states[:3]

    mixed, cost = torch.zeros_like(loops[0]), torch.zeros(2, 8, dtype=torch.float64)
    for b in range(2):
        for t in range(8):
            total = 0.0
            for loop in range(3):
                p = torch.sigmoid(net.halt(loops[loop][b, t])).item()
                stops = total + p >= 1 - 0.2 or loop == 2
                weight = 1 - total if stops else p
                mixed[b, t] += weight * loops[loop][b, t]
                total += p
                if stops:
                    cost[b, t] = loop + 1 + weight
                    assert out.loops_used[b, t] == loop + 1
                    break
    assert out.loops_used.unique().numel() > 1, "the draw should make some tokens stop early"
    torch.testing.assert_close(out.hidden, torch.nn.functional.rms_norm(mixed, (16,), net.norm.weight, 1e-6))
    torch.testing.assert_close(out.aux["ponder"], 0.5 * cost.mean(1))
    torch.testing.assert_close(out.weights.sum(-1), torch.ones(2, 8, dtype=torch.float64))


def test_act_inference_freezes_the_state_a_token_halted_with():
    net = model(halting=ACT)
    out = net(tokens(2, 8), per_loop=True)
    for loop in range(3):
        halted = out.loops_used <= loop + 1
        assert torch.equal(out.loops[loop][halted], out.hidden[halted])
    assert out.aux == {}


def test_ponder_cost_reaches_the_head_with_a_correct_gradient():
    net = model(halting={**ACT, "ponder_weight": 1.0}).train()
    x = tokens(1, 5)
    net(x).aux["ponder"].mean().backward()
    slope = net.halt.bias.grad.item()
    values = []
    for step in (1e-6, -1e-6):
        with torch.no_grad():
            net.halt.bias.add_(step)
            values.append(net(x).aux["ponder"].mean().item())
            net.halt.bias.sub_(step)
    assert slope == pytest.approx((values[0] - values[1]) / 2e-6, rel=1e-6)
    assert slope < 0, "halting sooner must be cheaper"


def test_a_sure_gate_has_the_same_gradient_under_autocast():
    gradients = []
    for enabled in (False, True):
        net = model(halting={**GATE, "threshold": 1.0}).float().train()
        torch.nn.init.zeros_(net.halt.weight)
        torch.nn.init.constant_(net.halt.bias, 7.0)
        depth = start(net.config.halting, net.halt, torch.ones(1, 2, net.config.dim), training=True)
        with torch.autocast("cpu", torch.bfloat16, enabled=enabled):
            for loop in range(3):
                depth.after_loop(torch.ones(1, 2, net.config.dim), last=loop == 2)
        (torch.stack(depth.weights, -1) * torch.tensor([1.0, 2.0, 3.0])).sum().backward()
        gradients.append(float(net.halt.bias.grad))
    assert gradients[0] != 0
    assert gradients[0] == gradients[1]


def test_gate_distribution_and_exit_follow_the_cumulative_probability():
    never = model(halting=SURE)
    x = tokens(2, 8)
    out = never(x, per_loop=True)
    states = without_halting(never)(x, per_loop=True).loops
    assert torch.equal(out.hidden, states[-1])

    train = never.train()(x)
    assert torch.equal(train.weights, out.weights)
    torch.testing.assert_close(out.weights.sum(-1), torch.ones(2, 8, dtype=torch.float64))

    early = model(halting=GATE)
    exits = early(x)
    first = out.weights[..., 0]
    assert torch.equal(exits.loops_used == 1, first >= 0.6)
    assert torch.equal(exits.weights[..., 0], torch.where(first >= 0.6, 1.0, first))
    assert exits.loops_used.unique().numel() > 1

    learning = early.train()(x, per_loop=True)
    assert torch.equal(learning.weights, out.weights), "in training nothing exits, whatever the threshold"
    assert all(torch.equal(each, state) for each, state in zip(learning.loops, states, strict=True))


@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("frozen_kv", ["propagate", "share"])
@pytest.mark.parametrize("halting", [ACT, GATE])
def test_early_exit_decoding_equals_the_whole_sequence_pass(layout: str, frozen_kv: str, halting: dict):
    net = model(LAYOUTS[layout], halting={**halting, "frozen_kv": frozen_kv})
    x = tokens(3, 12)
    whole = net(x)
    cache = net.init_cache(3, 12)
    lengths = torch.tensor([5, 3, 4])
    padded = x[:, :5].clone()
    net(padded, cache=cache, lengths=lengths)
    for step in range(6):
        at = lengths + step
        out = net(x.gather(1, at[:, None]), cache=cache)
        torch.testing.assert_close(out.hidden[:, 0], whole.hidden[torch.arange(3), at], rtol=1e-10, atol=1e-12)
        assert torch.equal(out.loops_used[:, 0], whole.loops_used[torch.arange(3), at])
    assert whole.loops_used.unique().numel() > 1


@pytest.mark.parametrize("halting", [ACT, GATE])
def test_a_model_in_training_mode_decodes_as_in_inference(halting: dict):
    net = model(halting=halting)
    prompts = tokens(3, 5).tolist()
    expected = generate(net, prompts, max_new_tokens=8)
    x = tokens(2, 6)
    out = net(x, cache=net.init_cache(2, 6))
    net.train()
    again = net(x, cache=net.init_cache(2, 6))
    assert torch.equal(again.hidden, out.hidden)
    assert "ponder" not in again.aux
    assert generate(net, prompts, max_new_tokens=8) == expected


@pytest.mark.parametrize("frozen_kv", ["propagate", "share"])
def test_a_row_does_not_depend_on_the_rest_of_the_batch(frozen_kv: str):
    net = model(halting={**ACT, "frozen_kv": frozen_kv})
    x = tokens(4, 9)
    together = net(x)
    for row in range(4):
        alone = net(x[row : row + 1])
        torch.testing.assert_close(alone.hidden[0], together.hidden[row], rtol=1e-12, atol=1e-13)
        assert torch.equal(alone.loops_used[0], together.loops_used[row])


def test_policies_differ_only_once_a_token_has_halted():
    x = tokens(2, 9)
    outs = [model(FULL, halting={**ACT, "frozen_kv": policy})(x, per_loop=True) for policy in ("propagate", "share")]
    assert torch.equal(outs[0].loops[0], outs[1].loops[0])
    assert not torch.allclose(outs[0].hidden, outs[1].hidden)


def test_share_gives_later_loops_the_keys_of_the_last_loop():
    net = model(FULL, halting={**ACT, "frozen_kv": "share"})
    x = tokens(2, 9)
    cache = net.init_cache(2, 9)
    used = net(x, cache=cache).loops_used
    assert (used < 3).any()
    for layer in range(2):
        for loop in range(1, 3):
            halted = used <= loop
            later, earlier = (cache.layers[i][layer]["k"][halted] for i in (loop, loop - 1))
            torch.testing.assert_close(later, earlier, rtol=0, atol=1e-13)


def test_a_fully_halted_batch_skips_the_ffn_of_later_loops():
    net = set_bias(model(halting=ACT), 2000.0)
    calls = []
    net.blocks[0].ffn.register_forward_hook(lambda *_: calls.append(1))
    cache = net.init_cache(2, 4)
    net(tokens(2, 3), cache=cache)
    assert len(calls) == 1


@pytest.mark.parametrize(
    "halting", [{"type": "act", "epsilon": 1.0}, {"type": "exit_gate", "threshold": 0.0}, {"type": "exit_gate", "q": 1}]
)
def test_bad_settings_fail_at_validation(halting: dict):
    with pytest.raises(ValidationError):
        config(halting=halting)


def test_training_logs_the_mean_number_of_loops_of_what_is_learned():
    net, ids = model(halting=ACT).train(), tokens(2, 8)
    mask = torch.arange(8) < torch.tensor([[8], [4]])
    _, n_tokens, metrics = next_token_objective()(net, Batch(tokens=ids, loss_mask=mask))
    used = net(ids[:, :-1]).loops_used[mask[:, 1:]].double()
    assert 1 < used.mean() < 3
    assert metrics["mean_loops"].item() / n_tokens.item() == pytest.approx(used.mean().item(), rel=1e-6)
    assert metrics["ponder"].item() > 0
