"""The part ``format``: what a broken format earns, or a response without an answer."""

from __future__ import annotations

from params.schema.base import Float, Frozen
from tasks.rewards.contract import Ending, PartKind, plain


class Format(Frozen):
    """The settings."""

    broken: Float = -1.0  # the value where the format is broken or no answer can be extracted


def value(settings: Format, ending: Ending) -> float:
    """Return ``broken`` or 0. An episode of a world needs no answer."""
    return 0.0 if ending.sound else settings.broken


def bounds(settings: Format) -> tuple[float, float]:
    """Return the lowest and the highest value."""
    return min(0.0, settings.broken), max(0.0, settings.broken)


PART = PartKind(Format, plain(value), bounds)
