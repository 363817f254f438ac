"""The part ``model``: the reward model's probability of success (docs/own-reward.md).

A recipe with it needs the section ``reward_model``. Evaluation and validation leave it out.
"""

from __future__ import annotations

from params.schema.base import Float, Frozen
from tasks.rewards.contract import Ending, PartKind, plain

NAME = "model"


class Model(Frozen):
    """The settings: the probability is multiplied by ``weight``."""

    weight: Float = 1.0


def value(settings: Model, ending: Ending) -> float:
    """Return the value; 0 where the format is broken and the list has the part ``format``.

    Raises ValueError where no reward model has scored the trajectory.
    """
    if not ending.sound:
        return 0.0
    if ending.estimate is None:
        raise ValueError(
            f"question {ending.question.id}, leaf {ending.leaf}: the reward has the part {NAME}, "
            "and no reward model has scored it: write the section reward_model"
        )
    return settings.weight * ending.estimate


def bounds(settings: Model) -> tuple[float, float]:
    """Return the lowest and the highest value."""
    return min(0.0, settings.weight), max(0.0, settings.weight)


PART = PartKind(Model, plain(value), bounds)
