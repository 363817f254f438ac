"""The part ``answer``: the score of the answer, or of the episode in a world."""

from __future__ import annotations

from params.schema.base import Float, Frozen
from tasks.rewards.contract import Ending, PartKind, plain


class Answer(Frozen):
    """The settings: the score is multiplied by ``weight``."""

    weight: Float = 1.0
    wrong: Float = 0.0  # the value where the score is 0


def value(settings: Answer, ending: Ending) -> float:
    """Return the value; 0 where the format is broken and the list has the part ``format``."""
    if not ending.sound:
        return 0.0
    return settings.weight * ending.score if ending.score else settings.wrong


def bounds(settings: Answer) -> tuple[float, float]:
    """Return the lowest and the highest value; a graded score may be close to 0."""
    values = (0.0, settings.weight, settings.wrong)
    return min(values), max(values)


PART = PartKind(Answer, plain(value), bounds)
