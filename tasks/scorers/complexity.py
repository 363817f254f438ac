"""Tell by its text alone whether an answer would take the mathematics verifier too long.

Only what is huge by its plain numbers is refused: powers, towers of powers, factorials and
binomials whose value has too many digits. All else, such as symbols with large exponents and sums
with many terms, is often decided at once; where it is not, processor time is the bound
(maths_worker.py).
"""

from __future__ import annotations

import math
import re
from collections.abc import Callable
from functools import partial

DEEPEST = 24  # brackets inside each other
MOST_DIGITS = 500_000  # of a number; 100000! has 456,574
_LARGEST = 1e18  # larger values count as this one: as an exponent, it is too large already

_VALUE = r"(\d+(?:\.\d+)?)"
_NO_INDEX = r"(?<![_\d.])"  # x_2^{9} is no power of 2
_POWER = re.compile(rf"{_NO_INDEX}{_VALUE}\s*\^\s*(?:\{{\s*([+-]?)\s*{_VALUE}\s*\}}|()(\d+))")
_FACTORIAL = re.compile(rf"{_NO_INDEX}{_VALUE}\s*!(?!\s*!)")
_BINOMIAL = re.compile(rf"binom\s*\{{\s*{_VALUE}\s*\}}\s*\{{\s*{_VALUE}\s*\}}")
_IN_PARENTHESES = re.compile(rf"\(\s*{_VALUE}\s*\)")
Magnitude = Callable[[re.Match[str]], float]  # the decimal logarithm of an operation's value
_DEPTH = dict.fromkeys("{([", 1) | dict.fromkeys("})]", -1)


def too_complex(formula: str) -> bool:
    """Return whether a LaTeX formula is nested too deeply or has a number with too many digits."""
    return _depth(formula) > DEEPEST or _has_huge_number(formula)


def _depth(formula: str) -> int:
    deepest = depth = 0
    for sign in formula:
        depth = max(0, depth + _DEPTH.get(sign, 0))
        deepest = max(deepest, depth)
    return deepest


def _has_huge_number(formula: str) -> bool:
    """Put values in place of operations on plain numbers, innermost first, until one is huge."""
    before = None
    while formula != before:
        before = formula
        for pattern, magnitude in _OPERATIONS:
            if any(abs(magnitude(matched)) > MOST_DIGITS for matched in pattern.finditer(formula)):
                return True
            formula = pattern.sub(partial(_value, magnitude), formula)
    return False


def _value(magnitude: Magnitude, matched: re.Match[str]) -> str:
    """Return about the value of an operation, from 1 to the largest."""
    return f" {round(10 ** min(max(magnitude(matched), 0.0), math.log10(_LARGEST)))} "


def _number(digits: str) -> float:
    return min(float(digits), _LARGEST)


# ---- operations


def _power(matched: re.Match[str]) -> float:
    base, sign, exponent = (group for group in matched.groups() if group is not None)
    size = _number(exponent) * math.log10(_number(base) or 1.0)
    return -size if sign == "-" else size


def _factorial(matched: re.Match[str]) -> float:
    return math.lgamma(_number(matched[1]) + 1) / math.log(10)


def _binomial(matched: re.Match[str]) -> float:
    above, below = _number(matched[1]), _number(matched[2])
    if below >= above:
        return 0.0
    ways = math.lgamma(above + 1) - math.lgamma(below + 1) - math.lgamma(above - below + 1)
    return ways / math.log(10)


def _itself(matched: re.Match[str]) -> float:
    return math.log10(_number(matched[1]) or 1.0)


_OPERATIONS: tuple[tuple[re.Pattern[str], Magnitude], ...] = (
    (_POWER, _power),
    (_FACTORIAL, _factorial),
    (_BINOMIAL, _binomial),
    (_IN_PARENTHESES, _itself),
)
