"""Check what a user's function is, and what it returns."""

from __future__ import annotations

import inspect
import math
from numbers import Real
from typing import Any


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


def number_fault(value: Any, low: float | None = None, high: float | None = None) -> str:
    """Return why a value is no finite number in [low, high], or ""; None leaves a side open."""
    if not isinstance(value, Real):
        return f"is of type {type(value).__name__}, and no number"
    try:
        number = float(value)
    except OverflowError:  # of a whole number
        number = math.inf
    if not math.isfinite(number):
        return f"is {number}, and not finite"
    if (low is not None and number < low) or (high is not None and number > high):
        return f"is {number:g}, outside [{_side(low)}, {_side(high)}]"
    return ""


def _side(bound: float | None) -> str:
    return "..." if bound is None else f"{bound:g}"
