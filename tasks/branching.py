"""When a rollout branches: entropy after a tool result (ARPO, arXiv 2507.19849, section 3.1)."""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from params.schema import Rollout


def window_entropy(entropies: NDArray[np.float32], window: int) -> float:
    """Mean normalised entropy of the first ``window`` sampled tokens, or as many as there are."""
    return float(np.mean(entropies[:window], dtype=np.float64)) if len(entropies) else 0.0


def branch_probability(initial: float, entropy: float, base: float, weight: float) -> float:
    """P = alpha + beta * (H_t - H_initial), equation 3 of ARPO; not clipped to [0, 1]."""
    return base + weight * (entropy - initial)


def wants_branch(probability: float, settings: Rollout, uniform: float) -> bool:
    """The decision: P > tau, or with ``draw`` a coin of probability clip(P, 0, 1).

    ``uniform`` in [0, 1) is drawn from the path's own seed.
    """
    if settings.draw:
        return uniform < min(max(probability, 0.0), 1.0)
    return probability > settings.threshold
