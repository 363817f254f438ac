"""Check what a user's function is, and what it returns."""

from __future__ import annotations

import inspect
import math
from numbers import Real
from typing import Any

from tasks.extensions.plain_values import plain

ROUNDING = 1e-9  # beyond a bound, which a sum of weights may be: such a number is the bound


def signature_fault(held: Any, signature: str) -> str:
    """Return why an object cannot be called as ``signature``, as in "def close(answer)", or ""."""
    if not callable(held) or inspect.isclass(held):
        return f"is no function: write {signature}"
    names = [name for name in signature.partition("(")[2].rstrip(")").split(", ") if name]
    try:
        inspect.signature(held).bind(*names)
    except TypeError:
        return f"takes other arguments than {', '.join(names)}: write {signature}"
    except ValueError:  # some functions written in C have no signature
        return ""
    return ""


def making_faults(held: Any) -> list[str]:
    """Return why an object of the class cannot be made as this project makes it."""
    settled = hasattr(held, "Settings")
    if takes(held, int(settled)):
        return []
    written = f"__init__{shown_signature(held.__init__)}"
    if settled:
        return [f"{written} does not take the settings: write def __init__(self, settings)"]
    return [
        f"{written} wants more than self, and the class has no settings: give it a nested class "
        "Settings(Frozen), or write def __init__(self)"
    ]


def takes(call: Any, count: int) -> bool:
    try:
        inspect.signature(call).bind(*[None] * count)
    except (TypeError, ValueError):
        return False
    return True


def shown_signature(call: Any) -> str:
    try:
        return str(inspect.signature(call))
    except (TypeError, ValueError):
        return "(...)"


def number_fault(value: Any, low: float | None = None, high: float | None = None) -> str:
    """Return why a value is no finite number in [low, high], or ""; None leaves a side open."""
    value = plain(value)  # NumPy's truth values are no numbers of Python
    if not isinstance(value, Real):
        return f"is of type {type(value).__name__}, and no number"
    try:
        number = float(value)
    except OverflowError:  # of a whole number
        number = math.inf
    if not math.isfinite(number):
        return f"is {number}, and not finite"
    beyond = (low is not None and number < low - ROUNDING) or (
        high is not None and number > high + ROUNDING
    )
    if beyond:
        return f"is {repr(number).removesuffix('.0')}, outside [{_side(low)}, {_side(high)}]"
    return ""


def within(number: float, low: float | None, high: float | None) -> float:
    """Return a number that ``number_fault`` accepts, at a bound where rounding has passed it."""
    above = number if low is None else max(low, number)
    return above if high is None else min(high, above)


def _side(bound: float | None) -> str:
    return "..." if bound is None else f"{bound:g}"
