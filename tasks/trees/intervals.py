"""Bootstrap intervals over questions (Efron 1979)."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray


def bootstrap_interval(
    values: NDArray[np.float64], resamples: int, seed: int
) -> tuple[float, float]:
    """A 95 % interval of the mean: percentiles over resamples of the questions (Efron 1979)."""
    low, high = np.percentile(_resampled_means(values, resamples, seed), [2.5, 97.5])
    return float(low), float(high)


@dataclass(frozen=True)
class Difference:
    """How much better one agent is than another, over the same questions."""

    mean: float
    low: float  # of the interval
    high: float
    probability: float  # of being better: share of the resamples; one without a difference is half


def paired_bootstrap(
    candidate: NDArray[np.float64],
    other: NDArray[np.float64],
    confidence: float,
    resamples: int,
    seed: int,
) -> Difference:
    """Of the mean of ``candidate - other``, which hold the same questions in the same order.

    Questions are drawn, each with both of its values (Efron and Tibshirani 1993, chapter 8; Koehn
    2004 for the comparison of systems), so that hard questions, which both fail, add no noise.
    The interval is two-sided, percentiles at ``confidence``.
    Raises ValueError for arrays that are empty or of different lengths.
    """
    if candidate.shape != other.shape or not candidate.size:
        raise ValueError(
            f"{candidate.size} and {other.size} values cannot be paired: both agents must have "
            "answered the same questions, at least one"
        )
    differences = candidate - other
    means = _resampled_means(differences, resamples, seed)
    outside = 50 * (1 - confidence)  # %, on each side
    low, high = np.percentile(means, [outside, 100 - outside])
    better = float(np.mean(means > 0) + np.mean(means == 0) / 2)
    return Difference(float(differences.mean()), float(low), float(high), better)


def _resampled_means(values: NDArray[np.float64], resamples: int, seed: int) -> NDArray[np.float64]:
    draws = np.random.default_rng(seed).integers(len(values), size=(resamples, len(values)))
    return np.asarray(values[draws].mean(axis=1))
