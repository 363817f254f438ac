"""Bootstrap intervals over questions (Efron 1979). Pure."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

AT_ONCE = 100  # resamples, which bounds the memory
DIGITS = 12  # of differences, so that rounding does not decide their order


def bootstrap_interval(
    values: NDArray[np.float64], resamples: int, seed: int
) -> tuple[float, float]:
    """Return the 95 % bootstrap interval of the mean of ``values``, one a question."""
    low, high = np.percentile(_resampled_means(values, resamples, seed), [2.5, 97.5])
    return float(low), float(high)


def interval_over_seeds(
    values_SQ: NDArray[np.float64], resamples: int, seed: int
) -> tuple[float, float]:
    """Return the 95 % bootstrap interval of the mean over training seeds and questions. [S, Q]

    Each resample draws seeds and, apart from them, questions, and takes every drawn question of
    every drawn seed (the pigeonhole bootstrap of Owen 2007, Annals of Applied Statistics 1(2)). So
    the interval covers both that another seed trains another policy and that other questions could
    have been asked: all seeds answer the same ones, so several seeds are no larger exam. Where
    seeds differ much and are few, it is too narrow (Davison and Hinkley 1997, section 3.8).
    """
    draw = np.random.default_rng(seed)
    S, Q = values_SQ.shape
    means: list[float] = []
    while len(means) < resamples:
        R = min(AT_ONCE, resamples - len(means))
        times_RS = draw.multinomial(S, np.full(S, 1 / S), size=R)  # each seed is drawn
        drawn_RQ = np.take_along_axis(times_RS @ values_SQ, draw.integers(Q, size=(R, Q)), axis=1)
        means += (drawn_RQ.mean(axis=1) / S).tolist()
    low, high = np.percentile(means, [2.5, 97.5])
    return float(low), float(high)


@dataclass(frozen=True)
class Difference:
    """The mean difference between two agents over the same questions, with its interval."""

    mean: float
    low: float  # of the interval
    high: float
    probability: float  # that it is above 0: share of resamples; equal means count half


def paired_bootstrap(
    candidate: NDArray[np.float64],
    other: NDArray[np.float64],
    confidence: float,
    resamples: int,
) -> Difference:
    """Bootstrap the mean of ``candidate - other`` over questions.

    The values alone decide what comes out, in whatever order the questions are, so a difference has
    one interval wherever it is shown; the agents the other way round have its mirror image.

    Both arrays have one value a question, in the same order. Questions are drawn with both values
    (Efron and Tibshirani 1993, chapter 8; Koehn 2004 for the comparison of systems), so hard
    questions, which both fail, add no noise. The interval is two-sided: percentiles at
    ``confidence``, in [0, 1].
    Raises ValueError for arrays that are empty or of different lengths.
    """
    if candidate.shape != other.shape or not candidate.size:
        raise ValueError(
            f"{candidate.size} and {other.size} values cannot be paired: both agents must have "
            "answered the same questions, at least one"
        )
    differences = np.round(candidate - other, DIGITS)
    means = _means_of_either(np.sort(differences), np.sort(-differences), resamples)
    outside = 50 * (1 - confidence)  # %, on each side
    low, high = np.percentile(means, [outside, 100 - outside])
    better = float(np.mean(means > 0) + np.mean(means == 0) / 2)
    return Difference(float(differences.mean()), float(low), float(high), better)


def _means_of_either(
    values: NDArray[np.float64], mirrored: NDArray[np.float64], resamples: int
) -> NDArray[np.float64]:
    """Return resampled means of ``values``; those of ``mirrored``, with the sign changed."""
    if values.tolist() < mirrored.tolist():
        return -_resampled_means(mirrored, resamples, seed=0)
    means = _resampled_means(values, resamples, seed=0)
    return np.concatenate([means, -means]) if np.array_equal(values, mirrored) else means


def student_interval(values_Q: NDArray[np.float64], confidence: float) -> tuple[float, float]:
    """Return the interval of the mean of ``values_Q`` by Student's t distribution. [Q]

    For confidences near 1, whose percentiles a bootstrap would need very many resamples for. With
    fewer than two values the interval has no bounds.
    """
    mean, Q = float(values_Q.mean()), len(values_Q)
    if Q < 2:
        return -np.inf, np.inf
    from scipy.special import stdtrit  # a tenth of the import of scipy.stats, which calls it

    error = float(values_Q.std(ddof=1)) / Q**0.5
    reach = float(stdtrit(Q - 1, (1 + confidence) / 2)) * error
    return mean - reach, mean + reach


def _resampled_means(values: NDArray[np.float64], resamples: int, seed: int) -> NDArray[np.float64]:
    """Return the mean of each resample, drawn with replacement. [resamples]"""
    draws = np.random.default_rng(seed).integers(len(values), size=(resamples, len(values)))
    return np.asarray(values[draws].mean(axis=1))
