"""How long trainings report how far they are."""

from __future__ import annotations

from collections.abc import Callable, Mapping

Advance = Callable[[int, Mapping[str, float]], object]  # steps done so far, values to show


def no_advance(finished: int, shown: Mapping[str, float]) -> None:
    """Report no progress."""
