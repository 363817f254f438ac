"""The part ``steps``: the sum of the rewards that a world gave to the agent's acts."""

from __future__ import annotations

import math

from params.schema.base import Float, Frozen
from tasks.rewards.contract import Ending, PartKind, plain
from tasks.trees.outcomes import Outcome
from tasks.trees.tree import step_rewards


class Steps(Frozen):
    """The settings: the sum is multiplied by ``weight``."""

    weight: Float = 1.0
    # of the sum, and what an episode earns whose world the agent has broken; null: there is none
    low: Float | None = None
    high: Float | None = None


def value(settings: Steps, ending: Ending) -> float:
    """Return the weighted sum of the rewards of the episode's steps.

    A broken world earns no more than the worst episode, so no agent gains by breaking it.
    """
    earned = math.fsum(step_rewards(ending.trajectory))
    if settings.low is not None and ending.trajectory[-1].outcome == Outcome.WORLD_BROKEN:
        earned = min(earned, settings.low)
    return settings.weight * earned


def bounds(settings: Steps) -> tuple[float, float]:
    """Return the lowest and the highest value; infinite where the settings leave a side open."""
    if settings.weight == 0:
        return 0.0, 0.0
    low = -math.inf if settings.low is None else settings.low
    high = math.inf if settings.high is None else settings.high
    values = (settings.weight * low, settings.weight * high)
    return min(values), max(values)


def faults(settings: Steps) -> list[str]:
    """Return a line where the range is empty."""
    if settings.low is not None and settings.high is not None and settings.low > settings.high:
        return [f"low {settings.low:g} exceeds high {settings.high:g}: exchange them"]
    return []


PART = PartKind(Steps, plain(value), bounds, faults)
