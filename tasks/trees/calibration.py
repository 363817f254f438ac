"""How well a model's scores tell successes from failures, and how to make them probabilities."""

from __future__ import annotations

from typing import Any

import numpy as np
from numpy.typing import NDArray

from params.schema.base import Float, Frozen

Floats = NDArray[np.floating[Any]]
BINS = 10  # of equal width, as in Guo et al.
LEAST = 20  # trajectories with labels, below which a calibration is not fitted
PRIOR = 1e3  # inverse strength of a ridge, which decides only where scores separate the labels


class Calibration(Frozen):
    """p = sigmoid(logit / temperature + offset).

    The temperature is that of Guo et al. (arXiv 1706.04599, section 4.2). The offset (Platt, 1999)
    restores the share of successes, which balanced draws hide, and gives scores that were learned
    from pairs a zero.
    """

    temperature: Float = 1.0
    offset: Float = 0.0

    def probabilities(self, logits: Floats) -> Floats:
        """Return probabilities of success. [N] -> [N]"""
        scaled = np.asarray(logits, np.float64) / self.temperature + self.offset
        return np.exp(-np.logaddexp(0.0, -scaled))


def fit(logits: Floats, labels: NDArray[np.bool_]) -> Calibration | None:
    """Fit a calibration to held-out trajectories ([N] each).

    Returns None where they can't decide one: fewer than LEAST, all of one kind, or scores that are
    higher for failures.
    """
    if len(labels) < LEAST or labels.all() or not labels.any():
        return None
    from sklearn.linear_model import LogisticRegression  # a second, which most stages don't need

    fitted = LogisticRegression(C=PRIOR).fit(np.asarray(logits, np.float64)[:, None], labels)
    slope, offset = float(fitted.coef_[0, 0]), float(fitted.intercept_[0])
    return Calibration(temperature=1 / slope, offset=offset) if slope > 0 else None


def auc(scores: Floats, labels: NDArray[np.bool_]) -> float | None:
    """Return the chance that a success scores higher than a failure; None without one of each.

    A tie counts half.
    """
    if labels.all() or not labels.any():
        return None
    from sklearn.metrics import roc_auc_score

    return float(roc_auc_score(labels, scores))


def reliability(
    probabilities: Floats, labels: NDArray[np.bool_], bins: int = BINS
) -> list[dict[str, float]]:
    """Return count, mean probability and share of successes of each bin that has trajectories."""
    bin_indices = np.minimum((np.asarray(probabilities) * bins).astype(int), bins - 1)
    return [
        {
            "count": float((bin_indices == index).sum()),
            "probability": float(probabilities[bin_indices == index].mean()),
            "success": float(labels[bin_indices == index].mean()),
        }
        for index in range(bins)
        if (bin_indices == index).any()
    ]


def expected_calibration_error(
    probabilities: Floats, labels: NDArray[np.bool_], bins: int = BINS
) -> float:
    """Return the mean distance between probability and share of successes, over trajectories.

    Guo et al. (arXiv 1706.04599), equation 3.
    """
    filled = reliability(probabilities, labels, bins)
    return sum(b["count"] * abs(b["probability"] - b["success"]) for b in filled) / len(labels)
