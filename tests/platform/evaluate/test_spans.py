"""Standard errors over spans: against those of many draws."""

import numpy as np
import pytest

from lt2_platform.evaluate.spans import GROUPS, difference, grouped, mean_of_spans


def test_the_standard_error_of_spans_with_different_numbers_of_tokens_is_that_of_many_draws():
    rng = np.random.default_rng(1)

    def draw() -> tuple[np.ndarray, np.ndarray]:
        tokens = rng.integers(1, 9, 200)
        return tokens * (2 + 0.3 * rng.standard_normal(200)), tokens

    means = [mean_of_spans(*draw())["value"] for _ in range(400)]
    assert mean_of_spans(*draw())["stderr"] == pytest.approx(np.std(means), rel=0.15)
    assert "stderr" not in mean_of_spans(np.array([6.0]), np.array([3]))
    assert mean_of_spans(np.array([6.0, 12.0]), np.array([3, 3]))["stderr"] == pytest.approx(1.0)


def test_the_difference_of_two_models_has_the_standard_error_of_many_draws_of_both():
    rng = np.random.default_rng(2)

    def draw():
        tokens = rng.integers(1, 9, 500)
        hard = 3 + rng.standard_normal(500)  # what both find hard
        first, second = (tokens * (hard + better + 0.1 * rng.standard_normal(500)) for better in (0.0, -0.2))
        return grouped(first, tokens), grouped(second, tokens), mean_of_spans(first, tokens)["stderr"]

    found = [draw() for _ in range(300)]
    apart = [difference(first, second) for first, second, _ in found]
    assert all(apart)
    values, errors = (np.array([each[name] for each in apart if each]) for name in ("value", "stderr"))
    assert values.mean() == pytest.approx(-0.2, abs=2e-3)
    assert errors.mean() == pytest.approx(values.std(), rel=0.1)
    assert errors.mean() < found[0][2] / 5


def test_groups_are_few_and_lose_nothing():
    nats, tokens = np.arange(1000.0), np.full(1000, 3)
    groups = grouped(nats, tokens)
    found = [[float(part) for part in group.split("/")] for group in groups.split()]
    assert len(found) == GROUPS
    assert [sum(column) for column in zip(*found)] == [nats.sum(), 3000]
    assert grouped(nats[:3], tokens[:3]) == "0.0000/3 1.0000/3 2.0000/3"


def test_other_spans_have_no_difference():
    one, two = grouped(np.ones(4), np.full(4, 3)), grouped(np.ones(4), np.array([3, 3, 2, 4]))
    assert difference(one, two) is None
    assert difference(one, "") is None
    assert difference("", "") is None
    assert difference(one, one) == {"value": 0.0, "n": 12, "stderr": 0.0}


@pytest.mark.filterwarnings("error")
def test_of_a_model_that_diverged_nothing_is_known():
    good, bad = grouped(np.ones(2), np.full(2, 3)), grouped(np.array([np.inf, 1.0]), np.full(2, 3))
    for pair in ((good, bad), (bad, bad)):
        found = difference(*pair)
        assert found
        assert np.isnan(found["stderr"])
