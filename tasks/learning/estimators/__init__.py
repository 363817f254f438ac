"""Estimators turn rewards into advantages. This file has what they read and return.

An estimator is a function ``(groups, choice) -> advantages``. ``groups`` are those of a whole batch
(the leaves of each question), ``choice`` is the row's section ``estimator``
(params/schema/algorithms.py). Every leaf gets an advantage for each of its S sampled tokens.
Observed tokens are not in an episode, so they enter no statistic. Dimension letters are those of
tasks/trees/tree.py.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

Floats = NDArray[np.float64]
EPSILON = 1e-6


@dataclass(frozen=True)
class LeafTrajectory:
    """The trajectory of one leaf: S sampled tokens in E environment steps.

    The trajectory's whole reward is ``reward`` plus the sum of ``token_rewards``; estimators
    without a time axis use this sum, the others get ``reward`` at the last token (or step).
    ``whole`` is that sum where it is known free of rounding, so that equal rewards stay equal in
    whatever steps they were given.
    """

    reward: float  # at the end, length shaping included; without the rewards of steps
    token_rewards: Floats  # [S] rewards of steps at their last tokens, less KL penalties
    tokens: NDArray[np.int64]  # [S] identity in the tree: equal where leaves share the token
    steps: NDArray[np.int64]  # [S] environment step of each token: 0, ..., E - 1, none left out
    states: tuple[str, ...]  # [E] the observation that each step acted on
    values: Floats | None = None  # [S] a critic's V(s) before each token
    whole: float | None = None  # reward + sum(token_rewards)
    parts: Mapping[str, float] | None = None  # what each part of the reward added; where wanted


Group = Sequence[LeafTrajectory]  # the L leaves of one question
Advantages = list[list[Floats]]  # group, leaf -> [S]
Estimator = Callable[[Sequence[Group], Any], Advantages]
