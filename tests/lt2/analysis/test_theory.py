"""The paper's appendix, statement by statement."""

from __future__ import annotations

import doctest
import itertools
import math
import random
import re
from pathlib import Path

import pytest
import torch

from lt2.analysis import theory
from lt2.ops.recurrence.gated_delta import gated_delta_rule
from tests.lt2.tiny import model


def unit_keys(count: int, d: int, seed: int = 0) -> list[torch.Tensor]:
    x = torch.randn(count, d, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)
    return list(x / x.norm(dim=1, keepdim=True))


def orthogonal(d: int, seed: int) -> torch.Tensor:
    return torch.linalg.qr(torch.stack(unit_keys(d, d, seed)))[0]


@pytest.mark.parametrize("n_loops", [1, 2, 4, 6])
def test_identical_keys_collapse_to_rank_one(n_loops: int):
    (key,), betas = unit_keys(1, 8), [0.3 + 0.2 * i for i in range(n_loops)]
    product = theory.transition([key] * n_loops, betas)
    torch.testing.assert_close(product, theory.householder(key, theory.collapsed_beta(betas)), rtol=0, atol=1e-14)
    assert theory.update_rank(product) == 1


@pytest.mark.parametrize("n_loops", [1, 2, 4, 6])
def test_orthogonal_keys_give_rank_t_and_add(n_loops: int):
    keys, betas = list(orthogonal(8, 1)[:n_loops]), [0.3 + 0.2 * i for i in range(n_loops)]
    product = theory.transition(keys, betas)
    summed = torch.eye(8, dtype=torch.float64) - sum(b * torch.outer(k, k) for b, k in zip(betas, keys))
    torch.testing.assert_close(product, summed, rtol=0, atol=1e-14)
    assert theory.update_rank(product) == n_loops


def test_independent_keys_give_rank_t_up_to_the_key_dimension():
    for n_loops in range(1, 12):
        assert theory.update_rank(theory.transition(unit_keys(n_loops, 8), [0.9] * n_loops)) == min(n_loops, 8)


def test_one_factor_with_beta_two_swaps_two_coordinates():
    for i, j in itertools.combinations(range(5), 2):
        swap = list(range(5))
        swap[i], swap[j] = j, i
        factor = theory.householder(theory.transposition_key(i, j, 5))
        torch.testing.assert_close(factor, theory.permutation_matrix(swap), rtol=0, atol=1e-15)


@pytest.mark.parametrize("d", [1, 2, 3, 7, 16])
@pytest.mark.parametrize("seed", [0, 1])
def test_every_orthogonal_matrix_is_a_product_of_at_most_d_factors(d: int, seed: int):
    target = orthogonal(d, seed)
    for q in (target, torch.cat([-target[:1], target[1:]])):  # both determinants
        keys = theory.reflections_of(q)
        assert len(keys) <= d
        assert (-1) ** len(keys) == round(torch.linalg.det(q).item())
        product = theory.transition(keys, [2.0] * len(keys)) if keys else torch.eye(d, dtype=torch.float64)
        torch.testing.assert_close(product, q, rtol=0, atol=1e-13)


def test_the_identity_needs_no_factor_and_a_general_matrix_is_refused():
    assert theory.reflections_of(torch.eye(4)) == []
    with pytest.raises(ValueError, match="not orthogonal"):
        theory.reflections_of(2 * torch.eye(3))


@pytest.mark.parametrize("n", [2, 3, 4, 5])
def test_every_permutation_takes_at_most_n_minus_one_factors(n: int):
    for permutation in itertools.permutations(range(n)):
        swaps = theory.transpositions_of(permutation)
        assert len(swaps) <= n - 1
        product = torch.eye(n, dtype=torch.float64)
        for i, j in swaps:
            product = product @ theory.householder(theory.transposition_key(i, j, n))
        torch.testing.assert_close(product, theory.permutation_matrix(permutation), rtol=0, atol=1e-14)


@pytest.mark.parametrize("n", [3, 5])
def test_prefix_products_of_the_symmetric_group(n: int):
    """Against composition of tuples, over words long enough to visit the group."""
    draw, word = random.Random(0), []
    for _ in range(200):
        word.append(draw.sample(range(n), n))
    state = tuple(range(n))
    for permutation, matrix in zip(word, theory.prefix_products(word, n)):
        state = tuple(permutation[i] for i in state)
        torch.testing.assert_close(matrix, theory.permutation_matrix(state), rtol=0, atol=1e-12)


def test_the_shipped_delta_rule_tracks_s5_with_n_minus_one_steps_per_token():
    """The op itself (g none, beta 2, v 0): its state transition is the product of theory's factors."""
    n, draw = 5, random.Random(1)
    word = [draw.sample(range(n), n) for _ in range(12)]
    keys, betas = [], []
    for permutation in word:
        swaps = theory.transpositions_of(permutation)[::-1]  # the op applies its first key first
        keys += [theory.transposition_key(i, j, n) for i, j in swaps]
        betas += [2.0] * len(swaps)
    k, beta = torch.stack(keys)[None, :, None], torch.tensor(betas, dtype=torch.float64)[None, :, None]
    start = torch.eye(n, dtype=torch.float64)[None, None]
    _, state = gated_delta_rule(k, k, torch.zeros_like(k), None, beta, initial_state=start, output_final_state=True)
    torch.testing.assert_close(state[0, 0], theory.prefix_products(word, n)[-1], rtol=0, atol=1e-12)


