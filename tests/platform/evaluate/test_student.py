"""Student's tests beside scipy's."""

from __future__ import annotations

import math

import numpy as np
import pytest
from scipy import stats

from lt2_platform.evaluate.student import mean_std, two_sided, welch


@pytest.mark.parametrize(("n", "m"), [(2, 2), (2, 7), (5, 3), (40, 30)])
@pytest.mark.parametrize("apart", [0.0, 0.5, 3.0, 500.0])
def test_welchs_test_is_scipys(n, m, apart):
    random = np.random.default_rng(n)
    a, b = random.normal(size=n).tolist(), (3 * random.normal(size=m) + apart).tolist()
    expected = stats.ttest_ind(a, b, equal_var=False).pvalue
    assert welch(a, b) == pytest.approx(expected, rel=1e-9, abs=0)


def test_welchs_test_needs_a_spread():
    assert welch([1.0], [1.0, 2.0]) is None
    assert welch([], [1.0, 2.0]) is None
    assert welch([1.0, 1.0], [2.0, 2.0]) is None
    assert mean_std([0.7] * 3) == (pytest.approx(0.7), 0.0)  # the sums' rounding is no spread
    assert welch([0.7] * 3, [0.8] * 3) is None
    assert welch([0.5] * 3, [0.8, 0.9]) == pytest.approx(2 * stats.t.sf(7, 1))  # 0.35 / 0.05


@pytest.mark.parametrize("value", [math.nan, math.inf])
def test_of_a_run_that_diverged_no_p_value_is_known(value):
    assert welch([value, 3.0], [2.0, 2.1]) is None
    assert welch([2.0, 2.1], [value, value]) is None


@pytest.mark.parametrize("degrees", [1, 1.3, 2, 9, 10_000])
@pytest.mark.parametrize("t", [0.0, 0.4, 3.0, 20.0])
def test_both_tails(t, degrees):
    assert two_sided(t, degrees) == pytest.approx(2 * stats.t.sf(t, degrees), rel=1e-9, abs=0)
