"""Random-sample hybrids: draws, both readings, and the K-vote."""

from __future__ import annotations

import math
from types import SimpleNamespace

import pytest
import torch
from torch import nn

from lt2.analysis import accounting
from lt2.config import ConfigError, RandomLayout
from lt2.layout import draw_layers
from lt2.mixers.shared import fused_heads
from lt2.model import LoopedLM, build
from lt2.voting import majority_choice, mean_probability, vote_steps, voted_logprobs
from tests.lt2.tiny import FULL, config, model, tokens

MASK = {"type": "random", "attention": {"type": "full"}, "mixer": {"type": "window", "window": 2}, "fraction": 0.4}
MIXER = {"type": "random", "attention": {"type": "full"}, "mixer": {"type": "gdn"}, "fraction": 0.4}


def expected_logprobs(net: LoopedLM, ids: torch.Tensor, step: int) -> torch.Tensor:
    """The model of one draw, rebuilt as a fixed stack without the random layout's machinery."""
    chosen = draw_layers(net.config.layout, 5, step)
    seq, h = net.sequence_info(ids[:, :-1], None, None, None), net.embed(ids[:, :-1])
    layout = net.config.layout
    for loop in range(3):
        h_in = h
        for layer, block in enumerate(net.blocks):
            h, _ = block(h, layout.attention if layer in chosen else layout.mixer, seq)
        h = h + net.rho[loop] * h_in
    return (net.norm(h) @ net.head.weight.T).log_softmax(-1).gather(-1, ids[:, 1:, None])[..., 0]


@pytest.mark.parametrize("layout", [MASK, MIXER])
def test_each_vote_is_the_model_of_its_own_draw(layout: dict):
    net = model(layout, n_layers=5)
    ids = tokens(2, 9)
    steps = vote_steps(net.config.layout)
    draws = {draw_layers(net.config.layout, 5, step) for step in steps}
    assert len(steps) == 5
    assert len(draws) > 1
    assert all(len(draw) == 2 for draw in draws)
    logprobs = voted_logprobs(net, ids, rows=7)
    for vote, step in enumerate(steps):
        torch.testing.assert_close(logprobs[vote], expected_logprobs(net, ids, step), rtol=1e-12, atol=1e-13)
    packed = voted_logprobs(net, ids, doc_ids=torch.tensor([[0] * 4 + [1] * 5] * 2))
    torch.testing.assert_close(packed[..., 4:], voted_logprobs(net, ids[:, 4:]), rtol=1e-12, atol=1e-13)


def test_draws_are_a_pure_function_of_seed_and_step_and_cover_all_layers():
    layout = RandomLayout.model_validate({**MASK, "fraction": 0.2})
    draws = [draw_layers(layout, 20, step) for step in range(200)]
    assert draws == [draw_layers(layout, 20, step) for step in range(200)]
    counts = torch.bincount(torch.tensor([layer for draw in draws for layer in draw]), minlength=20)
    assert all(len(draw) == 4 for draw in draws)
    # Each layer is drawn 40 times on average with a standard deviation of 5.7; 4 deviations either way.
    assert counts.min() >= 17
    assert counts.max() <= 63
    assert draws != [draw_layers(layout.model_copy(update={"seed": 1}), 20, step) for step in range(200)]


def test_mask_reading_has_exactly_the_parameters_of_full_attention():
    assert accounting.parameters(config(MASK)) == accounting.parameters(config(FULL))


def test_mixer_reading_shares_q_k_v_o_and_decodes():
    net = model(MIXER, n_layers=5)
    names = [name for name in net.state_dict() if name.startswith("blocks.0.mixers.")]
    assert not [name for name in names if ".softmax." in name]
    uniform = config({"type": "uniform", "mixer": {"type": "gdn"}}, n_layers=5)
    assert accounting.parameters(net.config) == accounting.parameters(uniform)

    attention, gdn = net.blocks[0].mixers["softmax"], net.blocks[0].mixers["gdn"]
    y = torch.randn(2, 3, 16, dtype=torch.float64)
    q, k, v = (y @ gdn.qkv_proj.weight.T).split(16, -1)
    for projection, expected in ((attention.q_proj, q), (attention.k_proj, k), (attention.v_proj, v)):
        torch.testing.assert_close(projection(y), expected, rtol=1e-13, atol=1e-13)
    assert torch.equal(attention.o_proj(y), gdn.o_proj(y))

    x = tokens(2, 8)
    cache = net.init_cache(2, 8)
    parts = [net(x[:, :4], cache=cache).hidden, *(net(x[:, i : i + 1], cache=cache).hidden for i in range(4, 8))]
    torch.testing.assert_close(torch.cat(parts, 1), net(x).hidden, rtol=1e-10, atol=1e-11)


