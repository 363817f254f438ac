"""The part ``unfinished``: what an episode earns that the agent, and not its world, has ended."""

from __future__ import annotations

from params.schema.base import Float, Frozen
from tasks.rewards.contract import Ending, PartKind, plain
from tasks.trees.outcomes import ENDED_BY_AGENT


class Unfinished(Frozen):
    """The settings.

    Where acts that are not possible cost something, an agent that earns nothing else learns to end
    its episodes early, with a turn that is no act, unless that costs as much.
    """

    penalty: Float = -1.0  # the value where the agent's last turn was no act


def value(settings: Unfinished, ending: Ending) -> float:
    """Return the penalty or 0; 0 for a question without a world."""
    ended = ending.trajectory[-1].outcome in ENDED_BY_AGENT
    return settings.penalty if ending.world and ended else 0.0


def bounds(settings: Unfinished) -> tuple[float, float]:
    """Return the lowest and the highest value."""
    return min(0.0, settings.penalty), max(0.0, settings.penalty)


PART = PartKind(Unfinished, plain(value), bounds)
