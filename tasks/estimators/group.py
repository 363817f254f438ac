"""Advantages from the rewards of one group: all leaves of one question. Pure."""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

EPSILON = 1e-6


def group_relative(rewards_M: NDArray[np.float64]) -> NDArray[np.float64]:
    """A_i = (r_i - mean) / (std + 1e-6), with the sample standard deviation. [M] -> [M]

    GRPO (arXiv 2402.03300, section 4.1.2); ARPO's soft estimate is the same over all M leaves of a
    tree (arXiv 2507.19849, section 3.2). A group without spread, or of one leaf, gives exactly 0.
    """
    if len(rewards_M) < 2 or np.all(rewards_M == rewards_M[0]):
        return np.zeros_like(rewards_M)
    return (rewards_M - rewards_M.mean()) / (rewards_M.std(ddof=1) + EPSILON)