def test_shared_projections_get_the_gradient_of_both_mixers():
    net = model(MIXER, n_layers=5).train()
    for step in range(6):
        net(tokens(1, 6), step=step).hidden.sin().sum().backward()
    assert all(block.mixers["gdn"].qkv_proj.weight.grad.abs().min() > 0 for block in net.blocks)


def test_mixer_reading_keeps_its_own_projection_where_shapes_differ():
    gqa = {**MIXER, "attention": {"type": "full", "num_kv_heads": 1}}
    names = set(build(config(gqa)).blocks[0].mixers["softmax"].state_dict())
    assert names == {"k_proj.weight", "v_proj.weight"}


def test_attention_on_shared_projections_has_biases_of_its_own():
    biased = model({**MIXER, "fraction": 1.0, "attention": {"type": "full", "bias": "qkvo"}})
    plain, x = model({**MIXER, "fraction": 1.0}), tokens(2, 9)
    names = {f"{p}_proj.bias" for p in "qkvo"}
    assert set(biased.blocks[0].mixers["softmax"].state_dict()) == names
    plain.load_state_dict(biased.state_dict(), strict=False)
    assert not torch.allclose(biased(x).hidden, plain(x).hidden)
    with torch.no_grad():
        for block in biased.blocks:
            for name in names:
                block.mixers["softmax"].get_parameter(name).zero_()
    torch.testing.assert_close(biased(x).hidden, plain(x).hidden, rtol=1e-12, atol=1e-12)
    fresh = build(config({**MIXER, "attention": {"type": "full", "bias": "qkvo"}})).blocks[0].mixers["softmax"]
    assert all(not parameter.any() for parameter in fresh.parameters())


def test_only_projections_made_like_ours_are_shared():
    def found(projection, heads):
        return fused_heads(SimpleNamespace(qkv_proj=projection, heads=heads), "qkv_proj")

    ours = nn.Linear(8, 24)
    assert found(ours, (2, 4, 4)) == (2, 4, 4)
    assert found(nn.Linear(8, 25), (2, 4, 4)) is found(nn.Identity(), (2, 4, 4)) is None
    assert found(ours, (2, 4)) is found(ours, 2) is None


def test_flops_count_the_shared_weights_where_attention_runs():
    """Attention on shared projections costs what attention on its own projections costs."""
    shared = accounting.forward_flops(config({**MIXER, "fraction": 1.0}), 64)
    assert shared == accounting.forward_flops(config(FULL), 64)


def test_depth_scaled_init_touches_a_shared_output_projection_once():
    plain, scaled = (build(config(MIXER, global_depth_init=on)) for on in (False, True))
    for depth in range(2):
        before, after = (net.blocks[depth].mixers["gdn"].o_proj.weight for net in (plain, scaled))
        torch.testing.assert_close(after, before * (2 * (plain.config.n_layers + 1)) ** -0.5)


def test_majority_wins_even_against_a_higher_sum():
    scores = torch.tensor([[-1.0, -2, -9], [-1.0, -2, -9], [-9.0, -1, -9]])
    assert scores.sum(0).argmax() == 1
    assert majority_choice(scores) == 0


def test_a_tie_goes_to_the_higher_summed_loglikelihood():
    scores = torch.tensor([[-1.0, -2, -9], [-5.0, -1, -9]])
    assert majority_choice(scores) == 1
    assert majority_choice(scores.flip(0)) == 1


def test_mean_probability_averages_probabilities_not_their_logs():
    logprobs = torch.tensor([0.5, 0.1], dtype=torch.float64).log()[:, None]
    assert mean_probability(logprobs).item() == pytest.approx(math.log(0.3), abs=1e-14)
    same = torch.full((5, 2, 3), -700.0, dtype=torch.float64)
    torch.testing.assert_close(mean_probability(same), same[0])


def test_voting_on_a_fixed_layout_is_refused():
    with pytest.raises(ConfigError, match="layout.type 'random'"):
        voted_logprobs(model(FULL), tokens(1, 4))
