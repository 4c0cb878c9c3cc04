"""What an evaluation charges: the tokens that passed through a model, and the loops they ran."""

from __future__ import annotations

import pytest
import torch

from lt2_platform.evaluate.tasks import Spent, placed
from tests.platform.evaluate.tiny import model


def test_spent_counts_no_padding_and_leaves_no_hook(tmp_path):
    net = model()
    with Spent(net) as spent:
        net(torch.zeros(2, 6, dtype=torch.int64), lengths=torch.tensor([6, 2]), cache=net.init_cache(2, 8))
    assert spent.loops == {2: 8}
    net(torch.zeros(1, 6, dtype=torch.int64))
    assert spent.loops == {2: 8}


def test_spent_goes_by_the_depth_of_each_pass():
    """A task may ask a model at other depths than its own."""
    net, tokens = model(), torch.zeros(1, 6, dtype=torch.int64)
    with Spent(net) as spent:
        for ask in (net, net.at_depth(5)):
            ask(tokens)
        net(tokens, n_loops=3)
    assert spent.loops == {2: 6, 5: 6, 3: 6}


def test_spent_of_a_model_that_halts_counts_no_padding():
    net = model(n_loops=4, halting={"type": "exit_gate", "threshold": 0.6})
    tokens, lengths = torch.arange(12).view(2, 6) * 7, torch.tensor([6, 2])
    with Spent(net) as spent:
        used = net(tokens, lengths=lengths).loops_used
    assert used is not None
    counted = [*used[0].tolist(), *used[1, :2].tolist()]
    assert {n: count for n, count in spent.loops.items() if count} == {n: counted.count(n) for n in counted}


@pytest.mark.parametrize("cached", [False, True])
def test_what_a_row_costs_does_not_depend_on_its_neighbours(cached):
    net, lengths = model(), (12, 3, 7)
    with Spent(net) as together:
        cache = net.init_cache(3, 12) if cached else None
        net(torch.zeros(3, 12, dtype=torch.int64), lengths=torch.tensor(lengths), cache=cache)
    with Spent(net) as alone:
        for length in lengths:
            net(torch.zeros(1, length, dtype=torch.int64))
    assert (together.loops, together.positions) == (alone.loops, alone.positions)


def test_what_is_read_in_pieces_is_charged_what_it_costs_at_once():
    net = model()
    with Spent(net) as spent:
        cache = net.init_cache(2, 12)
        for width, lengths in ((5, [5, 3]), (4, [4, 2])):
            net(torch.zeros(2, width, dtype=torch.int64), lengths=torch.tensor(lengths), cache=cache)
    assert spent.positions == 9 * 9 + 5 * 5


def test_what_is_decoded_is_charged_all_that_it_sees():
    net = model()
    with Spent(net) as whole:
        net(torch.zeros(1, 12, dtype=torch.int64))
    with Spent(net) as pieces:
        cache = net.init_cache(1, 12)
        for length in (3, 4, 1, 1, 1, 1, 1):
            net(torch.zeros(1, length, dtype=torch.int64), cache=cache)
    assert pieces.summary() == whole.summary()


def test_a_vote_costs_as_many_passes_as_it_has_votes():
    place, row = {"task": "t", "flops_per_token": 2.0}, {"metric": "m", "value": 1.0, "votes": 3}
    assert placed(row, place) == {**row, "task": "t", "flops_per_token": 6.0}
    assert placed(row | {"flops_per_token": 5.0}, place)["flops_per_token"] == 5.0  # what says so itself
    assert placed({"metric": "m", "value": 1.0}, place)["flops_per_token"] == 2.0
    assert "flops_per_token" not in placed(row, {"task": "t"})
