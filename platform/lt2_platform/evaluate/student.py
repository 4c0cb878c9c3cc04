"""Student's t-tests, for means of few values."""

from __future__ import annotations

import math
from collections.abc import Sequence

_SAME = 1e-12  # of the mean: a spread below it is the sums' rounding


def mean_std(values: Sequence[float]) -> tuple[float | None, float | None]:
    """Mean and sample standard deviation, 0 of equal values; None where there are too few."""
    if not values:
        return None, None
    mean = math.fsum(values) / len(values)
    if len(values) < 2:
        return mean, None
    spread = math.sqrt(math.fsum((value - mean) ** 2 for value in values) / (len(values) - 1))
    return mean, 0.0 if spread <= _SAME * abs(mean) else spread


def welch(a: Sequence[float], b: Sequence[float]) -> float | None:
    """Two-sided p-value of equal means by Welch's t-test.

    None below two values on a side, where neither side spreads, and where a value is not finite.
    """
    (mean_a, std_a), (mean_b, std_b) = mean_std(a), mean_std(b)
    if mean_a is None or mean_b is None or std_a is None or std_b is None or std_a == std_b == 0:
        return None
    if not math.isfinite(mean_a + mean_b):
        return None
    of_a, of_b = std_a**2 / len(a), std_b**2 / len(b)
    degrees = (of_a + of_b) ** 2 / (of_a**2 / (len(a) - 1) + of_b**2 / (len(b) - 1))
    return two_sided(abs(mean_a - mean_b) / math.sqrt(of_a + of_b), degrees)


def two_sided(t: float, degrees: float) -> float:
    """Both tails of Student's distribution beyond t >= 0."""
    from scipy.special import stdtr  # a tenth of a second and more, for which each command would wait

    return 2 * float(stdtr(degrees, -t))
