"""The part ``many_tools``: a bonus for a success with several kinds of tools, as ARPO gives it."""

from __future__ import annotations

from params.schema.base import Float, Frozen
from tasks.rewards.contract import Ending, PartKind, plain


class ManyTools(Frozen):
    """The settings."""

    bonus: Float = 0.1  # for a success with more than one kind of tool of which a call worked


def value(settings: ManyTools, ending: Ending) -> float:
    """Return the bonus or 0."""
    return settings.bonus if ending.success and len(ending.tools) > 1 else 0.0


def bounds(settings: ManyTools) -> tuple[float, float]:
    """Return the lowest and the highest value."""
    return min(0.0, settings.bonus), max(0.0, settings.bonus)


PART = PartKind(ManyTools, plain(value), bounds)
