"""Paired tests between two agents that answered the same questions. Pure."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray

PERMUTATIONS = 9_999  # all 2^Q of them, where those are fewer
AT_ONCE = 200  # permutations, which bounds the memory


def permutation_test(
    candidate_Q: NDArray[np.float64], other_Q: NDArray[np.float64], seed: int
) -> float:
    """Return the two-sided p-value of a paired permutation test of the mean difference. [Q]

    Under the null hypothesis the two values of a question could as well be the other way round.
    For values of 0 and 1 this is McNemar's exact test, up to the drawing of permutations. The
    question is the unit: give the mean of a question's answers where it has several.
    """
    if len(candidate_Q) < 2 or np.array_equal(candidate_Q, other_Q):
        return 1.0  # of one question, either order is as likely
    from scipy import stats  # a second, which only comparisons of algorithms need

    result = stats.permutation_test(
        (candidate_Q, other_Q),
        lambda one, two, axis: np.mean(one - two, axis=axis),
        permutation_type="samples",
        vectorized=True,
        n_resamples=PERMUTATIONS,
        batch=AT_ONCE,
        rng=np.random.default_rng(seed),
    )
    return float(result.pvalue)


def holm(p_values: Sequence[float]) -> list[float]:
    """Return p-values adjusted for their number, in the given order.

    Rejecting those at most alpha keeps the probability of one false rejection or more at most
    alpha, whatever the tests have in common (Holm 1979, Scandinavian Journal of Statistics 6(2)).
    """
    order = sorted(range(len(p_values)), key=lambda index: p_values[index])
    adjusted, highest = [1.0] * len(p_values), 0.0
    for rank, index in enumerate(order):
        highest = max(highest, min(1.0, (len(p_values) - rank) * p_values[index]))
        adjusted[index] = highest
    return adjusted