@pytest.mark.parametrize("seed", range(5))
def test_the_product_never_expands(seed: int):
    generator = torch.Generator().manual_seed(seed)
    betas = (2 * torch.rand(10, generator=generator, dtype=torch.float64)).tolist()
    alphas = list(torch.rand(10, 6, generator=generator, dtype=torch.float64))
    keys = unit_keys(10, 6, seed)
    assert torch.linalg.matrix_norm(theory.transition(keys, betas), 2) <= 1 + 1e-12
    assert torch.linalg.matrix_norm(theory.transition(keys, betas, alphas), 2) <= 1 + 1e-12
    assert torch.linalg.matrix_norm(theory.householder(keys[0], 2.01), 2) > 1, "beta above 2 does expand"


@pytest.mark.parametrize(("window", "n_loops"), [(1, 3), (2, 1), (3, 2), (4, 4), (5, 3)])
def test_window_reach_combinatorially_and_in_a_real_looped_layer(window: int, n_loops: int):
    layout = {"type": "uniform", "mixer": {"type": "window", "window": window}}
    net = model(layout, n_layers=1, n_loops=n_loops, vocab_size=32)
    expected = set(range(31 - theory.window_reach(window, n_loops), 31))
    assert theory.reach(theory.window_pattern(window), 30, n_loops) == expected
    assert theory.receptive_field(net, 32, 30) == expected


def test_the_reach_of_a_stack_is_that_of_all_its_layers_and_loops():
    net = model({"type": "uniform", "mixer": {"type": "window", "window": 3}}, n_layers=2, n_loops=3, vocab_size=32)
    assert theory.receptive_field(net, 32, 31) == set(range(31 - 6 * 2, 32))
    assert theory.receptive_field(net, 32, 31, n_loops=1) == set(range(31 - 2 * 2, 32))
    assert theory.receptive_field(net, 32, 3) == {0, 1, 2, 3}


def test_one_full_or_recurrent_layer_reaches_everything():
    for mixer in ("full", "gdn"):
        net = model({"type": "uniform", "mixer": {"type": mixer}}, n_layers=1, n_loops=1, vocab_size=16)
        assert theory.receptive_field(net, 16, 12) == set(range(13))


def test_receptive_field_needs_one_token_per_position():
    with pytest.raises(ValueError, match="at least 40"):
        theory.receptive_field(model(), 40, 3)


@pytest.mark.parametrize("n_loops", [1, 2, 3])
def test_power_attention_reaches_far_but_not_everywhere(n_loops: int):
    strides, window, at = 5, 2, 200
    distances = {at - j for j in theory.reach(theory.power_pattern(window, strides), at, n_loops)}
    steps = [0, *(2**k for k in range(strides))]
    assert distances == {sum(s) for s in itertools.product(steps, repeat=n_loops)}
    assert max(distances) == theory.power_distance(strides, n_loops)
    claimed = 2 ** (n_loops + strides - 1)
    assert max(distances) < claimed
    assert distances != set(range(max(distances) + 1)), "the reached distances have gaps"


@pytest.mark.parametrize(("window", "n_loops"), [(64, 4), (64, 16), (256, 8)])
def test_effective_width_is_two_standard_deviations_of_the_influence(window: int, n_loops: int):
    weight = theory.window_influence(window, n_loops)
    assert len(weight) == theory.window_reach(window, n_loops)
    assert weight.sum().item() == pytest.approx(1, abs=1e-12)
    distance = torch.arange(len(weight), dtype=torch.float64)
    mean = (weight * distance).sum()
    deviation = (weight * (distance - mean).square()).sum().sqrt().item()
    assert mean.item() == pytest.approx(n_loops * (window - 1) / 2, rel=1e-12)
    assert deviation == pytest.approx(math.sqrt(n_loops * (window**2 - 1) / 12), rel=1e-12)
    assert theory.effective_width(window, n_loops) == pytest.approx(2 * deviation, rel=0.006)


def test_residual_horizon_is_the_papers_example():
    assert theory.residual_horizon(512, alpha=0.95, epsilon=1e-2) / 512 == pytest.approx(1.54, abs=0.01)


@pytest.mark.parametrize("page", ["theory.md", "python.md"])
def test_the_examples_of_a_page_run_as_printed(page):
    found = doctest.testfile(str(Path(__file__).parents[3] / "docs" / page), module_relative=False)
    assert found.failed == 0
    assert found.attempted >= 10


def test_the_page_on_theory_names_functions_that_there_are():
    page = (Path(__file__).parents[3] / "docs" / "theory.md").read_text()
    rows = [line.split("|")[3] for line in page.splitlines() if line.startswith("| ") and "function" not in line]
    names = [name for row in rows for name in re.findall(r"`(\w+)`", row)]
    assert len(names) >= 12
    assert [name for name in names if not callable(getattr(theory, name, None))] == []
