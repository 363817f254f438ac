"""Numbers of a command line: functions for argparse's ``type`` that refuse what cannot work."""

from __future__ import annotations

import math
from argparse import ArgumentTypeError
from collections.abc import Callable
from typing import TypeVar

Number = TypeVar("Number", int, float)
LAST_PORT = 65535


def _number(
    kind: type[Number], told: str, fits: Callable[[Number], bool]
) -> Callable[[str], Number]:
    """Return a function that reads a number. Raises ArgumentTypeError where it does not fit."""

    def read(text: str) -> Number:
        try:
            number = kind(text)
        except ValueError:
            raise ArgumentTypeError(f"{text!r}: give {told}") from None
        if not (math.isfinite(number) and fits(number)):
            raise ArgumentTypeError(f"{text!r}: give {told}")
        return number

    return read


finite = _number(float, "a number", lambda number: True)
above_zero = _number(float, "a number above 0", lambda number: number > 0)
share = _number(float, "a number above 0, at most 1", lambda number: 0 < number <= 1)
count = _number(int, "a whole number above 0", lambda number: number > 0)
from_zero = _number(int, "a whole number from 0 on", lambda number: number >= 0)
port = _number(int, f"a port from 0 to {LAST_PORT}", lambda number: 0 <= number <= LAST_PORT)
