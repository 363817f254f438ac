"""What a comparison can tell: the noise of a difference between two agents, and its power. Pure.

Two agents are trained with S seeds each, and every policy answers the same Q questions. Their
difference at seed s and question q is d_sq = mean + a_s + b_q + e_sq with independent parts: a
crossed design of random effects (Searle, Casella and McCulloch 1992, Variance Components, chapter
4). The mean of all d_sq has the variance V(S, Q) = Var a / S + Var b / Q + Var e / (S Q).
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Callable
from dataclasses import dataclass
from statistics import NormalDist

import numpy as np
from numpy.typing import NDArray

MOST = 10**6  # seeds or questions; more is no advice


@dataclass(frozen=True)
class Noise:
    """The variances of the parts of a difference."""

    seeds: float  # Var a
    questions: float  # Var b
    rest: float  # Var e

    def error(self, seeds: int, questions: int) -> float:
        """Return the standard error of the mean difference, the root of V(S, Q)."""
        of_rest = self.rest / (seeds * questions)
        return float(np.sqrt(self.seeds / seeds + self.questions / questions + of_rest))

    def resampled_error(self, seeds: int, questions: int) -> float:
        """Return the standard error that ``intervals.interval_over_seeds`` sees, on average.

        Resampling draws a seed w times, with Var w = 1 - 1 / S, and a question u times, so the mean
        varies by Var a (1 - 1 / S) / S + Var b (1 - 1 / Q) / Q + Var e Var(w u) / (S Q) with
        Var(w u) = (2 - 1 / S) (2 - 1 / Q) - 1: up to three times the rest (Owen 2007).
        """
        S, Q = seeds, questions
        of_rest = self.rest * ((2 - 1 / S) * (2 - 1 / Q) - 1) / (S * Q)
        of_both = self.seeds * (1 - 1 / S) / S + self.questions * (1 - 1 / Q) / Q
        return float(np.sqrt(of_both + of_rest))


def noise_of(differences_SQ: NDArray[np.float64]) -> Noise:
    """Estimate the variances from the mean squares of a two-way layout. [S, Q]

    E(MS_seeds) = Var e + Q Var a, E(MS_questions) = Var e + S Var b, E(MS_rest) = Var e (Searle,
    Casella and McCulloch 1992, chapter 4); an estimate below 0 is 0. With one seed Var a is not
    known and is 0, and Var b holds Var e. Raises ValueError for fewer than two questions.
    """
    S, Q = differences_SQ.shape
    if Q < 2:
        raise ValueError(f"{Q} questions have no spread: ask at least two")
    deviations_SQ = differences_SQ - differences_SQ.mean()
    seeds_S, questions_Q = deviations_SQ.mean(axis=1), deviations_SQ.mean(axis=0)
    of_questions = S * float(questions_Q @ questions_Q) / (Q - 1)
    if S == 1:
        return Noise(0.0, of_questions, 0.0)
    rest_SQ = deviations_SQ - seeds_S[:, None] - questions_Q
    rest = float((rest_SQ**2).sum()) / ((S - 1) * (Q - 1))
    of_seeds = Q * float(seeds_S @ seeds_S) / (S - 1)
    return Noise(max(0.0, of_seeds - rest) / Q, max(0.0, of_questions - rest) / S, rest)


def smallest_difference(
    noise: Noise, seeds: int, questions: int, power: float = 0.8, confidence: float = 0.95
) -> float:
    """Return the true difference whose interval leaves out 0 with probability ``power``.

    z_{1 - alpha / 2} E + z_power sqrt V(S, Q), the normal approximation, as in Miller 2024 (arXiv
    2411.00640, section 5) for one sample of questions. E, which decides the width of the interval,
    is ``resampled_error``, or sqrt V where that is more. With few seeds the result is too small:
    their own spread is then hardly known (Colas, Sigaud and Oudeyer 2018, arXiv 1806.08295).
    """
    normal, error = NormalDist(), noise.error(seeds, questions)
    width = max(error, noise.resampled_error(seeds, questions))
    return normal.inv_cdf(0.5 + confidence / 2) * width + normal.inv_cdf(power) * error


def seeds_needed(difference: float, noise: Noise, questions: int) -> int | None:
    """Return the least S >= 2 whose ``smallest_difference`` is no more than ``difference``.

    The questions stay as many as they are. None where more than MOST seeds would be needed.
    """
    return _least(2, lambda S: smallest_difference(noise, S, questions) <= abs(difference))


def questions_needed(difference: float, noise: Noise, seeds: int) -> int | None:
    """Return the least Q >= 2, as ``seeds_needed`` does for S; the seeds stay as they are."""
    return _least(2, lambda Q: smallest_difference(noise, seeds, Q) <= abs(difference))


def _least(first: int, enough: Callable[[int], bool]) -> int | None:
    """Return the least number from ``first`` on that is enough, by bisection; None above MOST."""
    if not enough(MOST):
        return None
    offset = bisect_left(range(first, MOST), True, key=enough)
    return first + offset
