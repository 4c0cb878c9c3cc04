"""The same text scores the same however it is run: on every mixer family."""

import pytest
import torch

from lt2.config import ModelConfig
from lt2.generate import generate
from lt2.model import LoopedLM
from lt2_platform.evaluate.harness.scoring import LoopedScorer, Pair
from tests.lt2.mixers.samples import config, shipped_types
from tests.platform.evaluate.tiny import model

PAIRS = [Pair(tuple(range(1, 3 + n)), tuple(range(5, 7 + n % 4))) for n in (0, 4, 9, 21)]


def uniform(mixer, **fields):
    return {"dim": 32, "layout": {"type": "uniform", "mixer": config(mixer).model_dump()}, **fields}


def decoded(net: LoopedLM, pair: Pair) -> float:
    """Log-likelihood by feeding the continuation token by token through the cache."""
    cache = net.init_cache(1, len(pair.context) + len(pair.continuation))
    hidden = net(torch.tensor([pair.context]), cache=cache).hidden[:, -1:]
    total = 0.0
    for token in pair.continuation:
        total += float(net.logits(hidden)[0, -1].log_softmax(-1)[token])
        hidden = net(torch.tensor([[token]]), cache=cache).hidden
    return total


@pytest.mark.parametrize("mixer", shipped_types())
@torch.inference_mode()
def test_cached_decoding_scores_as_one_pass_does(mixer):
    net = model(**uniform(mixer)).double()
    scored = [total for total, _ in LoopedScorer(net).loglikelihoods(PAIRS).results]
    assert scored == pytest.approx([decoded(net, pair) for pair in PAIRS], abs=1e-9)


@pytest.mark.parametrize("mixer", shipped_types())
@torch.inference_mode()
def test_nothing_is_left_of_the_request_before(mixer):
    """State and cache belong to one request: asked again after others, each answers the same bits."""
    scorer = LoopedScorer(model(**uniform(mixer)))
    first = scorer.loglikelihoods(PAIRS[:1]).results
    prompts = [list(PAIRS[2].context), list(PAIRS[3].context)]
    said = scorer.continuations(prompts, 5, lambda ids: False).results
    scorer.loglikelihoods(PAIRS)
    assert scorer.continuations(prompts, 5, lambda ids: False).results == said
    assert scorer.loglikelihoods(PAIRS[:1]).results == first


@pytest.mark.parametrize("mixer", shipped_types())
@torch.inference_mode()
def test_one_loop_is_the_plain_stack(mixer):
    """T = 1, and a deeper model run one loop deep, score as the blocks applied once by hand."""
    net = model(**uniform(mixer, n_loops=3)).double()
    plain_config = ModelConfig.model_validate(net.config.model_dump() | {"n_loops": 1})
    plain = LoopedLM(plain_config).double().eval()
    weights = net.state_dict()
    plain.load_state_dict(weights | {"rho": weights["rho"][:1]} if "rho" in weights else weights)
    one = LoopedScorer(plain).loglikelihoods(PAIRS)
    view = LoopedScorer(net.at_depth(1)).loglikelihoods(PAIRS)
    assert one.results == view.results
    assert set(one.loops) == set(view.loops) == {1}
    deeper = LoopedScorer(net).loglikelihoods(PAIRS).results
    assert [total for total, _ in deeper] != pytest.approx([total for total, _ in one.results], abs=1e-3)


@torch.inference_mode()
def test_a_view_at_another_depth_decodes_at_that_depth():
    net = model(n_loops=2)
    prompts = [[1, 2, 3], [4] * 9]
    for depth in (1, 2, 4):
        assert generate(net.at_depth(depth), prompts, max_new_tokens=6) == generate(
            net, prompts, max_new_tokens=6, n_loops=depth
        )
