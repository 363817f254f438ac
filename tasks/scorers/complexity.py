"""Tell by its text alone whether an answer would take the mathematics verifier too long.

These are the usual ways to write a number that no computer can write out. What is left is bounded
by processor time (maths_worker.py).
"""

from __future__ import annotations

import math
import re

DEEPEST = 24  # brackets inside each other
LONGEST_EXPONENT = 5  # digits of a number in an exponent, a factorial, or a limit of a sum

_POWER = r"\^\s*\{?\s*"
_LONG = rf"\d{{{LONGEST_EXPONENT + 1},}}"
_HUGE = re.compile(
    rf"{_POWER}[+-]?\s*{_LONG}"  # 2^{1000000}
    rf"|{_POWER}\d+\s*{_POWER}\d+\s*\^"  # 9^{9^{9^9}}
    rf"|{_LONG}\s*!|!\)\s*!\)\s*!"  # 1000000!, ((9!)!)!
    rf"|binom\s*\{{\s*(?:{_LONG}|\d+\s*\^)"  # \binom{10^9}{5}
)
_TOWER = re.compile(rf"{_POWER}(\d+)\s*{_POWER}(\d+)")
_DEPTH = dict.fromkeys("{([", 1) | dict.fromkeys("})]", -1)


def too_complex(formula: str) -> bool:
    """Return whether a LaTeX formula is nested too deeply or has a number that is too large."""
    return _depth(formula) > DEEPEST or bool(_HUGE.search(formula)) or _has_tower(formula)


def _depth(formula: str) -> int:
    deepest = depth = 0
    for sign in formula:
        depth = max(0, depth + _DEPTH.get(sign, 0))
        deepest = max(deepest, depth)
    return deepest


def _has_tower(formula: str) -> bool:
    """Return whether an exponent is a power of numbers, such as 10^9, with too many digits."""
    return any(
        int(base) > 1 and int(power) * math.log10(int(base)) >= LONGEST_EXPONENT
        for base, power in _TOWER.findall(formula)
    )
