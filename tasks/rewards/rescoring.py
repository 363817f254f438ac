"""Two scorings of the same trajectories: their means, and how far they differ over time. Pure.

Trajectories of a run are scored again by another scorer, reward or judge. Where the first one was
learned from, it is the proxy: it may rise while the other one falls (arXiv 2210.10760).
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

VALUES = ("reward", "success")
LEAST = 3  # iterations for a trend
Rows = Sequence[Mapping[str, Any]]  # a row a leaf, as tasks/reward.py's table has them
Floats = NDArray[np.float64]


@dataclass(frozen=True)
class Trend:
    """How a difference changes: a line through the means of iterations, and its 95 % interval."""

    slope: float  # an iteration
    low: float
    high: float

    @property
    def is_told(self) -> bool:
        """Return whether the interval leaves out 0."""
        return self.low > 0 or self.high < 0


def paired(own: Rows, other: Rows) -> list[dict[str, Any]]:
    """Return a row a leaf with both scorings: ``reward`` and ``other_reward``, and so on.

    Raises ValueError where they are not of the same leaves.
    """
    others = {(row["question"], row["leaf"]): row for row in other}
    if {(row["question"], row["leaf"]) for row in own} != others.keys():
        raise ValueError("the two scorings are not of the same trajectories")
    return [
        {
            "question": row["question"],
            "leaf": row["leaf"],
            **{name: float(row[name]) for name in VALUES},
            **{f"other_{name}": float(found[name]) for name in VALUES},
            "answer": found["answer"],
        }
        for row in own
        for found in [others[row["question"], row["leaf"]]]
    ]


def means(pairs: Rows) -> dict[str, float]:
    """Return the means of both scorings of some leaves, and the share on which success differs."""
    names = [name for value in VALUES for name in (value, f"other_{value}")]
    parted = [row["success"] != row["other_success"] for row in pairs]
    of_names = {name: float(np.mean([row[name] for row in pairs])) for name in names}
    return {**of_names, "parted": float(np.mean(parted))}


def trend(by_iteration: Sequence[Mapping[str, float]], value: str) -> Trend | None:
    """Return how the other scoring's mean minus the own one's changes; None in a short run."""
    from scipy.stats import linregress, t

    if len(by_iteration) < LEAST:
        return None
    gaps = [one[f"other_{value}"] - one[value] for one in by_iteration]
    fit = linregress(range(len(gaps)), gaps)
    reach = float(t.ppf(0.975, len(gaps) - 2)) * float(fit.stderr)
    return Trend(float(fit.slope), float(fit.slope) - reach, float(fit.slope) + reach)


def parted(pairs: Rows, most: int) -> list[Mapping[str, Any]]:
    """Return the leaves on which the two differ most in reward, at most one of each question."""
    order = sorted(pairs, key=lambda row: -abs(row["other_reward"] - row["reward"]))
    first: dict[str, Mapping[str, Any]] = {}
    for row in order:
        if row["other_reward"] != row["reward"]:
            first.setdefault(row["question"], row)
    return list(first.values())[:most]
