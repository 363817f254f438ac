"""The part ``program``: the reward that a program returns for its own episode, or a part of it."""

from __future__ import annotations

from params.schema.base import Float, Frozen
from tasks.rewards.contract import Ending, PartKind, plain
from tasks.trees.tree import program_said


class ProgramReward(Frozen):
    """The settings: what the program returns is multiplied by ``weight``."""

    weight: Float = 1.0
    part: str | None = None  # the name of one of its parts; null: its reward
    low: Float = 0.0  # of what it returns; anything below or above counts as these
    high: Float = 1.0
    missing: Float = 0.0  # the value where it returns none, or has failed


def value(settings: ProgramReward, ending: Ending) -> float:
    """Return the weighted reward; ``missing`` where the program has returned none."""
    said = program_said(ending.trajectory) or {}
    parts = said.get("parts") or {}
    given = said.get("reward") if settings.part is None else parts.get(settings.part)
    if given is None:
        return settings.missing
    return settings.weight * min(max(float(given), settings.low), settings.high)


def bounds(settings: ProgramReward) -> tuple[float, float]:
    """Return the lowest and the highest value."""
    ends = (settings.weight * settings.low, settings.weight * settings.high, settings.missing)
    return min(ends), max(ends)


def faults(settings: ProgramReward) -> list[str]:
    """Return a line where the range is empty."""
    if settings.low > settings.high:
        return [f"low {settings.low:g} exceeds high {settings.high:g}: exchange them"]
    return []


PART = PartKind(
    ProgramReward,
    plain(value),
    bounds,
    faults,
    label=lambda name, settings: name if settings.part is None else f"{name}_{settings.part}",
)
