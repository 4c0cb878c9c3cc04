"""What a token is drawn from, when a continuation ends, and which requests are refused."""

from __future__ import annotations

import pytest
import torch

from lt2.config import ConfigError
from lt2.generate import generate, sample
from lt2.voting import drawn_models
from tests.lt2.tiny import model

SHARES = torch.tensor([0.1, 0.4, 0.2, 0.3], dtype=torch.float64)


@pytest.mark.parametrize("temperature", [1.0, 0.5])
@pytest.mark.parametrize(
    ("top_k", "top_p", "kept"),
    [
        (None, None, [0, 1, 2, 3]),
        (1, None, [1]),
        (3, None, [1, 2, 3]),
        (9, None, [0, 1, 2, 3]),
        (None, 0.39, [1]),
        (None, 0.41, [1, 3]),
        (None, 0.71, [1, 2, 3]),
        (None, 1.0, [0, 1, 2, 3]),
        (3, 0.77, [1, 3]),  # 7/9 of what top_k leaves
        (3, 0.78, [1, 2, 3]),
    ],
)
def test_tokens_are_drawn_by_their_shares_of_what_is_kept(temperature, top_k, top_p, kept):
    logits = (SHARES.log() * temperature + 5).expand(200, -1)
    drawn = sample(logits, temperature, top_k, top_p, [torch.Generator().manual_seed(row) for row in range(200)])
    shares = torch.zeros_like(SHARES)
    shares[kept] = SHARES[kept]
    assert drawn.tolist() == [
        torch.multinomial(shares, 1, generator=torch.Generator().manual_seed(row)).item() for row in range(200)
    ]
    assert set(drawn.tolist()) == set(kept)


@pytest.mark.parametrize("seed", [7, -(2**63), 2**64 - 3])
def test_row_r_draws_by_the_seed_plus_r(seed):
    net, prompts, request = model(), [[1, 2], [3], [4, 5, 6]], {"max_new_tokens": 6, "temperature": 1.5}
    alone = [generate(net, [row], seed=seed + r, **request)[0] for r, row in enumerate(prompts)]
    assert generate(net, prompts, seed=seed, **request) == alone


def test_a_row_ends_at_its_end_token_at_what_stops_it_or_at_its_length_and_the_others_go_on():
    net, prompts = model(), [[1, 2], [3], [4, 5, 6]]
    whole = generate(net, prompts, max_new_tokens=6)
    ends = lambda eos: [(row + [eos])[: (row + [eos]).index(eos) + 1][:6] for row in whole]  # noqa: E731
    for eos in {token for row in whole for token in row}:
        assert generate(net, prompts, max_new_tokens=6, eos_id=eos) == ends(eos)
        stopped = generate(net, prompts, max_new_tokens=6, stop=lambda new, eos=eos: new[-1] == eos)
        assert stopped == ends(eos)


def test_draws_of_a_random_layout_vote_on_every_token():
    mixers = {"attention": {"type": "full"}, "mixer": {"type": "window", "window": 2}}
    net = model({"type": "random", "fraction": 0.3, "votes": 3, **mixers}, n_layers=4)
    texts = [[1, 2], [3]]
    for row, new in zip(texts, generate(net, texts, max_new_tokens=8)):
        for token in new:
            last = [draw.logits(draw(torch.tensor([row])).hidden[0, -1]) for draw in drawn_models(net)]
            assert token == torch.stack(last).softmax(-1).mean(0).argmax()
            row.append(token)


def test_another_depth_is_that_of_every_token():
    net, texts = model(), [[1, 2], [3]]
    found = generate(net, texts, max_new_tokens=6, n_loops=1)
    assert found != generate(net, texts, max_new_tokens=6)
    for row, new in zip(texts, found):
        for token in new:
            assert token == net.logits(net(torch.tensor([row]), n_loops=1).hidden[0, -1]).argmax()
            row.append(token)


def test_nothing_asked_for_is_nothing_given():
    assert generate(model(), [[1], [2]], max_new_tokens=0) == [[], []]
    assert generate(model(), [], max_new_tokens=3) == []


@pytest.mark.parametrize(
    ("asked", "message"),
    [
        ({"prompts": [[1], []]}, "prompt 1 has no tokens"),
        ({"prompts": [[1], [23]]}, "prompt 1 has a token outside the vocabulary of 23"),
        ({"prompts": [[0, -1]]}, "prompt 0 has a token outside the vocabulary of 23"),
        ({"max_new_tokens": -1}, "max_new_tokens is -1"),
        ({"temperature": -0.1}, "temperature is -0.1"),
        ({"top_k": 0}, "top_k is 0"),
        ({"top_p": 0.0}, "top_p is 0.0"),
        ({"top_p": 1.1}, "top_p is 1.1"),
    ],
)
def test_what_cannot_be_asked_for_is_told(asked, message):
    with pytest.raises(ConfigError, match=message):
        generate(model(), **{"prompts": [[22]], "max_new_tokens": 1} | asked)
